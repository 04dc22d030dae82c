"""What costs alone say of a candidate, at once: no request is simulated, so nobody queues. Pure.

TTFT and TPOT are of a request that has the machine to itself; requests a second are those of workers that are never
idle. A load near them queues, so what a simulation finds is less.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

from cluster.offline.plan.asked import PlanRequest
from cluster.offline.plan.deploy import Layout
from cluster.offline.plan.layouts import Layouts, Rated
from cluster.offline.plan.load import PlanLoad
from cluster.offline.plan.shapes import instances
from cluster.offline.plan.trial import MARGIN, Trial, whole
from cluster.spec import Role

CAVEAT = "Estimate from step costs alone, without queueing: a load near these rates waits, and attains less"
SAMPLED = 128
Lengths = tuple[int, int]  # tokens of a prompt and of its answer


@dataclass(frozen=True, slots=True)
class Estimate:
    """`ttft_s` and `tpot_s`: of a short and of a long request, alone. `rate`: requests a second it should serve, 0 when
    too few could keep the promise even alone. `kv_tokens`: KV of one worker that decodes, `at_once`: long requests that
    it holds."""

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

    @property
    def told(self) -> str:
        return (
            f"{self.name}: fits with KV for {self.kv_tokens:,} tokens ({self.at_once} of the long requests); "
            f"TTFT {ms_range(self.ttft_s)}, TPOT {ms_range(self.tpot_s)}; {self.served}"
        )

    @property
    def served(self) -> str:
        if self.rate:
            return f"about {self.rate:.3g} requests/s"
        return f"0 requests/s: {self.broken}"


def estimate(trial: Trial, ends: tuple[Lengths, Lengths], target: float, name: str = "") -> Estimate:
    """`ends`: a short and a long request."""
    pools = trial.case.spec.pools
    prompting = [pool for pool in pools if pool.role is not Role.DECODE]
    decoding = [pool for pool in pools if pool.role is not Role.PREFILL]
    costs = {name: model.cost for name, model in trial.case.models.items()}

    def ttft_s(prompt: int) -> float:
        """Chunks of a prompt go through the stages behind each other."""
        return min(
            costs[pool.name].prefill_seconds(prompt)
            / min(pool.parallel.pipeline, ceil(prompt / pool.engine.max_batch_tokens))
            for pool in prompting
        )

    def tpot_s(prompt: int, output: int) -> float:
        return min(costs[pool.name].decode_seconds(1, prompt + output // 2) for pool in decoding)

    kv_tokens = min(pool.engine.kv_blocks * pool.engine.block_size for pool in decoding)
    hopeful = trial.alone >= target - MARGIN
    return Estimate(
        trial.layout,
        name or trial.name,
        trial.gpus,
        trial.weight,
        kv_tokens,
        kv_tokens // sum(ends[1]),
        ttft_s=(ttft_s(ends[0][0]), ttft_s(ends[1][0])),
        tpot_s=(tpot_s(*ends[0]), tpot_s(*ends[1])),
        rate=min(trial.estimate, trial.most) if hopeful else 0.0,
        broken="" if hopeful else _broken(trial, ttft_s(ends[0][0]), tpot_s(*ends[0])),
    )


def _broken(trial: Trial, ttft_s: float, tpot_s: float) -> str:
    """Why the SLO cannot be met even without other requests."""
    for what, alone_s, most_s in (("TTFT", ttft_s, trial.slo.ttft_s), ("TPOT", tpot_s, trial.slo.tpot_s)):
        if most_s is not None and alone_s > most_s:
            return f"even a short request alone has {what} {1e3 * alone_s:.3g} ms; the SLO is {1e3 * most_s:.3g} ms"
    return f"even alone only {trial.alone:.0%} of requests would meet the SLO"


def thinned(load: PlanLoad) -> PlanLoad:
    """Enough of its lengths for a closed form."""
    arrivals = load.source.arrivals
    return replace(load, source=replace(load.source, arrivals=arrivals[:: -(-len(arrivals) // SAMPLED)]))


def median_and_p99(load: PlanLoad) -> tuple[Lengths, Lengths]:
    """The lengths of half of all and of all but one in a hundred, prompts and answers apart."""
    prompts = sorted(each.prompt_tokens for each in load.arrivals)
    outputs = sorted(each.output_tokens for each in load.arrivals)

    def at(share: float) -> Lengths:
        number = min(len(prompts) - 1, int(share * len(prompts)))
        return prompts[number], outputs[number]

    return at(0.5), at(0.99)


def estimated(asked: PlanRequest, what: str, trials: Sequence[Trial], keep: int) -> Rated:
    """See `layouts.Rank`: by closed forms."""
    hopeful = [trial for trial in trials if trial.alone >= asked.target - MARGIN and trial.estimate > 0.0]
    rated = [(trial, min(trial.estimate, trial.most)) for trial in hopeful]
    rated.sort(key=lambda each: -min(each[1], asked.rate or inf) / each[0].weight)
    return rated[:keep]


def outline(asked: PlanRequest) -> list[Estimate]:
    """The best colocated layout and the best split, as closed forms have it. Raises `PlanError` when nothing fits."""
    asked = replace(asked, load=thinned(asked.load))
    shapes = instances(asked)
    layouts = Layouts(asked, lambda what, trials, keep: estimated(asked, what, trials, keep))
    split = layouts.split(shapes)[:1]
    room = max((layout.gpus for layout in split), default=asked.gpus)
    made = [*layouts.filled(layouts.colocated(shapes), room), *split]
    ends = median_and_p99(asked.load)
    return [estimate(whole(asked, layout), ends, asked.target) for layout in made]


def ms_range(seconds: tuple[float, float]) -> str:
    least, most = (f"{1e3 * each:.3g}" for each in seconds)
    return f"{least} ms" if least == most else f"{least} to {most} ms"
