"""What can be wrong with a model, a machine, or the two together.

ProfileError           also a ValueError
├─ UnknownName         no such model, hardware or source; names the nearest
└─ DoesNotFit          the weights leave no room for KV; `least_gpus` would do
"""

from collections.abc import Iterable
from difflib import get_close_matches


class ProfileError(ValueError):
    """A model, a machine or a measurement that no cost follows from."""


class UnknownName(ProfileError):
    def __init__(self, what: str, name: str, known: Iterable[str], hint: str = "") -> None:
        names, asked = sorted(known), name.lower()
        longer = [each for each in names if asked and each.startswith(asked)]
        nearest = " or ".join(map(repr, longer or get_close_matches(asked, names, n=1)))
        question = f"did you mean {nearest}? " if nearest else ""
        super().__init__(f"unknown {what} {name!r}; {question}known: {', '.join(names)}{hint}")


class DoesNotFit(ProfileError):
    """`least_gpus`: the smallest number of GPUs of this kind that hold the model."""

    def __init__(self, message: str, least_gpus: int) -> None:
        super().__init__(message)
        self.least_gpus = least_gpus
