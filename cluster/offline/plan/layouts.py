"""Which layouts deserve a closer look: instances ranked, then as many of each as the rate needs or the GPUs allow.

Who ranks the instances is given: by simulation (`placement`) or by closed forms (`estimate`). Pure.
Source: Zhong et al., DistServe (OSDI'24), algorithms 1 and 2.
"""

from collections.abc import Callable, Sequence
from itertools import product
from math import ceil

from cluster.offline.plan.asked import PlanRequest
from cluster.offline.plan.deploy import Layout, WorkerGroup
from cluster.offline.plan.shapes import close_pairs, colocated, decodes, prefills
from cluster.offline.plan.trial import Trial, decode, prefill, whole

KEPT = 3  # instances of each phase that are combined
VERIFIED = 2  # combinations that are simulated whole

Rated = list[tuple[Trial, float]]  # and the requests a second it serves, the most valuable first
Rank = Callable[[str, Sequence[Trial], int], Rated]  # what they are, they, and how many to keep
Near = Callable[[float, str], None]  # hears what comes close: the share it attains, in words


class Layouts:
    """Of one question."""

    def __init__(self, asked: PlanRequest, rank: Rank, near: Near = lambda attained, words: None) -> None:
        self._asked = asked
        self._rank = rank
        self._near = near

    def colocated(self, shapes: Sequence[WorkerGroup]) -> Rated:
        """The best instance of all shapes, chunk sizes, and prompts first."""
        trials = [whole(self._asked, Layout("colocated", (group,))) for group in colocated(shapes)]
        return self._rank("colocated instances", trials, 1)

    def split(self, shapes: Sequence[WorkerGroup]) -> list[Layout]:
        layouts = self._close(shapes) if self._asked.network == "slow" else self._phases(shapes)
        return self._most_valuable(layouts)

    def filled(self, alike: Rated, room: int) -> list[Layout]:
        """The best colocated instance as often as the rate needs; or as the split's GPUs allow, or all there are."""
        if not alike:
            return []
        asked, (best, rate) = self._asked, alike[0]
        if asked.rate is not None:
            return [made for _, made in self._sized(best.layout, rate)]
        room = asked.gpus if asked.objective == "throughput" else room
        return [best.layout.times(max(1, room // best.layout.gpus))]

    def _phases(self, shapes: Sequence[WorkerGroup]) -> list[tuple[float, Layout]]:
        """Algorithm 1: the phases have nothing to do with each other."""
        asked = self._asked
        small = [shape for shape in shapes if shape.gpus_each < asked.gpus]
        first = self._rank("prefill instances", [prefill(asked, group) for group in prefills(small)], KEPT)
        rest = self._rank("decode instances", [decode(asked, group) for group in decodes(small)], KEPT)
        sized = []
        for (one, prompts), (two, answers) in product(first, rest):
            pair = Layout("split", (one.layout.groups[0], two.layout.groups[0]))
            sized += self._sized(pair, prompts, answers)
        return sized

    def _close(self, shapes: Sequence[WorkerGroup]) -> list[tuple[float, Layout]]:
        """Algorithm 2: both phases of a unit share nodes, so units are ranked whole."""
        units = [whole(self._asked, Layout("split", pair)) for pair in close_pairs(self._asked, shapes)]
        ranked = self._rank("pairs inside nodes", units, VERIFIED)
        return [sized for trial, rate in ranked for sized in self._sized(trial.layout, rate)]

    def _sized(self, layout: Layout, *rates: float) -> list[tuple[float, Layout]]:
        """With as many instances as the rate needs, or as there are GPUs for; and what each is expected to serve. One
        rate: of a unit with one instance of each."""
        asked = self._asked
        each = rates * len(layout.groups) if len(rates) == 1 else rates
        if asked.rate is not None:
            counts = [tuple(ceil(asked.rate / rate) for rate in each)]
        else:
            most = [asked.gpus // group.gpus_each for group in layout.groups]
            counts = [(count,) * len(most) for count in range(1, min(most) + 1)]
            if len(rates) > 1:
                counts = _useful(most, each)
        sized = [(count, layout.times(*count)) for count in counts]
        fitting = [
            (min(n * rate for n, rate in zip(count, each, strict=True)), made)
            for count, made in sized
            if made.gpus <= asked.gpus
        ]
        if not fitting and asked.rate is not None:
            serves = min(each)
            words = f"{layout.told} keeps it up to {serves:.4g} requests/s, and {sized[0][1].gpus} GPUs would be needed"
            self._near(min(0.5, serves / asked.rate), words)
        return fitting

    def _most_valuable(self, sized: Sequence[tuple[float, Layout]]) -> list[Layout]:
        """By what they are expected to serve for their weight; of equals the smaller."""
        asked = self._asked

        def rank(each: tuple[float, Layout]) -> tuple[float, float]:
            rate, layout = each
            weight = sum(group.gpus * asked.weight(group.hardware) for group in layout.groups)
            if asked.rate is not None:
                return weight, -rate
            return (-rate if asked.objective == "throughput" else -round(rate / weight, 6)), weight

        return [layout for _, layout in sorted(sized, key=rank)[:VERIFIED]]


def _useful(most: Sequence[int], rates: Sequence[float]) -> list[tuple[int, ...]]:
    """For each number of the one the fewest of the other that keep up, and one less."""
    counts = set()
    for first in range(1, most[0] + 1):
        needed = ceil(first * rates[0] / rates[1])
        counts |= {(first, count) for count in (needed, needed - 1) if count >= 1}
    for second in range(1, most[1] + 1):
        needed = ceil(second * rates[1] / rates[0])
        counts |= {(count, second) for count in (needed, needed - 1) if count >= 1}
    return sorted(counts)
