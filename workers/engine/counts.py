"""Which tokens a sequence has, and how often its answer has each: what penalties ask for at every draw.

Kept up by the tokens that are new, so a draw costs two copies and no walk over the history. Knows no sampling.
"""

from array import array
from collections.abc import Sequence

INT32 = next(code for code in "il" if array(code).itemsize == 4)


class TokenCounts:
    """Owned by its Sequence, whose tokens only ever grow."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._seen = array(INT32)
        self._counts = array(INT32)
        self._num_read = 0

    def read(self, tokens: Sequence[int], num_prompt: int, *, with_prompt: bool) -> tuple[bytes, bytes]:
        """(each distinct token, how often it stands behind the prompt) as int32, up to the newest token.

        Without the prompt, tokens that stand there alone are left out.
        """
        start = max(self._num_read, 0 if with_prompt else num_prompt)
        assert start <= len(tokens), f"{self._num_read} tokens were counted, {len(tokens)} are left"
        for position in range(start, len(tokens)):
            self._counts[self._place(tokens[position])] += position >= num_prompt
        self._num_read = len(tokens)
        return self._seen.tobytes(), self._counts.tobytes()

    def _place(self, token: int) -> int:
        place = self._places.setdefault(token, len(self._seen))
        if place == len(self._seen):
            self._seen.append(token)
            self._counts.append(0)
        return place
