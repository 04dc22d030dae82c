"""Resolves the `model` of a request. Every API and both servers do it here. Pure."""

from collections.abc import Sequence

from cluster.events import ClusterError

MAX_NAME_CHARS = 128  # of a name that an error repeats


class UnknownModel(ClusterError):
    """The requested model is not served here."""


def resolve(model: str, served: Sequence[str]) -> str:
    """The served model that a request names. Empty: the only one. `served`: at least one name.

    Raises `UnknownModel`.
    """
    if model in served:
        return model
    if len(served) == 1:
        if not model:
            return served[0]
        raise UnknownModel(f"model {_shown(model)} is not served here; leave it empty or ask for {served[0]!r}")
    names = ", ".join(map(repr, served))
    if not model:
        raise UnknownModel(f"model is missing, and several are served here; ask for one of {names}")
    raise UnknownModel(f"model {_shown(model)} is not served here; ask for one of {names}")


def _shown(model: str) -> str:
    return repr(model if len(model) <= MAX_NAME_CHARS else model[:MAX_NAME_CHARS] + "...")
