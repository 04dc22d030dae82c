"""Makes the public methods of a class call its `_before_use` first, unless they are marked as unaffected.

For an engine with steps that are not committed yet, and with cached statistics. New methods are covered automatically.
Knows no engine.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

C = TypeVar("C")
F = TypeVar("F", bound=Callable[..., Any])


def unaffected(method: F) -> F:
    """Mark a method that reads nothing uncommitted and changes no statistics. Of a property: decorate its function."""
    method.__dict__["is_unaffected"] = True
    return method


def catches_up(owner: type[C]) -> type[C]:
    """Each public method and property of `owner` that is not `unaffected` calls `_before_use` first."""
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
        self._before_use()
        return method(self, *args, **kwargs)

    return caught_up
