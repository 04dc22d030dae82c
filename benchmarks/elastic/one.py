"""One run in detail, for tuning: attainment, percentiles and misses by phase, and each worker's activity."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.elastic.scenarios import Scenario, ScenarioPhase
from benchmarks.elastic.timeline import timeline
from cluster.offline.scoring.figures import attainment, percentiles, slo_text
from cluster.offline.scoring.records import RequestOutcome, RequestRecord, Run, latencies
from workers.request import SLO


@dataclass(frozen=True, slots=True)
class PhaseOutcome:
    """The requests that arrived in a phase. Shares are 0 to 1; `kept` are those that met both SLOs. `ttft_s`, `tpot_s`:
    p50, p90 and p99 of the finished ones, if any.

    Misses are counted once: `late` missed TTFT only, `slow` TPOT only, `late_slow` both; `cut` had not finished when
    the last SLO deadline passed.
    """

    phase: str
    requests: int
    kept: float
    ttft_kept: float
    tpot_kept: float
    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]
    late: int
    slow: int
    late_slow: int
    rejected: int
    failed: int
    cut: int


def phase_outcomes(run: Run, scenario: Scenario) -> tuple[PhaseOutcome, ...]:
    """All requests, then those of each phase with requests."""
    slo = scenario.slo
    parts = [(phase, _within(run.served, phase)) for phase in scenario.phases]
    return (
        _outcome("all", run, run.served, slo),
        *(_outcome(each.name, run, part, slo) for each, part in parts if part),
    )


def _within(served: Sequence[RequestRecord], phase: ScenarioPhase) -> tuple[RequestRecord, ...]:
    return tuple(each for each in served if phase.begin_s <= each.arrival_s < phase.end_s)


def _outcome(name: str, run: Run, served: Sequence[RequestRecord], slo: SLO) -> PhaseOutcome:
    import numpy as np

    part = tuple(served)
    attained, times = attainment(replace(run, served=part), slo), latencies(part)
    late, slow = times.ttft_s > (slo.ttft_s or np.inf), times.tpot_s > (slo.tpot_s or np.inf)
    done = times.finished
    ttft, tpot = percentiles(times.ttft_s[done]), percentiles(times.tpot_s[done & (times.output_tokens > 1)])
    ends = Counter(each.outcome for each in part)
    return PhaseOutcome(
        phase=name,
        requests=len(part),
        kept=attained.both,
        ttft_kept=attained.ttft,
        tpot_kept=attained.tpot,
        ttft_s=(ttft.p50, ttft.p90, ttft.p99) if ttft else (),
        tpot_s=(tpot.p50, tpot.p90, tpot.p99) if tpot else (),
        late=int((done & late & ~slow).sum()),
        slow=int((done & slow & ~late).sum()),
        late_slow=int((done & slow & late).sum()),
        rejected=ends[RequestOutcome.REJECTED],
        failed=ends[RequestOutcome.FAILED],
        cut=ends[RequestOutcome.UNFINISHED],
    )


def lines(run: Run, scenario: Scenario, scale: float) -> Iterator[str]:
    """As text: a row for all, one for each phase, then all over time, and a row for each worker. Of a traced run."""
    count = len(run.served)
    yield (
        f"{run.system} on {scenario.name} ({scenario.title}; {scenario.machines.hardware}, {scenario.workers} workers)"
        f", scale {scale:g}: {count / scenario.seconds:.2f} requests/s, {slo_text(scenario.slo)}, seed {run.seed}, "
        f"{run.wall_s:.1f} s of wall time"
    )
    yield (
        f"{'phase':<16}{'requests':>9}{'both met':>10}{'TTFT met':>10}{'TPOT met':>10}{'TTFT p50/90/99 s':>22}"
        f"{'TPOT p50/90/99 ms':>21}   missed: late, slow, both, rejected, failed, cut"
    )
    for each in phase_outcomes(run, scenario):
        ttft, tpot = _three(each.ttft_s, 1.0, 2), _three(each.tpot_s, 1e3, 0)
        misses = (each.late, each.slow, each.late_slow, each.rejected, each.failed, each.cut)
        yield (
            f"{each.phase:<16}{each.requests:>9}{each.kept:>10.1%}{each.ttft_kept:>10.1%}{each.tpot_kept:>10.1%}{ttft:>22}"
            f"{tpot:>21}   {', '.join(map(str, misses))}"
        )
    over = timeline(run, scenario, scale * scenario.rate)
    yield f"bins of {over.bin_s:g} s: tenths of arrivals within SLO; P prompts, d decodes, M both, . mostly idle"
    yield f"  {'in SLO':<14} {''.join(map(_tenth, over.kept))}"
    for name, bins in over.workers.items():
        yield f"  {name:<14} {''.join(_lane(*each) for each in bins)}"
    for worker in run.workers:
        yield (
            f"  {worker.name:<14} {worker.role:<8} busy {worker.busy_s / max(run.seconds, 1e-9):.0%}, "
            f"{worker.prompt_tokens} prompt and {worker.output_tokens} output tokens, {worker.steps} steps, "
            f"{worker.preemptions} preempted"
        )
    reasons = Counter(each.detail for each in run.served if each.detail)
    for reason, number in reasons.most_common(3):
        yield f"  {number} x {reason}"


def _tenth(kept: float) -> str:
    return " " if kept < 0.0 else "*" if kept > 0.995 else str(int(10.0 * kept))


def _lane(prompts: float, others: float) -> str:
    """What most of a bin's seconds went to; a step with prompts may hold decodes too."""
    if prompts + others < 0.5:
        return "."
    return "P" if prompts > 0.75 * (prompts + others) else "d" if prompts < 0.25 * (prompts + others) else "M"


def _three(seconds: tuple[float, ...], unit: float, digits: int) -> str:
    return "/".join(f"{each * unit:.{digits}f}" for each in seconds) or "-"


def as_json(run: Run, scenario: Scenario, scale: float) -> str:
    facts: dict[str, Any] = {"scenario": scenario.name, "system": run.system, "scale": scale, "seed": run.seed}
    return json.dumps(
        {**facts, "wall_s": run.wall_s, "phases": [asdict(each) for each in phase_outcomes(run, scenario)]}
    )
