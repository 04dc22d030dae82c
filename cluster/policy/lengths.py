"""How long an answer will be, before there is one: predictors that routers are handed."""

import zlib
from collections.abc import Callable

from cluster.policy.draws import Draws
from workers.request import Request

Lengths = Callable[[Request], int]  # output tokens still to come, at least 1
UNBOUNDED_TOKENS = 512  # what an answer without a bound is taken for


def asked_length(request: Request) -> int:
    """As long as the request allows. In a replayed trace, which asks for what it got, this is the truth."""
    most = request.sampling.max_tokens
    return max(1, UNBOUNDED_TOKENS if most is None else most - len(request.generated))


class Buckets:
    """The lower bound of a bucket of `width` tokens: the right one with probability `accuracy`, else one beside it.

    Stands for TetriInfer's classifier (arXiv 2401.11181: 74.9 % at a width of 200); its consumers use the lower bound.
    The same request gets the same answer, whenever it is asked.
    """

    def __init__(self, seed: int, *, width: int = 200, accuracy: float = 0.749, truth: Lengths = asked_length) -> None:
        if width < 1 or not 0.0 <= accuracy <= 1.0:
            raise ValueError(f"a bucket of {width} tokens and an accuracy of {accuracy} are not a predictor")
        self._seed, self._width, self._accuracy, self._truth = seed, width, accuracy, truth

    def __call__(self, request: Request) -> int:
        bucket = (self._truth(request) - 1) // self._width
        draws = Draws(self._seed ^ zlib.crc32(request.id.encode()))
        if draws.share() >= self._accuracy:
            bucket += 1 if bucket == 0 or draws.below(2) else -1
        return bucket * self._width + 1
