"""The figures of a run: latencies, SLO attainment, rates, and the use of the machines. Pure.

`DEFINITIONS` defines every metric, with its source, because papers differ.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from cluster.observe.ledger import PHASES
from cluster.offline.scoring.records import (
    Latencies,
    RequestOutcome,
    RequestRecord,
    Run,
    WorkerRecord,
    gaps,
    latencies,
    worst_mean_s,
)
from workers.request import SLO

if TYPE_CHECKING:
    from cluster.offline.scoring.records import Floats

UNITS = {"virtual": "GPU"}  # what `Figures.gpus` counts, by clock; any other clock counts ranks

DEFINITIONS = {
    "TTFT": "arrival to first output token, queueing included",
    "TPOT": "per request, (last token - first token) / (tokens - 1); answers of one token have none and miss none "
    "(DistServe)",
    "TBT": "each gap between tokens that follow each other, all requests' gaps pooled (Sarathi)",
    "worst TBT": "per request, the mean of the worst 10 % of its gaps (Mooncake FAST'25)",
    "E2E": "arrival to last token",
    "normalized latency": "per request, E2E / output tokens (Orca, vLLM)",
    "percentiles": "of finished requests, interpolated linearly between neighbors; all requests are counted, no "
    "warm-up is cut off",
    "attainment": "share of all requests that meet TTFT and TPOT; rejected, failed and unfinished ones miss both "
    "(DistServe)",
    "goodput": "largest request rate whose attainment is at least the target; per GPU: divided by all GPUs "
    "provisioned, idle ones too (DistServe)",
    "effective request capacity": "share of all requests whose TTFT meets its bound and whose worst TBT meets the "
    "TPOT's (Mooncake)",
    "rates": "over the run's seconds, from the first arrival to the last token; prompt tokens of finished requests, "
    "output tokens of all",
    "MFU": "floating-point operations of all tokens computed / (peak of all GPUs x the run's seconds)",
    "KV occupancy": "used blocks x seconds / (all blocks x the run's seconds)",
    "busy share": "seconds with a step in flight / (workers x the run's seconds)",
    "exposed transfer": "seconds that decode waited for KV after the first token / E2E, over finished requests",
    "transfer": "elapsed seconds of KV handoffs, most of which overlap with prefill / E2E, over finished requests",
    "cached": "prompt tokens found in a prefix cache / prompt tokens of finished requests",
}


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of `count` samples."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Attainment:
    """Shares of all requests, 0 to 1, that met the TTFT target, the TPOT target, both, and that finished."""

    ttft: float
    tpot: float
    both: float
    served: float

    def broken(self, target: float) -> tuple[str, ...]:
        """Why `both` is below the target, the worst first; empty if it is not."""
        if self.both >= target:
            return ()
        if self.served < target:
            return ("requests not served",)
        missed = sorted((share, name) for share, name in ((self.ttft, "TTFT"), (self.tpot, "TPOT")) if share < target)
        return tuple(name for _, name in missed) or ("TTFT and TPOT, of different requests",)


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """Sums over the workers of one pool. Shares are 0 to 1; None: unknown, as real clusters record no steps."""

    pool: str
    role: str
    workers: int
    gpus: int
    busy_share: float | None
    kv_occupancy: float | None
    steps: int
    prompt_tokens: int
    output_tokens: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class Figures:
    """One run's figures. Latencies are None if no request has one; shares are None if unknown."""

    system: str
    workload: str
    clock: str
    seed: int
    gpus: int
    seconds: float
    slo: SLO
    requests: int
    finished: int
    rejected: int
    failed: int
    unfinished: int
    retried: int
    preemptions: int
    offered_rate: float
    requests_rate: float
    prompt_tokens_rate: float
    output_tokens_rate: float
    ttft_s: Percentiles | None
    tpot_s: Percentiles | None
    tbt_s: Percentiles | None
    worst_tbt_s: Percentiles | None
    e2e_s: Percentiles | None
    normalized_s: Percentiles | None
    attainment: Attainment
    effective_capacity: float
    mfu: float | None
    kv_occupancy: float | None
    exposed_transfer_share: float | None
    transfer_share: float | None
    cached_share: float | None
    phases_s: tuple[tuple[str, float], ...]  # mean seconds of a finished request in each ledger phase
    pools: tuple[PoolFigures, ...]
    notes: tuple[str, ...]
    reasons: tuple[tuple[str, int], ...] = ()  # why requests did not finish -> count, the most frequent first

    @property
    def unit(self) -> str:
        """What `gpus` counts: GPUs in virtual time, ranks in real runs, on any device."""
        return UNITS.get(self.clock, "rank")

    @property
    def provisioned(self) -> str:
        return f"{self.gpus} {self.unit}s"

    def as_json(self) -> dict[str, Any]:
        """With the definitions of the metrics."""
        import msgspec

        figures: dict[str, Any] = msgspec.to_builtins(self)
        return {**figures, "definitions": DEFINITIONS}


def slo_text(slo: SLO) -> str:
    """The SLO, such as `TTFT <= 2 s and TPOT <= 0.1 s`."""
    parts = [
        f"{name} <= {bound:g} s" for name, bound in (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s)) if bound is not None
    ]
    return " and ".join(parts) or "no SLO"


def attainment(run: Run, slo: SLO) -> Attainment:
    """The SLO attainment alone, for a search."""
    return _attained(latencies(run.served), slo)


def most_missed(target: float, requests: int) -> int:
    """How many of the requests may miss their SLO."""
    return int((1.0 - target) * requests + 1e-6)


def judged(run: Run, slo: SLO, target: float) -> Attainment:
    """The attainment of a run that may have ended once it was certain whether it reaches `target`."""
    attained, so_far = attainment(run, slo), _attainment_so_far(run, slo)
    return so_far if (so_far.both >= target) == (attained.both >= target) else attained


def _attainment_so_far(run: Run, slo: SLO) -> Attainment:
    """The attainment of a run that was cut short, over the requests that had ended or missed an SLO by then.

    Counting the others as missed would make the run look worse than it was.
    """
    now_s = max((each.token_s[-1] for each in run.served if len(each.token_s)), default=0.0)
    known = [met for each in run.served if (met := _met(each, slo, now_s)) is not None]
    if not known:
        return attainment(run, slo)
    ttft, tpot = (sum(met[number] for met in known) / len(known) for number in (0, 1))
    served = sum(each.outcome in (RequestOutcome.FINISHED, RequestOutcome.UNFINISHED) for each in run.served)
    return Attainment(ttft, tpot, sum(all(met) for met in known) / len(known), served / len(run.served))


def _met(each: RequestRecord, slo: SLO, now_s: float) -> tuple[bool, bool] | None:
    """Whether a request met TTFT and TPOT; None: not known yet."""
    ttft_slo_s, tpot_slo_s = slo.ttft_s or inf, slo.tpot_s or inf
    if each.outcome is RequestOutcome.UNFINISHED:
        first_s = each.token_s[0] if len(each.token_s) else now_s
        in_time = first_s - each.arrival_s <= ttft_slo_s
        fast = now_s - first_s <= tpot_slo_s * (each.output_tokens - 1)
        return None if in_time and fast else (in_time, fast)
    if each.outcome is not RequestOutcome.FINISHED or each.ttft_s is None:
        return False, False
    return each.ttft_s <= ttft_slo_s, each.tpot_s is None or each.tpot_s <= tpot_slo_s


def percentiles(samples: "Floats") -> Percentiles | None:
    """Percentiles of finite samples; None if there are none."""
    import numpy as np

    if not len(samples):
        return None
    p50, p90, p99 = np.quantile(samples, (0.5, 0.9, 0.99))
    return Percentiles(len(samples), float(samples.mean()), float(p50), float(p90), float(p99), float(samples.max()))


def figures(run: Run, slo: SLO) -> Figures:
    """All figures of a run. Millions of tokens take well under a second."""
    import numpy as np

    each = latencies(run.served)
    between = gaps(run.served)
    done, several = each.finished, each.finished & (each.output_tokens > 1)
    worst = np.array([worst_mean_s(taken) for taken in between])
    outcomes = Counter(served.outcome for served in run.served)
    finished = [served for served, ok in zip(run.served, done, strict=True) if ok]
    return Figures(
        system=run.system,
        workload=run.workload,
        clock=run.clock,
        seed=run.seed,
        gpus=run.gpus,
        seconds=run.seconds,
        slo=slo,
        requests=len(run.served),
        finished=outcomes[RequestOutcome.FINISHED],
        rejected=outcomes[RequestOutcome.REJECTED],
        failed=outcomes[RequestOutcome.FAILED],
        unfinished=outcomes[RequestOutcome.UNFINISHED],
        retried=sum(served.attempts > 1 for served in run.served),
        preemptions=sum(worker.preemptions for worker in run.workers),
        offered_rate=_offered_rate(run.served),
        requests_rate=_over(len(finished), run.seconds) or 0.0,
        prompt_tokens_rate=_over(sum(served.prompt_tokens for served in finished), run.seconds) or 0.0,
        output_tokens_rate=_over(int(each.output_tokens.sum()), run.seconds) or 0.0,
        ttft_s=percentiles(each.ttft_s[done]),
        tpot_s=percentiles(each.tpot_s[several]),
        tbt_s=percentiles(np.concatenate([np.empty(0), *between])),
        worst_tbt_s=percentiles(worst[several]),
        e2e_s=percentiles(each.e2e_s[done]),
        normalized_s=percentiles(each.e2e_s[done] / each.output_tokens[done]),
        attainment=_attained(each, slo),
        effective_capacity=_share(_within(each.ttft_s, slo.ttft_s) & done & _within(worst, slo.tpot_s)),
        mfu=_over(run.model_flops, run.peak_flops * run.seconds) if run.model_flops else None,
        kv_occupancy=_occupancy(run.workers, run.seconds),
        exposed_transfer_share=_exposed(finished),
        transfer_share=_over(sum(served.transfer_s for served in finished), float(each.e2e_s[done].sum())),
        cached_share=_over(
            sum(served.cached_tokens for served in finished), sum(served.prompt_tokens for served in finished)
        ),
        phases_s=_phases(finished),
        pools=_pools(run.workers, run.seconds),
        notes=run.notes,
        reasons=tuple(Counter(served.reason for served in run.served if served.reason).most_common()),
    )


def _attained(each: Latencies, slo: SLO) -> Attainment:
    ttft, tpot = _within(each.ttft_s, slo.ttft_s) & each.finished, _within(each.tpot_s, slo.tpot_s) & each.finished
    return Attainment(_share(ttft), _share(tpot), _share(ttft & tpot), _share(each.finished))


def _within(seconds: "Floats", bound: float | None) -> Any:
    return seconds <= (float("inf") if bound is None else bound)


def _share(mask: Any) -> float:
    return float(mask.mean()) if len(mask) else 0.0


def _over(part: float, whole: float) -> float | None:
    return part / whole if whole > 0.0 else None


def _offered_rate(served: Sequence[RequestRecord]) -> float:
    """Mean requests/s between the first and the last arrival; 0 if all arrive at once."""
    arrivals = [each.arrival_s for each in served]
    return _over(len(arrivals) - 1, max(arrivals) - min(arrivals)) or 0.0 if arrivals else 0.0


def _exposed(finished: Sequence[RequestRecord]) -> float | None:
    waited = total = 0
    for ledger in (each.ledger for each in finished):
        if ledger is not None:
            waited += sum(ns for name, ns in ledger.first + ledger.rest if name == "transfer_wait")
            total += ledger.total_ns
    return _over(waited, total)


def _phases(finished: Sequence[RequestRecord]) -> tuple[tuple[str, float], ...]:
    ledgers = [each.ledger for each in finished if each.ledger is not None]
    spent: Counter[str] = Counter()
    for ledger in ledgers:
        for name, ns in ledger.first + ledger.rest:
            spent[name] += ns
    return tuple((name, spent[name] / len(ledgers) / 1e9) for name in PHASES if name in spent)


def _pools(workers: Sequence[WorkerRecord], seconds: float) -> tuple[PoolFigures, ...]:
    names = dict.fromkeys(worker.pool for worker in workers)
    return tuple(_pool(name, [worker for worker in workers if worker.pool == name], seconds) for name in names)


def _present(workers: Sequence[WorkerRecord]) -> list[WorkerRecord]:
    """Each worker once; a restarted worker has a record for each start."""
    return list({worker.name: worker for worker in workers}.values())


def _occupancy(workers: Sequence[WorkerRecord], seconds: float) -> float | None:
    if not _has_step_times(workers):
        return None
    blocks = sum(worker.kv_blocks for worker in _present(workers))
    return _over(sum(worker.used_block_s for worker in workers), blocks * seconds)


def _has_step_times(workers: Sequence[WorkerRecord]) -> bool:
    """Whether step times were recorded: a real cluster's workers only count steps."""
    return not any(worker.steps for worker in workers) or any(worker.busy_s for worker in workers)


def _pool(name: str, workers: Sequence[WorkerRecord], seconds: float) -> PoolFigures:
    present = _present(workers)
    busy_s = sum(worker.busy_s for worker in workers)
    return PoolFigures(
        pool=name,
        role=", ".join(dict.fromkeys(worker.role for worker in workers)),
        workers=len(present),
        gpus=sum(worker.gpus for worker in present),
        busy_share=_over(busy_s, len(present) * seconds) if _has_step_times(workers) else None,
        kv_occupancy=_occupancy(workers, seconds),
        steps=sum(worker.steps for worker in workers),
        prompt_tokens=sum(worker.prompt_tokens for worker in workers),
        output_tokens=sum(worker.output_tokens for worker in workers),
        preemptions=sum(worker.preemptions for worker in workers),
    )
