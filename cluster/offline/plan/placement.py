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
from math import inf
from statistics import fmean

from cluster.offline.plan.asked import PlanError, PlanRequest
from cluster.offline.plan.deploy import Layout
from cluster.offline.plan.estimate import estimated
from cluster.offline.plan.layouts import Layouts, Rated
from cluster.offline.plan.search import LEAST, SLACK, Effort, Found, SearchOutcome, best_of
from cluster.offline.plan.shapes import instances
from cluster.offline.plan.trial import Trial, whole
from cluster.offline.scoring.figures import Attainment
from cluster.offline.scoring.goodput import Goodput, Map, Probes, Search, TimeUp, goodput, trying

COLOCATED_UNTIL, SPLIT_UNTIL = 0.25, 0.6  # shares of the time after which no more instances are tried
MOST_ADDED = 4  # instances added to a combination that does not serve the rate after all
COARSE = 0.05  # relative tolerance of what is only to be ranked

Told = Callable[[str, str], None]  # what is tried, and how far it is


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
    """`options`: what was simulated whole and keeps the promise. `notes`: what was tried, and what was left out. Unless
    `complete` the time was up before all was tried."""

    options: tuple[Option, ...]
    notes: tuple[str, ...]
    requests: int
    wall_s: float
    complete: bool = True


class PlacementSearch:
    """One search. `each` may be an executor's `map`; `told` hears of each step: what is tried, and how far it is.

    `past`: whether a share of the time is over. Once `each` raises `TimeUp`, the answer is what is known.
    """

    def __init__(
        self,
        asked: PlanRequest,
        each: Map = map,
        told: Told = lambda what, how_far: None,
        past: Callable[[float], bool] = lambda share: False,
    ) -> None:
        self._asked = asked
        self._each = each
        self._told = told
        self._past = past
        self._requests = 0
        self._verifying = 0
        self._complete = True
        self._until = 1.0  # the share of the time that the present step may go on to
        self._notes: list[str] = []
        self._closest: tuple[float, str] = (-1.0, "")  # attained, in words

    def search(self) -> Searched:
        """Raises `PlanError` when nothing fits or nothing keeps the promise, with what comes closest."""
        begun = time.perf_counter()
        shapes = instances(self._asked)
        layouts = Layouts(self._asked, self._ranked, self._near)
        self._until = COLOCATED_UNTIL
        alike = layouts.colocated(shapes)
        self._until = SPLIT_UNTIL
        split = layouts.split(shapes)
        options = [option for layout in split if (option := self._verified(layout))]
        room = max((each.gpus for each in split), default=0)
        room = max((option.layout.gpus for option in options), default=room if not self._complete else 0)
        options += [option for layout in layouts.filled(alike, room) if (option := self._verified(layout))]
        if apart := [option for option in options if option.layout.kind == "split"]:
            best = max(apart, key=lambda option: option.value)
            helped = self._verified(replace(best.layout, kind="hybrid", routing="splitwise"))
            options += [helped] if helped else []
        if not options and self._complete:
            raise PlanError(self._no_answer())
        return Searched(tuple(options), tuple(self._notes), self._requests, time.perf_counter() - begun, self._complete)

    def _ranked(self, what: str, trials: Sequence[Trial], keep: int) -> Rated:
        if not trials:
            return []
        asked = self._asked
        left = max(0, asked.most_requests - self._requests)
        effort = Effort(asked.target, asked.seeds[:1], max(COARSE, asked.tolerance), left, asked.rate or inf)
        trials = [replace(trial, give_up=asked.target) for trial in trials]
        ranking = best_of(
            trials,
            effort,
            self._each,
            keep=keep,
            told=lambda done, total, best: self._told(what, f"{done} of {total}{_best(best)}"),
            hurry=partial(self._past, self._until),
        )
        self._requests += ranking.requests
        self._complete = self._complete and not ranking.hurried
        counts = ", ".join(f"{count} {each.value}" for each in SearchOutcome if (count := ranking.count(each)))
        best = next(iter(ranking.best), None)
        self._notes.append(f"{len(trials)} {what}: {counts}{_best(best)}")
        for found in ranking.found:
            near = found.candidate.alone
            if not found.rate and found.outcome in (SearchOutcome.HOPELESS, SearchOutcome.MEASURED):
                self._near(near, f"{found.candidate.name} would keep it for {near:.1%}, if each had it to itself")
        if best is None and ranking.hurried:
            return estimated(asked, what, trials, keep)
        return [(found.candidate, found.rate) for found in ranking.best]

    def _near(self, attained: float, words: str) -> None:
        self._closest = max(self._closest, (attained, words))

    # ---- the whole -----------------------------------------------------------------------------------------------

    def _verified(self, layout: Layout) -> Option | None:
        """Simulated whole with all seeds, grown until it serves the rate; None when it keeps no promise, or nobody
        knows in time."""
        try:
            return self._simulated(layout)
        except TimeUp:
            self._complete = False
            self._notes.append(f"not simulated in time: {layout.told}")
            return None

    def _simulated(self, layout: Layout) -> Option | None:
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
        what = f"layout {self._verifying} whole, with all seeds"
        cap = max(trial.most * SLACK, asked.rate or 0.0)
        search = Search(asked.rate or min(trial.estimate, cap) / 2.0, cap / LEAST, cap, asked.tolerance)
        found = goodput(
            Probes(trial, self._each),
            search,
            asked.slo,
            target=asked.target,
            seeds=asked.seeds,
            gpus=layout.gpus,
            on_probe=lambda rate, held: self._told(what, f"{layout.told}: {trying(rate, held)}"),
        )
        self._requests += len(found.probes) * trial.requests
        self._complete = self._complete and found.complete
        if found.rate > 0.0:
            return Option(layout, trial, found, serves)
        if not found.complete:
            raise TimeUp
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


def _best(found: Found | None) -> str:
    return f"; best {found.candidate.name}: {found.rate:.4g} requests/s" if found is not None and found.rate else ""


def _grown(layout: Layout, attained: Attainment, target: float) -> Layout:
    """One more instance of the phase whose promise breaks."""
    counts = [group.replicas for group in layout.groups]
    breaks_tpot = attained.broken(target)[:1] == ("TPOT",)
    counts[-1 if breaks_tpot else 0] += 1
    return layout.times(*counts)
