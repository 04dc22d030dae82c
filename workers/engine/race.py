"""Read or compute: how far to compute a prompt whose cached prefix is still being read.

    position  0 ......... first ────────> meeting <──────── read ......... cached ... total
                          computed chunk by chunk           from the back

Computing and reading run at the same time. The KV of late tokens takes the longest to compute, so these are read first.
Where the two meet, nothing is left of the cached prefix. Pure.

Source: Jin et al., Compute or load KV cache? Why not both? (arXiv 2410.03065).
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from workers.costs import CostModel

CHUNK_STEPS = 40  # a chunk may always take as long as this many empty steps


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Predicted seconds of steps. The next one also computes these `chunks` (tokens, tokens before them), and each one
    `batch` decodes with `context_tokens` together. At most `budget` tokens of a prompt fit into one.
    """

    cost: CostModel
    chunks: Sequence[tuple[int, int]]
    batch: int
    context_tokens: int
    budget: int

    def now(self, count: int, first: int) -> float:
        """Seconds to compute `count` tokens after `first` others, from the next step on."""
        return self._seconds((*self.chunks, (count, first)), count)

    def later(self, count: int, first: int) -> float:
        """The same, from a later step on."""
        return self._seconds(((count, first),), count)

    def _seconds(self, chunks: Sequence[tuple[int, int]], count: int) -> float:
        num_more = max(0, -(-count // self.budget) - 1)
        step_s = self.cost.mixed_seconds(chunks, self.batch, self.context_tokens)
        return step_s + num_more * self.cost.mixed_seconds((), self.batch, self.context_tokens)

    def tokens_within(self, step_s: float, first: int) -> int:
        """How many tokens after `first` others the next step can compute within `step_s`."""
        return self.cost.prompt_tokens_within(step_s, first, self.chunks, self.batch, self.context_tokens)

    @property
    def floor_s(self) -> float:
        """Seconds of the next step without the prompt. 0: there is none."""
        if not self.chunks and not self.batch:
            return 0.0
        return self.cost.mixed_seconds(self.chunks, self.batch, self.context_tokens)


@dataclass(frozen=True, slots=True)
class Gap:
    """The part of a cached prefix that has not arrived. Positions and counts are in tokens.

    `first`: the next one to compute. `until`: the next one that has been read; `cached` if there is none. `missing`:
    the blocks in between that are being read or could be, in their order: the first position, and in how many seconds
    each will be here. `copy_s`: to copy one from host memory to the device. `can_wait`: nothing in between is missing
    otherwise, and there is patience left. `since_s`: how long ago its turn came.
    """

    first: int
    until: int
    cached: int
    total: int
    missing: Sequence[tuple[int, float]]
    copy_s: float = 0.0
    can_wait: bool = True
    since_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Choice:
    """Compute `num_tokens` now; 0: wait for reads. `reads`: what is read, or will be, will be used."""

    num_tokens: int
    reads: bool
    seconds: float  # until the prompt is computed


def choose(gap: Gap, seconds: StepSeconds) -> Choice:
    """The fastest of waiting, computing everything, and both at once.

    A chunk cannot be interrupted if reads become faster, so it takes no longer than the prompt has waited already.
    """
    first, most = gap.first, len(gap.missing)
    rest_s = seconds.later(gap.total - gap.cached, gap.cached)
    here_s = [*accumulate((arrives_s for _, arrives_s in reversed(gap.missing)), max, initial=0.0)]

    def target(passed: int) -> int:
        """Where computing ends if it passes this many missing blocks."""
        return gap.missing[passed][0] if passed < most else gap.until

    def compute_s(passed: int) -> float:
        return seconds.now(target(passed) - first, first) if target(passed) > first else 0.0

    def read_s(passed: int) -> float:
        return here_s[most - passed]

    def both(passed: int) -> Choice:
        copy_s = (most - passed) * gap.copy_s
        return Choice(target(passed) - first, True, max(compute_s(passed), read_s(passed)) + copy_s + rest_s)

    choices = []
    if most or gap.until == gap.cached:
        choices.append(Choice(gap.total - first, False, seconds.now(gap.total - first, first)))
    if gap.until < gap.cached:
        choices.append(Choice(gap.until - first, True, compute_s(most) + rest_s))
    meeting = bisect_left(range(most), True, key=lambda passed: compute_s(passed) >= read_s(passed))
    choices += [both(passed) for passed in (meeting - 1, meeting) if passed >= 0 and target(passed) > first]
    wait_s = max(read_s(0), seconds.floor_s) + most * gap.copy_s + rest_s
    best = min(choices, key=lambda choice: choice.seconds, default=None)
    if best is None or (gap.can_wait and wait_s <= best.seconds):
        return Choice(0, True, wait_s)
    if not most:
        return best
    most_tokens = best.num_tokens if best.reads else gap.until - first
    most_s = max(gap.since_s, CHUNK_STEPS * seconds.later(0, 0))
    chunk = max(1, seconds.tokens_within(most_s, first))
    return best if chunk >= most_tokens else replace(best, num_tokens=chunk)
