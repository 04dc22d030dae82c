"""Requests made from a table of methods, so that a protocol names each method once."""

from collections.abc import Mapping
from inspect import isawaitable
from typing import Any, TypeAlias

import msgspec

Methods: TypeAlias = Mapping[str, tuple[Mapping[str, Any], Any]]
"""Name -> (the types of its parameters, the type of its result)."""
NOTHING: Mapping[str, Any] = {}


def request_types(methods: Methods, defaults: Mapping[str, Any] = NOTHING) -> dict[str, type[msgspec.Struct]]:
    """A tagged Struct of the parameters for each method, called like it. `defaults`: of parameters, by name."""

    def field(name: str, kind: Any) -> Any:
        return (name, kind, defaults[name]) if name in defaults else (name, kind)

    return {
        method: msgspec.defstruct(method, [field(*each) for each in kinds.items()], frozen=True, gc=False, tag=method)
        for method, (kinds, _) in methods.items()
    }


def replies(requests: Mapping[str, type[msgspec.Struct]], methods: Methods) -> dict[type[msgspec.Struct], Any]:
    """`RpcProtocol.calls` of these methods."""
    return {requests[method]: result for method, (_, result) in methods.items()}


async def answer(target: object, request: msgspec.Struct) -> Any:
    """What the target's method of this name returns or raises."""
    result = getattr(target, type(request).__name__)(*msgspec.structs.astuple(request))
    return await result if isawaitable(result) else result
