"""How far simulated figures are from real ones, and whether that is within the aim. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median

from benchmarks.sim_vs_real.record import Real, spread
from benchmarks.sim_vs_real.systems import SYSTEMS
from cluster.offline.scoring.figures import Figures, Percentiles, figures
from cluster.offline.scoring.records import Run, Served
from cluster.offline.sim.fleet import environment_of, measured_models
from cluster.offline.sim.run import RunOptions, simulate
from workers.profiles.measured import ClusterProfile

AIMS = {"p50": 0.10, "p90": 0.20, "p99": 0.20}
GOODPUT_AIM = 0.10


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `error`: simulated over real, minus one; None when there is nothing to compare."""

    metric: str
    real: float | None
    simulated: float | None
    aim: float

    @property
    def error(self) -> float | None:
        return self.simulated / self.real - 1.0 if self.real and self.simulated is not None else None

    @property
    def met(self) -> bool:
        return self.error is not None and abs(self.error) <= self.aim


@dataclass(frozen=True, slots=True)
class Comparison:
    """`each_ttft`, `each_tpot`: the median of single requests' errors without sign."""

    name: str
    real: Figures
    simulated: Figures
    rows: tuple[Row, ...]
    each_ttft: float
    each_tpot: float


def compare(real: Real, profile: ClusterProfile) -> Comparison:
    """Simulate what was asked of the real system, with the profile that was measured of it.

    Neither side is told the promise: an engine that knows it cuts prompts by what it believes steps cost.
    """
    spec = SYSTEMS[real.system]
    options = RunOptions(seed=real.seed, system=real.system, environment=environment_of(profile))
    simulated = simulate(spec, measured_models(profile, spec), real.workload, options)
    return compared(real, simulated)


def at_gateway(run: Run) -> Run:
    """The same run by the gateways' ledgers."""
    served = tuple(
        replace(
            each,
            token_s=spread(each.arrival_s, each.ledger.ttft_ns / 1e9, each.ledger.total_ns / 1e9, len(each.token_s)),
        )
        if each.ledger is not None
        else each
        for each in run.served
    )
    return replace(run, served=served)


def compared(real: Real, simulated: Run) -> Comparison:
    """At the gateways: the client of the real run shares the machine with the cluster, that of the other does not."""
    run, simulated = real.run, at_gateway(simulated)
    ours, theirs = figures(run, real.slo), figures(simulated, real.slo)
    return Comparison(
        real.name,
        ours,
        theirs,
        (
            *_percentiles("TTFT", ours.ttft_s, theirs.ttft_s),
            *_percentiles("TPOT", ours.tpot_s, theirs.tpot_s),
            Row("goodput", _goodput(ours), _goodput(theirs), GOODPUT_AIM),
        ),
        _each(run, simulated, "ttft_s"),
        _each(run, simulated, "tpot_s"),
    )


def _percentiles(metric: str, real: Percentiles | None, simulated: Percentiles | None) -> Iterator[Row]:
    for name, aim in AIMS.items():
        one, other = (None if each is None else getattr(each, name) for each in (real, simulated))
        yield Row(f"{metric} {name}", one, other, aim)


def _goodput(found: Figures) -> float:
    """Requests a second that keep both promises, at the rate of this run."""
    return found.attainment.both * found.offered_rate


def _each(real: Run, simulated: Run, name: str) -> float:
    errors = []
    for one, other in zip(real.served, simulated.served, strict=True):
        value, guess = _value(one, name), _value(other, name)
        if value and guess is not None:
            errors.append(abs(guess / value - 1.0))
    return median(errors) if errors else 0.0


def _value(served: Served, name: str) -> float | None:
    value: float | None = getattr(served, name)
    return value
