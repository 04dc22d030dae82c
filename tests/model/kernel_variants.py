"""Which variants of Triton's kernels are launched, as Triton tells them apart when it compiles; in its interpreter."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

Variants = set[tuple[object, ...]]


@contextmanager
def launched() -> Iterator[Variants]:
    """The variants launched inside, once it has ended."""
    variants: Variants = set()
    run = InterpretedFunction.run

    def recorded(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        variants.add(_variant(kernel, args, {name: kwargs[name] for name in kwargs.keys() - {"grid", "warmup"}}))
        return run(kernel, *args, **kwargs)

    InterpretedFunction.run = recorded
    try:
        yield variants
    finally:
        InterpretedFunction.run = run


def _variant(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[object, ...]:
    parameters = inspect.signature(kernel.fn).parameters
    unspecialized = kernel.kwargs.get("do_not_specialize") or ()
    unaligned = (*unspecialized, *(kernel.kwargs.get("do_not_specialize_on_alignment") or ()))
    found: list[object] = [kernel.fn.__name__]
    for name, value in sorted({**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}.items()):
        is_constant = name not in parameters or parameters[name].annotation is tl.constexpr
        if isinstance(value, Tensor):
            found.append((name, value.dtype, name in unaligned or value.data_ptr() % 16 == 0))
        elif is_constant or value is None:
            found.append((name, value))
        elif isinstance(value, int):
            kind = "any" if name in unspecialized else "one" if value == 1 else value % 16 == 0
            found.append((name, value >= 1 << 31, kind))
    return tuple(found)
