"""Handmade runs with known figures."""

from collections.abc import Sequence
from itertools import pairwise

from cluster.observe.ledger import LatencyLedger, Stopwatch
from cluster.offline.scoring.records import RequestOutcome, RequestRecord, Run, StepRecord, WorkerRecord

MS = 1_000_000


def served(
    index: int,
    arrival_s: float,
    token_s: Sequence[float],
    *,
    outcome: RequestOutcome = RequestOutcome.FINISHED,
    prompt_tokens: int = 100,
    ledger: LatencyLedger | None = None,
    **more: object,
) -> RequestRecord:
    return RequestRecord(
        index=index,
        arrival_s=arrival_s,
        prompt_tokens=prompt_tokens,
        output_tokens=max(1, len(token_s)),
        token_s=token_s,
        outcome=outcome,
        ledger=ledger,
        **more,  # type: ignore[arg-type]
    )


def steady(index: int, arrival_s: float, ttft_s: float, tpot_s: float, tokens: int, **more: object) -> RequestRecord:
    """A request whose tokens come at equal distances."""
    return served(index, arrival_s, [arrival_s + ttft_s + n * tpot_s for n in range(tokens)], **more)  # type: ignore[arg-type]


def refused(index: int, arrival_s: float, outcome: RequestOutcome = RequestOutcome.REJECTED) -> RequestRecord:
    return served(index, arrival_s, (), outcome=outcome)


def split_ledger(queue_ms: int, compute_ms: int, wait_ms: int, decode_ms: int) -> LatencyLedger:
    """Of a request that was handed over, by a clock that is set by hand."""
    now = 0
    watch = Stopwatch(lambda: now)
    for phase, parts, ms in (
        ("admission", (), 1),
        ("route", (), 1),
        ("reserve", (), 2),
        ("prefill_wire", (("prefill_queue", queue_ms / 1e3), ("prefill_compute", compute_ms / 1e3)), 1),
    ):
        now += (ms + sum(round(1e3 * seconds) for _, seconds in parts)) * MS
        watch.lap(phase, parts)
    watch.first_token()
    now += (wait_ms + decode_ms + 3) * MS
    watch.lap(
        "decode_wire",
        (("transfer_wait", wait_ms / 1e3), ("decode_queue", 0.002), ("decode_compute", decode_ms / 1e3)),
    )
    return watch.ledger()


def split_run(requests: int = 6, gap_s: float = 0.05, tokens: int = 8) -> Run:
    """One prefill and one decode worker, a request every `gap_s`: 40 ms of prompt, 10 ms of transfer, 15 ms a token."""
    made: list[RequestRecord] = []
    steps: list[StepRecord] = []
    for index in range(requests):
        at = 1.0 + index * gap_s
        ledger = split_ledger(queue_ms=5, compute_ms=40, wait_ms=10, decode_ms=15 * (tokens - 1))
        first = at + ledger.ttft_ns / 1e9
        last = at + ledger.total_ns / 1e9
        token_s = [first + (last - first) * n / (tokens - 1) for n in range(tokens)]
        made.append(
            served(
                index,
                at,
                token_s,
                prompt_tokens=300,
                ledger=ledger,
                prefill_worker="prefill-0",
                decode_worker="decode-0",
                transfer_bytes=1 << 20,
                transfer_s=0.03,
                cached_tokens=75,
            )
        )
        steps.append(StepRecord("prefill-0", at + 0.009, at + 0.049, 225, 0, (index,)))
        for sooner, later in pairwise(token_s):
            steps.append(StepRecord("decode-0", sooner + 0.004, later, 0, 1, (index,)))
    end = max(each.token_s[-1] for each in made)
    seconds = end - made[0].arrival_s
    workers = (
        WorkerRecord("prefill-0", "prefill", "prefill", 2, 100, requests, requests * 0.04, requests * 225, requests),
        WorkerRecord("decode-0", "decode", "decode", 1, 300, 50, seconds / 2, 0, 40, 75 * seconds, preemptions=2),
    )
    return Run(
        system="split by hand",
        workload="every 50 ms",
        clock="virtual",
        seed=7,
        gpus=4,
        seconds=seconds,
        wall_s=0.1,
        served=tuple(made),
        workers=workers,
        steps=tuple(sorted(steps, key=lambda step: step.begin_s)),
        model_flops=2e12 * seconds,
        peak_flops=8e12,
        notes=("made by hand",),
    )
