"""The best placement for a load: split as DistServe searches it, and colocated.

    first          what closed forms favor, simulated whole with one seed (`race`)
    inter-node KV  prefill instances alone against TTFT, decode instances alone against TPOT, each for the highest
                   goodput per GPU; then as many of each as the rate needs, or the GPUs allow     (algorithm 1)
    intra-node KV  pairs that keep KV inside nodes, simulated together                            (algorithm 2)
    colocated      every shape and chunk size, and prefill-first
    hybrid         the best split, whose pools help each other out as Splitwise routes

Results of single phases only rank. The remaining layouts are simulated whole, with all seeds, and only that is
reported. Source: Zhong et al., DistServe (OSDI'24), section 4.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from cluster.offline.plan.deploy import Layout, WorkerGroup
from cluster.offline.plan.estimate import rank_by_estimate
from cluster.offline.plan.layouts import Layouts, Rated, instances
from cluster.offline.plan.race import MAX_ADDED, Race, enlarged
from cluster.offline.plan.request import PlanError, PlanRequest
from cluster.offline.plan.search import SLACK, Effort, Found, SearchOutcome, best_of
from cluster.offline.plan.trial import FLOOR, Option, Trial, full_trial, rate_text
from cluster.offline.scoring.figures import Attainment
from cluster.offline.scoring.goodput import (
    MAX_STRIDE,
    NEAR_STRIDE,
    Map,
    Probes,
    Search,
    TimeUp,
    goodput,
    mean_attainment,
    trying,
)

FIRST_UNTIL, COLOCATED_UNTIL, SPLIT_UNTIL = (
    0.25,
    0.4,
    0.65,
)  # shares of the time after which no more instances are tried
COARSE = 0.05  # relative tolerance where only the ranking matters

FIRST_VERDICT, BEST_SO_FAR = "first verdict", "best so far"

OnProgress = Callable[[str, str], None]  # what is tried, how far it is


@dataclass(frozen=True, slots=True)
class PlacementResult:
    """`options`: layouts simulated whole that meet the SLO. `notes`: what was tried, and what was left out.

    Not `complete`: the time was up first.
    """

    options: tuple[Option, ...]
    notes: tuple[str, ...]
    requests: int
    wall_s: float
    complete: bool = True


class PlacementSearch:
    """One search. `each` may be an executor's `map` over `width` processes; `past` returns whether a share of the time
    is over. `first`: layouts to simulate before all others; `race` has what is known of them at any time.

    Once `each` raises `TimeUp`, the result is what is known by then.
    """

    def __init__(
        self,
        request: PlanRequest,
        each: Map = map,
        on_progress: OnProgress = lambda what, how_far: None,
        past: Callable[[float], bool] = lambda share: False,
        first: Sequence[Layout] = (),
        width: int = 1,
    ) -> None:
        self._request = request
        self._each = each
        self._on_progress = on_progress
        self._past = past
        self._requests = 0
        self._verifying = 0
        self._complete = True
        self._until = 1.0  # share of the time that the current step may use
        self._notes: list[str] = []
        self._closest: tuple[float, str] = (-1.0, "")  # attainment, description
        self._options: list[Option] = []  # simulated whole with all seeds
        self._one_seed: dict[str, Option] = {}  # by kind of layout, the best of those ranked
        self._best: Option | None = None
        self.race = Race(request, first, each, width, self._on_first, self._on_option)

    def search(self) -> PlacementResult:
        """Raises `PlanError`, with what comes closest, when nothing fits or nothing meets the SLO."""
        start_s = time.perf_counter()
        shapes = instances(self._request)
        try:
            self._search(shapes)
        except TimeUp:
            self._complete = False
        if not self._options and self._complete:
            raise PlanError(self._no_answer())
        options = list(self._options)
        if not self._complete:  # of other kinds of layout, what was simulated with one seed is known
            done = {option.layout.kind for option in options if option.goodput.complete}
            for option in (*self.race.options, *self._one_seed.values()):
                if option.layout.kind not in done and option.layout not in [each.layout for each in options]:
                    options.append(option)
        wall_s = time.perf_counter() - start_s
        return PlacementResult(tuple(options), tuple(self._notes), self._requests, wall_s, self._complete)

    def _search(self, shapes: Sequence[WorkerGroup]) -> None:
        """Raises `TimeUp`."""
        self._run_race()
        layouts = Layouts(self._request, self._ranked, self._on_near_miss)
        self._until = COLOCATED_UNTIL
        colocated = layouts.colocated(shapes)
        self._until = SPLIT_UNTIL
        split = layouts.split(shapes)
        for layout in split:
            self._verify(layout)
        room = max((each.gpus for each in split), default=0)
        room = max((option.layout.gpus for option in self._options), default=room if not self._complete else 0)
        for layout in layouts.filled(colocated, room):
            self._verify(layout)
        if splits := [option for option in self._options if option.layout.kind == "split"]:
            best = max(splits, key=lambda option: option.value)
            self._verify(replace(best.layout, kind="hybrid", routing="splitwise"))

    def _run_race(self) -> None:
        try:
            self.race.run(partial(self._past, FIRST_UNTIL))
        finally:
            self._requests += self.race.requests
        self._on_progress(FIRST_VERDICT, "decided" if self.race.decided else "not decided in its share of the time")

    def _on_first(self, layout: str, rate: float) -> None:
        self._on_progress(FIRST_VERDICT, f"trying {rate:.3g} requests/s on {layout}")

    def _on_option(self, option: Option) -> None:
        """Show it if it is the best so far."""
        if self._best is None or option.merit(self._request) > self._best.merit(self._request):
            self._best = option
            held = rate_text(self._request, option.trial, option.goodput.rate)
            self._on_progress(BEST_SO_FAR, f"at least {held}: {option.layout.description}")

    def _ranked(self, what: str, trials: Sequence[Trial], keep: int) -> Rated:
        if not trials:
            return []
        request = self._request
        left = max(0, request.max_requests - self._requests)
        tolerance = max(COARSE, request.tolerance)
        ranking = best_of(
            [replace(trial, give_up=request.target) for trial in trials],
            Effort(request.target, request.seeds[0], tolerance, left, request.rate or inf),
            self._each,
            keep=keep,
            on_progress=partial(self._on_ranked, what, len(trials)),
            time_up=partial(self._past, self._until),
        )
        self._requests += ranking.requests
        self._complete = self._complete and not ranking.timed_out
        best = next(iter(ranking.best), None)
        outcomes = Counter(found.outcome for found in ranking.found)
        counts = ", ".join(f"{outcomes[each]} {each.value}" for each in SearchOutcome if outcomes[each])
        self._notes.append(f"{len(trials)} {what}: {counts}{_best(best)}")
        for found in ranking.found:
            if not found.rate and found.outcome in (SearchOutcome.HOPELESS, SearchOutcome.MEASURED):
                trial = found.candidate
                self._on_near_miss(
                    trial.unloaded, f"{trial.name} would meet the SLO for {trial.unloaded:.1%} of requests alone"
                )
        if ranking.ended:
            raise TimeUp
        if best is None and ranking.timed_out:
            return rank_by_estimate(request, trials, keep)
        return [(found.candidate, found.rate) for found in ranking.best]

    def _on_ranked(self, what: str, trials: int, done: int, best: Found | None) -> None:
        self._on_progress(what, f"{done} of {trials}{_best(best)}")
        if best is not None and best.goodput is not None and best.rate and self._request.rate is None:
            layout = best.candidate.layout
            if layout.kind == "colocated" or len(layout.groups) > 1:  # not one phase alone
                self._one_seed[layout.kind] = Option(layout, best.candidate, best.goodput)
                self._on_option(self._one_seed[layout.kind])

    def _on_near_miss(self, attained: float, description: str) -> None:
        self._closest = max(self._closest, (attained, description))

    # ---- whole layouts -------------------------------------------------------------------------------------------

    def _verify(self, layout: Layout) -> None:
        """Simulate it whole with all seeds, enlarged until it serves the rate. Raises `TimeUp`."""
        if (option := self._simulated(layout)) is not None:
            self._options.append(option)

    def _simulated(self, layout: Layout) -> Option | None:
        """None: it does not meet the SLO."""
        request = self._request
        trial, serves = self._whole(layout), None
        if request.rate is not None:
            if request.rate > (most := trial.max_rate * SLACK):
                self._on_near_miss(0.0, f"step costs allow {layout.description} at most {most:.4g} requests/s")
                return None
            for _ in range(MAX_ADDED + 1):
                serves = self._at(trial, request.rate)
                if serves.both >= request.target:
                    break
                self._on_near_miss(
                    serves.both, f"{layout.description} attains {serves.both:.1%} at {request.rate:g} requests/s"
                )
                layout = enlarged(layout, serves, request.target)
                if layout.gpus > request.gpus:
                    return None
                trial = self._whole(layout)
            else:
                return None
        self._verifying += 1
        what = f"layout {self._verifying} whole, with all seeds"
        cap = trial.max_rate * SLACK
        begun = next((each for each in self.race.contenders if each.trial.layout == layout and each.held), None)
        start = min(cap, begun.held) if begun else min(trial.estimate, cap) / 2.0
        stride = NEAR_STRIDE if begun else MAX_STRIDE
        search = Search(max(request.rate or start, cap / FLOOR), cap / FLOOR, cap, request.tolerance, stride)
        known = {(each.rate, each.seed): each.attained for each in begun.probes} if begun else {}
        found = goodput(
            Probes(trial, self._each, known),
            search,
            request.slo,
            target=request.target,
            seeds=request.seeds,
            gpus=layout.gpus,
            on_probe=lambda rate, held: self._on_progress(what, f"{layout.description}: {trying(rate, held)}"),
        )
        self._requests += len(found.probes) * trial.requests
        self._complete = self._complete and found.complete
        if found.rate > 0.0:
            option = Option(layout, trial, found, serves)
            self._on_option(option)
            return option
        if not found.complete:
            raise TimeUp
        near = found.closest
        self._on_near_miss(
            near.attained.both, f"{layout.description} attains {near.attained.both:.1%} at {near.rate:.3g} requests/s"
        )
        return None

    def _whole(self, layout: Layout) -> Trial:
        return replace(full_trial(self._request, layout), give_up=self._request.target)

    def _at(self, trial: Trial, rate: float) -> Attainment:
        """The mean over the seeds."""
        seeds = self._request.seeds
        found = list(self._each(trial, [rate] * len(seeds), seeds))
        self._requests += len(found) * trial.requests
        return mean_attainment(found)

    def _no_answer(self) -> str:
        request = self._request
        what = f"{request.rate:g} requests/s" if request.rate is not None else "any rate"
        near = f"; closest: {self._closest[1]}" if self._closest[1] else ""
        return (
            f"no placement of {request.shape.name} on up to {request.gpus} GPUs serves {what} with TTFT <= "
            f"{request.slo.ttft_s:g} s and TPOT <= {request.slo.tpot_s:g} s for {100 * request.target:g} % of "
            f"requests{near}"
        )


def _best(found: Found | None) -> str:
    return f"; best {found.candidate.name}: {found.rate:.4g} requests/s" if found is not None and found.rate else ""
