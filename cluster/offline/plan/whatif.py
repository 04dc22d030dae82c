"""Two clusters against each other under the same load: what each can serve, and what each gives at the rate at hand."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

from cluster.offline.plan.compared import Difference, difference
from cluster.offline.plan.deploy import Layout
from cluster.offline.plan.estimate import Estimate, estimate, median_and_p99, thinned
from cluster.offline.plan.load import PlanLoad
from cluster.offline.plan.placement import Told
from cluster.offline.plan.search import LEAST, SLACK
from cluster.offline.plan.trial import Trial, trial_of
from cluster.offline.scoring.figures import Figures, figures, slo_text
from cluster.offline.scoring.goodput import Goodput, Map, Probes, Search, TimeUp, goodput, trying
from cluster.offline.sim.compare import Case
from workers.request import SLO

LATENCIES = ("ttft_s", "tpot_s", "e2e_s")
PERCENTILES = ("p50", "p90", "p99")


@dataclass(frozen=True, slots=True)
class WhatIfTerms:
    """What both are judged by. `rate` in requests a second."""

    load: PlanLoad
    slo: SLO
    rate: float
    target: float = 0.9
    requests: int = 300
    seeds: tuple[int, ...] = (0, 1, 2)
    tolerance: float = 0.03

    def weight(self, hardware: str) -> float:
        """A GPU is a GPU."""
        return 1.0


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two. `at_rate`: a run's figures for each seed."""

    case: Case
    goodput: Goodput
    at_rate: tuple[Figures, ...]

    @property
    def complete(self) -> bool:
        return self.goodput.complete

    @property
    def attained(self) -> list[float]:
        return [each.attainment.both for each in self.at_rate]

    def seconds(self, latency: str, percentile: str) -> list[float] | None:
        """By seed; None when some run has no request to tell it of."""
        found = [getattr(each, latency) for each in self.at_rate]
        return None if None in found else [getattr(each, percentile) for each in found]


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One figure of both, in the mean over the seeds, and how much more the second one has."""

    name: str
    unit: str
    left: float
    right: float
    difference: Difference

    @property
    def told(self) -> str:
        return f"{self.name}: {self.left:.4g} and {self.right:.4g} {self.unit}, {self.difference.told(self.unit)}"


def against(
    left: Case, right: Case, terms: WhatIfTerms, each: Map = map, told: Told = lambda what, how_far: None
) -> tuple[Side, Side]:
    """Raises what production raises for a cluster that cannot start."""
    with ThreadPoolExecutor(2) as threads:  # they wait for `each`
        one, two = (threads.submit(_side, case, terms, each, told) for case in (left, right))
        return one.result(), two.result()


def trial_for(case: Case, terms: WhatIfTerms) -> Trial:
    return trial_of(terms, case, Layout(case.name, ()))


def _side(case: Case, terms: WhatIfTerms, each: Map, told: Told) -> Side:
    """The runs at the rate first: they are few, and say most."""
    trial = trial_for(case, terms)
    runs: list[Figures] = []
    with suppress(TimeUp):
        told(case.name, f"simulated at {terms.rate:g} requests/s")
        runs.extend(each(partial(_figures, trial, terms.rate), terms.seeds))
    cap = trial.most * SLACK
    search = Search(min(trial.estimate, cap) / 2.0, cap / LEAST, cap, terms.tolerance)
    found = goodput(
        Probes(trial, each),
        search,
        terms.slo,
        target=terms.target,
        seeds=terms.seeds,
        gpus=max(1, case.gpus),
        on_probe=lambda rate, held: told(case.name, trying(rate, held)),
    )
    return Side(case, found, tuple(runs))


def _figures(trial: Trial, rate: float, seed: int) -> Figures:
    """Of a whole run: percentiles need the slow ones too."""
    return figures(replace(trial, cut=False).run(rate, seed), trial.slo)


def rows(left: Side, right: Side) -> list[ComparisonRow]:
    """Of what both know, seed by seed."""
    made = []
    both = min(len(left.goodput.by_seed), len(right.goodput.by_seed))
    if left.goodput.probes and right.goodput.probes:
        made = [
            _row("goodput", "requests/s", left.goodput.by_seed[:both], right.goodput.by_seed[:both]),
            _row("goodput per GPU", "requests/s", _per_gpu(left)[:both], _per_gpu(right)[:both]),
        ]
    count = min(len(left.at_rate), len(right.at_rate))
    if not count:
        return made
    left, right = (replace(side, at_rate=side.at_rate[:count]) for side in (left, right))
    made.append(_row("attainment", "of all", left.attained, right.attained))
    for latency in LATENCIES:
        for percentile in PERCENTILES:
            ours, theirs = left.seconds(latency, percentile), right.seconds(latency, percentile)
            if ours is not None and theirs is not None:
                made.append(_row(f"{latency.removesuffix('_s').upper()} {percentile}", "s", ours, theirs))
    return made


def _per_gpu(side: Side) -> list[float]:
    return [rate / side.goodput.gpus for rate in side.goodput.by_seed]


def _row(name: str, unit: str, left: Sequence[float], right: Sequence[float]) -> ComparisonRow:
    return ComparisonRow(name, unit, fmean(left), fmean(right), difference(left, right))


def told(left: Side, right: Side, terms: WhatIfTerms) -> list[str]:
    names = left.case.name, right.case.name
    found = rows(left, right)
    better = next((row.difference for row in found if row.name == "goodput"), None)
    if better is None or not (left.complete and right.complete):
        verdict = f"not decided in time whether {names[0]} or {names[1]} serves more"
    elif not better.is_sure:
        verdict = f"no sure difference in goodput between {names[0]} and {names[1]}"
    else:
        verdict = f"{names[better.mean > 0.0]} serves more"
    return [
        f"{terms.load.source.name}: {slo_text(terms.slo)} for at least {100 * terms.target:g} % of requests",
        verdict,
        f"  {names[0]}: {left.goodput.summary}",
        f"  {names[1]}: {right.goodput.summary}",
        f"at {terms.rate:g} requests/s, {names[0]} and {names[1]} (second less first):",
        *(f"  {row.told}" for row in found if not row.name.startswith("goodput")),
    ]


def estimates(cases: Sequence[Case], terms: WhatIfTerms) -> list[Estimate]:
    """Before anything is simulated."""
    ends = median_and_p99(terms.load)
    short = replace(terms, load=thinned(terms.load))
    return [estimate(trial_for(case, short), ends, terms.target) for case in cases]


def as_json(left: Side, right: Side, terms: WhatIfTerms) -> dict[str, Any]:
    return {
        "clusters": [left.case.name, right.case.name],
        "gpus": [left.case.gpus, right.case.gpus],
        "rate": terms.rate,
        "target": terms.target,
        "promise": slo_text(terms.slo),
        "goodput": [left.goodput.summary, right.goodput.summary],
        "complete": left.complete and right.complete,
        "rows": [
            {
                "metric": row.name,
                "unit": row.unit,
                "values": [row.left, row.right],
                "difference": row.difference.mean,
                "low": None if row.difference.low == -float("inf") else row.difference.low,
                "high": None if row.difference.high == float("inf") else row.difference.high,
            }
            for row in rows(left, right)
        ],
    }
