"""Resolves the `model` of a request. Every API and both servers do it here. Pure."""

from collections.abc import Collection, Mapping, Sequence

from cluster.events import ClusterError
from diptych.view import Adapter

MAX_NAME_CHARS = 128  # of a name that an error repeats
MAX_NAMES = 16  # that an error lists


class UnknownModel(ClusterError):
    """The requested model is not served here."""


def adapter_named(model: str, adapters: Mapping[str, Adapter]) -> Adapter | None:
    """The adapter that a request names as its model: ADAPTER or MODEL:ADAPTER. None: it names none of these."""
    base, colon, name = model.rpartition(":")
    found = adapters.get(name)
    return found if found is not None and base == (found.model if colon else "") else None


def resolve(model: str, served: Sequence[str], adapters: Collection[str] = ()) -> str:
    """The served model that a request names. Empty: the only one. `served`: at least one name.

    `adapters`: names that it could have named too, for errors. Raises `UnknownModel`.
    """
    if model in served:
        return model
    if not model and len(served) == 1:
        return served[0]
    names = ", ".join(map(repr, [*served, *adapters][:MAX_NAMES]))
    if len(served) == 1:
        one_of = "one of " if adapters else ""
        raise UnknownModel(f"model {_shown(model)} is not served here; leave it empty or ask for {one_of}{names}")
    if not model:
        raise UnknownModel(f"model is missing, and several are served here; ask for one of {names}")
    raise UnknownModel(f"model {_shown(model)} is not served here; ask for one of {names}")


def _shown(model: str) -> str:
    return repr(model if len(model) <= MAX_NAME_CHARS else model[:MAX_NAME_CHARS] + "...")
