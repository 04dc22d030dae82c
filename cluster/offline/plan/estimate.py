"""Closed-form estimates of a candidate, without simulation and so without queueing. Pure.

TTFT and TPOT are those of a request on an idle machine, requests/s those of workers that are never idle. At a load near
that rate requests queue, so a simulation finds less.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from cluster.offline.plan.bottlenecks import Bottleneck, bottlenecks, margins
from cluster.offline.plan.deploy import Layout, WorkerGroup
from cluster.offline.plan.layouts import Layouts, Rated, decodes, instances, prefills
from cluster.offline.plan.load import PlanLoad
from cluster.offline.plan.request import PlanError, PlanRequest
from cluster.offline.plan.trial import (
    MARGIN,
    Trial,
    decode_trial,
    full_trial,
    held_at_once,
    prefill_trial,
    prompt_latency,
)
from cluster.spec import Role

CAVEAT = "Analytical estimate without queueing: near these rates requests queue, and attainment is lower"
SAMPLED = 64
GRAIN = 0.1  # closed forms do not tell layouts apart that differ by less
NEAR, MAX_CONTENDERS = 0.8, 4  # share of the best closed form that is simulated too, and how many at most
Lengths = tuple[int, int]  # tokens of a prompt and of its answer


@dataclass(frozen=True, slots=True)
class Estimate:
    """`ttft_s` and `tpot_s`: of a short and of a long request, alone. `kv_tokens`: KV of one decoding worker.

    `at_once`: how many long requests that KV holds. `rate`: expected requests/s; 0 if too few requests would meet the
    SLO even on an idle machine, and then `broken` says why. `bottlenecks` and `margins`: why it is no more.
    """

    layout: Layout
    name: str
    gpus: int
    weight: float
    kv_tokens: int
    at_once: int
    ttft_s: tuple[float, float]
    tpot_s: tuple[float, float]
    rate: float
    broken: str
    bottlenecks: tuple[Bottleneck, ...] = ()
    margins: str = ""

    @property
    def fit(self) -> str:
        return f"fits, with KV for {self.kv_tokens:,} tokens: {self.at_once:,} long requests at once"

    @property
    def latency(self) -> str:
        return f"TTFT {ms_range(self.ttft_s)}, TPOT {ms_range(self.tpot_s)}"

    def merit(self, request: PlanRequest) -> float:
        """The higher, the better, by the request's objective."""
        rate = min(self.rate, request.rate or inf)
        return rate if request.objective == "throughput" else rate / self.weight

    @property
    def throughput(self) -> str:
        return f"about {self.rate:.3g} requests/s" if self.rate else f"0 requests/s: {self.broken}"


def estimate(request: PlanRequest, trial: Trial, ends: tuple[Lengths, Lengths], name: str = "") -> Estimate:
    """`ends`: a short and a long request."""
    pools = trial.case.spec.pools
    prefilling = [pool for pool in pools if pool.role is not Role.DECODE]
    decoding = [pool for pool in pools if pool.role is not Role.PREFILL]
    costs = {name: model.cost for name, model in trial.case.models.items()}

    def ttft_s(prompt: int) -> float:
        return min(prompt_latency(pool, costs[pool.name], prompt) for pool in prefilling)

    def tpot_s(prompt: int, output: int) -> float:
        return min(costs[pool.name].decode_seconds(1, prompt + output // 2) for pool in decoding)

    kv_tokens = min(pool.engine.kv_blocks * pool.engine.block_size for pool in decoding)
    short, long = ends
    ttfts_s, tpots_s = (ttft_s(short[0]), ttft_s(long[0])), (tpot_s(*short), tpot_s(*long))
    hopeful = trial.unloaded >= request.target - MARGIN
    return Estimate(
        layout=trial.layout,
        name=name or trial.name,
        gpus=trial.gpus,
        weight=trial.weight,
        kv_tokens=kv_tokens,
        at_once=min(held_at_once(pool.engine, sum(long)) for pool in decoding),
        ttft_s=ttfts_s,
        tpot_s=tpots_s,
        rate=min(trial.estimate, trial.max_rate) if hopeful else 0.0,
        bottlenecks=tuple(bottlenecks(request, trial)) if hopeful else (),
        margins=margins(trial, ttfts_s),
        broken="" if hopeful else _broken(trial, ttfts_s[0], tpots_s[0], kv_tokens, sum(short)),
    )


def _broken(trial: Trial, ttft_s: float, tpot_s: float, kv_tokens: int, tokens: int) -> str:
    """Why the SLO cannot be met even without other requests. The figures are those of a short request."""
    if tokens > kv_tokens:
        return f"even a short request has {tokens:,} tokens, more than the KV holds"
    for what, alone_s, slo_s in (("TTFT", ttft_s, trial.slo.ttft_s), ("TPOT", tpot_s, trial.slo.tpot_s)):
        if slo_s is not None and alone_s > slo_s:
            return f"even a short request alone has {what} {seconds_text(alone_s)}; the SLO is {seconds_text(slo_s)}"
    return f"even alone only {trial.unloaded:.0%} of requests would meet the SLO"


def thinned(load: PlanLoad) -> PlanLoad:
    """At most `SAMPLED` of its lengths, enough for closed forms."""
    arrivals = load.source.arrivals
    return replace(load, source=replace(load.source, arrivals=arrivals[:: -(-len(arrivals) // SAMPLED)]))


def median_and_p99(load: PlanLoad) -> tuple[Lengths, Lengths]:
    """Percentiles of prompts and of answers, each on its own."""
    prompts = sorted(each.prompt_tokens for each in load.arrivals)
    outputs = sorted(each.output_tokens for each in load.arrivals)

    def at(share: float) -> Lengths:
        number = min(len(prompts) - 1, int(share * len(prompts)))
        return prompts[number], outputs[number]

    return at(0.5), at(0.99)


def rank_by_estimate(request: PlanRequest, trials: Sequence[Trial], keep: int) -> Rated:
    """The `keep` best by closed forms."""
    hopeful = [trial for trial in trials if trial.unloaded >= request.target - MARGIN and trial.estimate > 0.0]
    rated = [(trial, min(trial.estimate, trial.max_rate)) for trial in hopeful]
    rated.sort(key=lambda each: (-min(each[1], request.rate or inf) / each[0].weight, -each[1] / each[0].weight))
    if keep == 1:  # the smallest of those that closed forms do not tell apart
        alike = [each for each in rated if _value(request, each) >= _value(request, rated[0]) * (1.0 - GRAIN)]
        rated = sorted(alike, key=lambda each: each[0].weight)
    return rated[:keep]


def _value(request: PlanRequest, rated: tuple[Trial, float]) -> float:
    trial, rate = rated
    return min(rate, request.rate or inf) / trial.weight


@dataclass(frozen=True, slots=True)
class Outline:
    """`estimates`: of each kind of GPU the best colocated and the best split layout, and of several kinds together the
    best split. `refused`: why a kind has none, by name."""

    estimates: tuple[Estimate, ...]
    refused: dict[str, str]

    def best(self, request: PlanRequest) -> Estimate | None:
        """The most promising one; None: none meets the SLO."""
        return max((each for each in self.estimates if each.rate), key=lambda each: each.merit(request), default=None)

    def check_any_meets(self, request: PlanRequest) -> None:
        """Raises `PlanError` if no layout can meet the SLO: a load only makes requests slower."""
        if self.best(request) is None:
            tells = "; ".join(f"{each.name}: {each.broken}" for each in self.estimates)
            raise PlanError(f"no layout meets the SLO for {request.target:.0%} of requests; closest: {tells}")

    def contenders(self, request: PlanRequest) -> list[Layout]:
        """The best colocated and the best split layout, and others that are estimated nearly as high; best first."""

        def merit(each: Estimate) -> float:
            return each.merit(request)

        ranked = sorted((each for each in self.estimates if each.rate), key=merit, reverse=True)
        best = {each.layout.kind: each for each in reversed(ranked)}
        near = [each for each in ranked if each in best.values() or merit(each) >= NEAR * merit(ranked[0])]
        layouts = [each.layout for each in near][:MAX_CONTENDERS]
        if request.rate is not None or request.objective == "throughput":
            return layouts
        return [each.times(1) if each.kind == "colocated" else each for each in layouts]  # equal by value


def outline(request: PlanRequest) -> Outline:
    """Raises `PlanError` when nothing fits."""
    request = replace(request, load=thinned(request.load))
    ends = median_and_p99(request.load)
    found: list[Estimate] = []
    refused = {}
    for name in request.hardware:
        alone = replace(request, hardware=(name,))
        try:
            shapes = instances(alone)
        except PlanError as error:
            refused[name] = str(error)
            continue
        layouts = _outlined(alone, shapes)
        of_kind = [estimate(alone, full_trial(alone, layout), ends) for layout in layouts]
        found += of_kind or [_closest(alone, shapes, ends)]
    if not found:
        raise PlanError("; ".join(refused.values()))
    _check_rate(request)
    if len(request.hardware) > 1 and not refused:
        mixed = [each for each in _layouts(request).split(instances(request), GRAIN)[:1] if _kinds(each) > 1]
        found += [estimate(request, full_trial(request, layout), ends) for layout in mixed]
    return Outline(tuple(found), refused)


def _check_rate(request: PlanRequest) -> None:
    """Raises `PlanError` when not even workers that do one phase only would serve the rate with all GPUs."""
    if request.rate is None:
        return
    shapes = instances(request)
    most = request.gpus * min(
        max(trial.max_rate / trial.gpus for trial in phase)
        for phase in (
            [prefill_trial(request, group) for group in prefills(shapes)],
            [decode_trial(request, group) for group in decodes(shapes)],
        )
    )
    if request.rate > most * (1.0 + MARGIN):
        raise PlanError(
            f"no layout on up to {request.gpus} GPUs serves {request.rate:g} requests/s: by the times of their steps "
            f"they serve at most {most:.4g}; give more --gpus or a lower --rate"
        )


def _kinds(layout: Layout) -> int:
    return len({group.hardware for group in layout.groups})


def _layouts(request: PlanRequest) -> Layouts:
    return Layouts(request, lambda what, trials, keep: rank_by_estimate(request, trials, keep))


def _outlined(request: PlanRequest, shapes: Sequence[WorkerGroup]) -> list[Layout]:
    """The best colocated and the best split layout."""
    layouts = _layouts(request)
    split = layouts.split(shapes, GRAIN)[:1]
    room = max((layout.gpus for layout in split), default=request.gpus)
    return [*layouts.filled(layouts.colocated(shapes), room), *split]


def _closest(request: PlanRequest, shapes: Sequence[WorkerGroup], ends: tuple[Lengths, Lengths]) -> Estimate:
    """Where no layout meets the SLO: the instance that meets it for the most requests alone, or misses it least."""
    trials = [full_trial(request, Layout("colocated", (group,))) for group in shapes]
    most = max(trial.unloaded for trial in trials)
    found = [estimate(request, trial, ends) for trial in trials if trial.unloaded == most]
    ttft_s, tpot_s = request.slo.ttft_s or inf, request.slo.tpot_s or inf
    return min(found, key=lambda each: max(each.ttft_s[0] / ttft_s, each.tpot_s[0] / tpot_s))


def seconds_text(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1.0 else f"{1e3 * seconds:.3g} ms"


def ms_range(seconds: tuple[float, float]) -> str:
    low, high = map(seconds_text, sorted(seconds))
    same_unit = low.removesuffix(" ms") if high.endswith(" ms") else low
    return high if low == high else f"{same_unit} to {high}"
