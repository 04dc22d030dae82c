"""Makes the public methods of a class catch up first with what it has not committed yet, unless they say otherwise.

A method that is added cannot forget it. Knows no engine.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

C = TypeVar("C")
F = TypeVar("F", bound=Callable[..., Any])


def unaffected(method: F) -> F:
    """It neither reads nor changes what is not committed yet. Of a property: decorate its function."""
    method.__dict__["is_unaffected"] = True
    return method


def catches_up(owner: type[C]) -> type[C]:
    """Each public method and property that is not `unaffected` calls `_catch_up_first` first, while that is not None.

    `owner` has the attribute `_catch_up_first: Callable[[], object] | None`.
    """
    for name, value in list(vars(owner).items()):
        if name.startswith("_"):
            continue
        if isinstance(value, property):
            assert value.fget is not None and value.fset is None, f"{name} is not only read"
            setattr(owner, name, property(_catching_up(value.fget), doc=value.__doc__))
        elif callable(value):
            setattr(owner, name, _catching_up(value))
    return owner


def _catching_up(method: Callable[..., Any]) -> Callable[..., Any]:
    if getattr(method, "is_unaffected", False):
        return method

    @wraps(method)
    def caught_up(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._catch_up_first is not None:
            self._catch_up_first()
        return method(self, *args, **kwargs)

    return caught_up
