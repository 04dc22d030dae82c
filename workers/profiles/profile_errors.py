"""Errors about models, hardware, and the two together.

ProfileError           also a ValueError
├─ UnknownName         no such model, hardware or source; names the nearest
└─ DoesNotFit          the weights leave no room for KV; says how many GPUs are needed
"""

from collections.abc import Iterable
from difflib import get_close_matches


class ProfileError(ValueError):
    """No cost model follows from this model, hardware or measurement."""


class UnknownName(ProfileError):
    def __init__(self, what: str, name: str, known: Iterable[str], hint: str = "") -> None:
        names, wanted = sorted(known), name.lower()
        completions = [each for each in names if wanted and each.startswith(wanted)]
        nearest = " or ".join(map(repr, completions or get_close_matches(wanted, names, n=1)))
        question = f"did you mean {nearest}? " if nearest else ""
        super().__init__(f"unknown {what} {name!r}; {question}known: {', '.join(names)}{hint}")


class DoesNotFit(ProfileError):
    """The weights leave no room for KV."""
