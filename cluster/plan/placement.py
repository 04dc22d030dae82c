"""The best placement for a load: split as DistServe searches it, and colocated; both judged by simulating the whole.

    fast network   prefill instances alone against TTFT, decode instances alone against TPOT, each for the most goodput
                   for its GPUs; then as many of each as the rate needs, or the GPUs allow       (algorithm 1)
    slow network   pairs that keep KV inside nodes, simulated together                           (algorithm 2)
    colocated      every shape, chunk size, and prompts first
    hybrid         the best split, its pools helping each other out as Splitwise routes

What was found phase by phase counts for nothing in the end: the layouts that are left are simulated whole, with all
seeds, and that is reported. Source: Zhong et al., DistServe (OSDI'24), section 4.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import ceil, inf
from statistics import fmean

from cluster.plan.asked import Asked, PlanError
from cluster.plan.deploy import Group, Layout
from cluster.plan.search import LEAST, SLACK, Effort, Outcome, Ranking, best_of
from cluster.plan.shapes import close_pairs, colocated, decodes, instances, prefills
from cluster.plan.trial import Trial, decode, prefill, whole
from cluster.scoring.figures import Attainment
from cluster.scoring.goodput import Goodput, Map, Probes, Search, goodput

KEPT = 3  # instances of each phase that are combined
VERIFIED = 2  # combinations that are simulated whole
MOST_ADDED = 4  # instances added to a combination that does not serve the rate after all
COARSE = 0.05  # relative tolerance of what is only to be ranked

Told = Callable[[str, int, int | None], None]  # what is being done, how much of it is, and of how much


@dataclass(frozen=True, slots=True)
class Option:
    """A layout, simulated whole. `serves`: what the seeds attained in the mean at the rate asked for, if one was."""

    layout: Layout
    trial: Trial
    goodput: Goodput
    serves: Attainment | None = None

    @property
    def value(self) -> float:
        """Goodput for each unit of weight."""
        return self.goodput.rate / self.trial.weight

    @property
    def values(self) -> list[float]:
        """By seed."""
        return [rate / self.trial.weight for rate in self.goodput.by_seed]


@dataclass(frozen=True, slots=True)
class Searched:
    """`options`: what was simulated whole and keeps the promise. `notes`: what was tried, and what was left out."""

    options: tuple[Option, ...]
    notes: tuple[str, ...]
    requests: int
    wall_s: float


class Placement:
    """One search. `each` may be an executor's `map`; `told` hears of each step."""

    def __init__(self, asked: Asked, each: Map = map, told: Told = lambda what, done, total: None) -> None:
        self._asked = asked
        self._each = each
        self._told = told
        self._requests = 0
        self._verifying = 0
        self._notes: list[str] = []
        self._closest: tuple[float, str] = (-1.0, "")  # attained, in words

    def search(self) -> Searched:
        """Raises `PlanError` when nothing fits or nothing keeps the promise, with what comes closest."""
        begun = time.perf_counter()
        shapes = instances(self._asked)
        alike = self._ranked("colocated instances", [self._alone(shape) for shape in colocated(shapes)], 1)
        split = self._close(shapes) if self._asked.network == "slow" else self._phases(shapes)
        options = [option for layout in split if (option := self._verified(layout))]
        room = max((option.layout.gpus for option in options), default=0)
        options += [option for layout in self._filled(alike, room) if (option := self._verified(layout))]
        if apart := [option for option in options if option.layout.kind == "split"]:
            best = max(apart, key=lambda option: option.value)
            helped = self._verified(replace(best.layout, kind="hybrid", routing="splitwise"))
            options += [helped] if helped else []
        if not options:
            raise PlanError(self._no_answer())
        return Searched(tuple(options), tuple(self._notes), self._requests, time.perf_counter() - begun)

    # ---- candidates ----------------------------------------------------------------------------------------------

    def _alone(self, group: Group) -> Trial:
        return whole(self._asked, Layout("colocated", (group,)))

    def _ranked(self, what: str, trials: Sequence[Trial], keep: int) -> Ranking[Trial]:
        if not trials:
            return Ranking()
        asked = self._asked
        left = max(0, asked.most_requests - self._requests)
        effort = Effort(asked.target, asked.seeds[:1], max(COARSE, asked.tolerance), left, asked.rate or inf)
        trials = [replace(trial, give_up=asked.target) for trial in trials]
        ranking = best_of(trials, effort, self._each, keep=keep, told=partial(self._told, what))
        self._requests += ranking.requests
        counts = ", ".join(f"{count} {each.value}" for each in Outcome if (count := ranking.count(each)))
        best = f"; best {ranking.best[0].candidate.name}: {ranking.best[0].rate:.4g} requests/s" if ranking.best else ""
        self._notes.append(f"{len(trials)} {what}: {counts}{best}")
        for found in ranking.found:
            near = found.candidate.alone
            if not found.rate and found.outcome in (Outcome.HOPELESS, Outcome.MEASURED):
                self._near(near, f"{found.candidate.name} would keep it for {near:.1%}, if each had it to itself")
        return ranking

    def _near(self, attained: float, words: str) -> None:
        self._closest = max(self._closest, (attained, words))

    def _phases(self, shapes: Sequence[Group]) -> list[Layout]:
        """Algorithm 1: the phases have nothing to do with each other."""
        asked = self._asked
        small = [shape for shape in shapes if shape.gpus_each < asked.gpus]
        first = self._ranked("prefill instances", [prefill(asked, group) for group in prefills(small)], KEPT)
        rest = self._ranked("decode instances", [decode(asked, group) for group in decodes(small)], KEPT)
        sized = []
        for one, two in product(first.best, rest.best):
            pair = Layout("split", (one.candidate.layout.groups[0], two.candidate.layout.groups[0]))
            sized += self._sized(pair, one.rate, two.rate)
        return self._most_valuable(sized)

    def _close(self, shapes: Sequence[Group]) -> list[Layout]:
        """Algorithm 2: both phases of a unit share nodes, so units are simulated whole."""
        units = [whole(self._asked, Layout("split", pair)) for pair in close_pairs(self._asked, shapes)]
        ranking = self._ranked("pairs inside nodes", units, VERIFIED)
        return self._most_valuable(
            [sized for found in ranking.best for sized in self._sized(found.candidate.layout, found.rate)]
        )

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

    def _filled(self, alike: Ranking[Trial], room: int) -> list[Layout]:
        """The best colocated instance as often as the rate needs; or as the split's GPUs allow, or all there are."""
        if not alike.best:
            return []
        asked, best = self._asked, alike.best[0]
        layout = best.candidate.layout
        if asked.rate is not None:
            return [made for _, made in self._sized(layout, best.rate)]
        room = asked.gpus if asked.objective == "throughput" else room
        return [layout.times(max(1, room // layout.gpus))]

    # ---- the whole -----------------------------------------------------------------------------------------------

    def _verified(self, layout: Layout) -> Option | None:
        """Simulated whole with all seeds, grown until it serves the rate; None when it keeps no promise."""
        asked = self._asked
        trial, serves = whole(asked, layout), None
        if asked.rate is not None:
            for _ in range(MOST_ADDED + 1):
                serves = self._at(trial, asked.rate)
                if serves.both >= asked.target:
                    break
                self._near(serves.both, f"{layout.told} attains {serves.both:.1%} at {asked.rate:g} requests/s")
                layout = _grown(layout, serves, asked.target)
                if layout.gpus > asked.gpus:
                    return None
                trial = whole(asked, layout)
            else:
                return None
        self._verifying += 1
        self._told("layouts simulated whole, with all seeds", self._verifying, None)
        cap = max(trial.most * SLACK, asked.rate or 0.0)
        search = Search(asked.rate or min(trial.estimate, cap) / 2.0, cap / LEAST, cap, asked.tolerance)
        probes = Probes(trial, self._each)
        found = goodput(probes, search, asked.slo, target=asked.target, seeds=asked.seeds, gpus=layout.gpus)
        self._requests += len(found.probes) * trial.requests
        if found.rate > 0.0:
            return Option(layout, trial, found, serves)
        near = found.closest
        self._near(near.attained.both, f"{layout.told} attains {near.attained.both:.1%} at {near.rate:.3g} requests/s")
        return None

    def _at(self, trial: Trial, rate: float) -> Attainment:
        seeds = self._asked.seeds
        made = list(self._each(trial, [rate] * len(seeds), seeds))
        self._requests += len(made) * trial.requests
        return Attainment(*(fmean(getattr(each, name) for each in made) for name in ("ttft", "tpot", "both", "served")))

    def _no_answer(self) -> str:
        asked = self._asked
        what = f"{asked.rate:g} requests/s" if asked.rate is not None else "any rate"
        near = f"; closest: {self._closest[1]}" if self._closest[1] else ""
        return (
            f"no placement of {asked.shape.name} on up to {asked.gpus} GPUs serves {what} with TTFT <= "
            f"{asked.slo.ttft_s:g} s and TPOT <= {asked.slo.tpot_s:g} s for {100 * asked.target:g} % of requests{near}"
        )


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


def _grown(layout: Layout, attained: Attainment, target: float) -> Layout:
    """One more instance of the phase whose promise breaks."""
    counts = [group.replicas for group in layout.groups]
    breaks_tpot = attained.broken(target)[:1] == ("TPOT",)
    counts[-1 if breaks_tpot else 0] += 1
    return layout.times(*counts)
