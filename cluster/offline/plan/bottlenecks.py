"""Why an estimate is what it is: what binds each phase, how near each SLO is, and what a change would bring. Pure.

The parts of a step are those of the roofline of the model's shape and the GPU's data sheet, whatever the step times
come from. All of it is closed forms.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from cluster.offline.plan.deploy import Layout, WorkerGroup
from cluster.offline.plan.request import PlanRequest
from cluster.offline.plan.trial import MARGIN, Trial, decode_batch, full_trial, held_at_once
from cluster.offline.workload.arrivals import mean_lengths
from cluster.spec import PoolSpec, Role
from workers.profiles.computed import roofline
from workers.profiles.profile_errors import ProfileError

LOOSER = 1.5  # how much looser an SLO is made


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """`limit`: compute, bandwidth, launches, memory (too little for a larger batch) or link."""

    phase: str
    limit: str
    words: str


@dataclass(frozen=True, slots=True)
class WhatIf:
    """One change of a layout or of an SLO, and the requests/s it would bring by closed forms. `gain`: in shares."""

    words: str
    gpus: int
    rate: float
    gain: float


def bottlenecks(request: PlanRequest, trial: Trial) -> list[Bottleneck]:
    found = []
    for group, pool in zip(trial.layout.groups, trial.case.spec.pools, strict=True):
        if group.role is not Role.DECODE:
            found.append(_prefill(request, trial, group, pool))
        if group.role is not Role.PREFILL:
            found.append(_decode(request, trial, group, pool))
    if len(trial.layout.groups) > 1:
        found.append(_handoff(trial))
    return found


def _prefill(request: PlanRequest, trial: Trial, group: WorkerGroup, pool: PoolSpec) -> Bottleneck:
    tokens = pool.engine.max_batch_tokens
    if group.role is Role.MIXED:
        tokens = min(tokens, _prompt(trial))
    limit, words = _largest_part(request, group, tokens, tokens * min(tokens, _prompt(trial)) / 2, 0)
    return Bottleneck("prefill", limit, f"prefill is bound by {words} of a step of {tokens} tokens")


def _decode(request: PlanRequest, trial: Trial, group: WorkerGroup, pool: PoolSpec) -> Bottleneck:
    size, context, batch_limit = _batch(trial, pool)
    tokens = size * context
    limit, words = _largest_part(request, group, size, tokens, tokens)
    limit = "memory" if batch_limit == "KV memory" else limit
    cap = f"the batch of {size} is limited by {batch_limit}"
    return Bottleneck("decode", limit, f"decode is bound by {words} of a step; {cap}")


def _handoff(trial: Trial) -> Bottleneck:
    """The share of time in which the prefill workers' links move KV."""
    (pool, *_) = trial.case.spec.pools
    model = trial.case.models[pool.name]
    num_bytes = model.kv_token_bytes * _prompt(trial)
    seconds = model.cost.transfer_seconds(num_bytes)
    busy = seconds * min(trial.estimate, trial.max_rate) / pool.replicas
    words = f"KV of a prompt ({num_bytes / 1e6:.0f} MB) takes {1e3 * seconds:.3g} ms: links are {busy:.0%} busy"
    return Bottleneck("handoff", "link" if busy >= 1.0 else "none", words)


_NAMES = {
    "compute": "compute: arithmetic is {:.0%}",
    "bandwidth": "bandwidth: reading weights and KV is {:.0%}",
    "launches": "launches: kernel launches and latencies are {:.0%}",
    "link": "link: all-reduces between GPUs are {:.0%}",
}


def _largest_part(request: PlanRequest, group: WorkerGroup, tokens: int, pairs: float, context: int) -> tuple[str, str]:
    """The largest part of a step, and its share in words; arithmetic and reads of a kernel overlap."""
    cost = roofline(request.shape, request.sheets[group.hardware], group.tensor, group.pipeline)
    seconds = {
        "compute": tokens * cost.token_s + pairs * cost.pair_s + (tokens * cost.row_s if context else 0.0),
        "bandwidth": cost.read_seconds(tokens, context, tokens if context else 1),
        "launches": cost.fixed_s,
        "link": tokens * cost.send_token_s,
    }
    decodes = tokens if context else 0
    kernels_s = cost.kernel_seconds(tokens, decodes, pairs, context, decodes or 1)
    whole_s = kernels_s + seconds["launches"] + seconds["link"]
    limit = max(seconds, key=lambda name: seconds[name])
    return limit, _NAMES[limit].format(seconds[limit] / whole_s)


def margins(trial: Trial, ttft_s: tuple[float, float]) -> str:
    """How near the SLOs are: TTFT alone, TPOT with the batch that the rate needs."""
    words = []
    if trial.slo.ttft_s is not None:
        words.append(f"TTFT without load is {max(ttft_s) / trial.slo.ttft_s:.0%} of its SLO")
    shares = []
    for pool in trial.case.spec.pools:
        if pool.role is not Role.PREFILL and trial.slo.tpot_s is not None:
            size, context, _ = _batch(trial, pool)
            step_s = trial.case.models[pool.name].cost.decode_seconds(size, size * context)
            shares.append(step_s / trial.slo.tpot_s)
    if shares:
        words.append(f"TPOT of a full batch is {max(shares):.0%} of its SLO")
    return ", ".join(words)


def _batch(trial: Trial, pool: PoolSpec) -> tuple[int, int, str]:
    """Size and context of one step at full load, and what keeps it from being larger."""
    cost = trial.case.models[pool.name].cost
    size, context = decode_batch(pool, cost, trial.load.arrivals, trial.slo.tpot_s)
    running = max(1, pool.engine.max_running // pool.parallel.pipeline)
    held = max(1, held_at_once(pool.engine, context) // pool.parallel.pipeline)
    limit = "max_running" if running <= held else "KV memory"
    return size, context, limit if size >= min(running, held) else "TPOT"


def _prompt(trial: Trial) -> int:
    return round(mean_lengths(trial.load.arrivals)[0])


def changes(request: PlanRequest, layout: Layout) -> list[WhatIf]:
    """One more instance of each group, half and double TP on as many GPUs, and each SLO looser."""
    found = []
    now = _rate(request, layout)
    for words, asked, changed in _changed(request, layout):
        try:
            rate = _rate(asked, changed)
        except ProfileError:
            continue
        found.append(WhatIf(words, changed.gpus, rate, rate / now - 1.0 if now else 0.0))
    return found


def _rate(request: PlanRequest, layout: Layout) -> float:
    trial = full_trial(request, layout)
    return min(trial.estimate, trial.max_rate) if trial.unloaded >= request.target - MARGIN else 0.0


def _changed(request: PlanRequest, layout: Layout) -> Iterator[tuple[str, PlanRequest, Layout]]:
    counts = [group.replicas for group in layout.groups]
    for number, group in enumerate(layout.groups):
        more = [count + (number == at) for at, count in enumerate(counts)]
        gpus = f"{group.gpus_each} more GPU{'s' * (group.gpus_each > 1)}"
        yield f"{gpus} for {group.role.value}", request, layout.times(*more)
    for number, group in enumerate(layout.groups):
        for tensor in (group.tensor // 2, group.tensor * 2):
            replicas, left = divmod(group.gpus, max(1, tensor * group.pipeline))
            if tensor and replicas and not left:
                other = replace(group, tensor=tensor, replicas=replicas)
                groups = (*layout.groups[:number], other, *layout.groups[number + 1 :])
                words = f"TP{tensor} for {group.role.value}, on as many GPUs"
                yield words, request, replace(layout, groups=groups)
    slo = request.slo
    if slo.ttft_s is not None:
        loose = replace(slo, ttft_s=LOOSER * slo.ttft_s)
        yield f"TTFT <= {loose.ttft_s:g} s", replace(request, slo=loose), layout
    if slo.tpot_s is not None:
        loose = replace(slo, tpot_s=LOOSER * slo.tpot_s)
        yield f"TPOT <= {loose.tpot_s:g} s", replace(request, slo=loose), layout
