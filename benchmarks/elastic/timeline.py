"""A run over time: SLO attainment by arrival, and each worker's activity. Pure."""

from collections import defaultdict
from dataclasses import dataclass

from benchmarks.elastic.scenarios import Scenario
from cluster.offline.scoring.records import Run, latencies

BINS = 48


@dataclass(frozen=True, slots=True)
class Timeline:
    """One run in bins of `bin_s`. `kept`: SLO attainment of the requests that arrived in a bin (-1: none arrived).

    `workers`: by name, for each bin the shares of its seconds in steps with prompts and in other steps.
    """

    name: str
    rate: float
    bin_s: float
    kept: tuple[float, ...]
    workers: dict[str, tuple[tuple[float, float], ...]]


def timeline(run: Run, scenario: Scenario, rate: float) -> Timeline:
    """`workers` is empty unless the run is traced."""
    bin_s = scenario.seconds / BINS
    return Timeline(run.system, rate, bin_s, _kept(run, scenario, bin_s), _workers(run, bin_s))


def _kept(run: Run, scenario: Scenario, bin_s: float) -> tuple[float, ...]:
    slo, times = scenario.slo, latencies(run.served)
    arrived, met = [0] * BINS, [0] * BINS
    for number, each in enumerate(run.served):
        place = min(int(each.arrival_s / bin_s), BINS - 1)
        in_time = slo.ttft_s is None or times.ttft_s[number] <= slo.ttft_s
        arrived[place] += 1
        met[place] += bool(in_time and (slo.tpot_s is None or times.tpot_s[number] <= slo.tpot_s))
    return tuple(round(ok / count, 4) if count else -1.0 for ok, count in zip(met, arrived, strict=True))


def _workers(run: Run, bin_s: float) -> dict[str, tuple[tuple[float, float], ...]]:
    spent: dict[str, list[list[float]]] = defaultdict(lambda: [[0.0, 0.0] for _ in range(BINS)])
    for step in run.steps:
        for place in range(max(0, int(step.begin_s / bin_s)), min(BINS, int(step.end_s / bin_s) + 1)):
            within_s = min(step.end_s, (place + 1) * bin_s) - max(step.begin_s, place * bin_s)
            spent[step.worker][place][0 if step.prompt_tokens else 1] += max(0.0, within_s)
    return {
        name: tuple((round(prompts / bin_s, 3), round(others / bin_s, 3)) for prompts, others in bins)
        for name, bins in sorted(spent.items())
    }
