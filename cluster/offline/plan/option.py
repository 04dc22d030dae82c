"""A layout that was simulated whole, and what it costs. Pure."""

from dataclasses import dataclass

from cluster.offline.plan.deploy import Layout
from cluster.offline.plan.request import PlanRequest
from cluster.offline.plan.trial import Trial
from cluster.offline.scoring.figures import Attainment
from cluster.offline.scoring.goodput import Goodput


@dataclass(frozen=True, slots=True)
class Option:
    """`serves`: its mean attainment at the requested rate, if there is one."""

    layout: Layout
    trial: Trial
    goodput: Goodput
    serves: Attainment | None = None

    @property
    def value(self) -> float:
        """Goodput per unit of weight."""
        return self.goodput.rate / self.trial.weight

    @property
    def headroom(self) -> str:
        """How many requests met each SLO at the highest rate that held, and which SLO breaks above it."""
        by_seed = dict(zip(self.goodput.seeds, self.goodput.by_seed, strict=True))
        held = [each for each in self.goodput.probes if each.rate == by_seed.get(each.seed)]
        if not held:
            return ""
        one = min(held, key=lambda each: each.attained.both)
        target = self.goodput.target
        breaks = f"; above, {' and '.join(self.goodput.limits)} breaks first" if self.goodput.limits else ""
        met = f"TTFT met by {one.attained.ttft:.1%} and TPOT by {one.attained.tpot:.1%}"
        return f"at {one.rate:.4g} requests/s {met} of requests, {target:.0%} needed{breaks}"

    def merit(self, request: PlanRequest) -> tuple[float, float]:
        """The higher, the better, by the request's objective; of equals the smaller."""
        if request.rate is not None:
            return -self.trial.weight, self.value
        return (self.goodput.rate if request.objective == "throughput" else self.value), -self.trial.weight


def rate_text(request: PlanRequest, trial: Trial, rate: float) -> str:
    """As the objective counts it."""
    if request.rate is not None or request.objective == "throughput":
        return f"{rate:.3g} requests/s on {trial.gpus} GPU{'s' if trial.gpus > 1 else ''}"
    return f"{rate / trial.weight:.3g} requests/s per {request.unit}"
