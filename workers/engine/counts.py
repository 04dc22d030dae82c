"""Which tokens a sequence has, and how often its answer has each: what penalties ask for at every draw.

Kept up by the tokens that are new, so a draw costs two copies and no walk over the history. Knows no sampling.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]


class TokenCounts:
    """Owned by its Sequence, whose tokens only ever grow."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._seen = np.empty(64, np.int32)
        self._counts = np.zeros(64, np.int32)
        self._num_read = 0

    def read(self, tokens: Sequence[int], num_prompt: int, *, with_prompt: bool) -> tuple[Tokens, Tokens]:
        """(each distinct token, how often it stands behind the prompt), up to the newest token.

        Without the prompt, tokens that stand there alone are left out. The answers stay as they are for ever.
        """
        start = max(self._num_read, 0 if with_prompt else num_prompt)
        assert start <= len(tokens), f"{self._num_read} tokens were counted, {len(tokens)} are left"
        for position in range(start, len(tokens)):
            place = self._place(tokens[position])
            self._counts[place] += position >= num_prompt
        self._num_read = len(tokens)
        size = len(self._places)
        return self._seen[:size].copy(), self._counts[:size].copy()

    def _place(self, token: int) -> int:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._seen):
            self._seen = np.concatenate([self._seen, np.empty_like(self._seen)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._seen[place] = token
        return place
