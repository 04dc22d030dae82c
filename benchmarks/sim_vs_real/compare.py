"""Errors of simulated figures against real ones, and their targets. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from benchmarks.sim_vs_real.record import RealRun, spread
from benchmarks.sim_vs_real.systems import SYSTEMS
from cluster.offline.scoring.figures import Figures, Percentiles, figures
from cluster.offline.scoring.records import RequestRecord, Run
from cluster.offline.sim.fleet import environment_of, measured_models
from cluster.offline.sim.run import RunOptions, simulate
from workers.profiles.measured import ClusterProfile

TARGETS = {"p50": 0.10, "p90": 0.20, "p99": 0.20}
GOODPUT_TARGET = 0.10


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `error`: simulated over real, minus one; None if one of them is missing."""

    metric: str
    real: float | None
    simulated: float | None
    target: float

    @property
    def error(self) -> float | None:
        return self.simulated / self.real - 1.0 if self.real and self.simulated is not None else None

    @property
    def met(self) -> bool:
        return self.error is not None and abs(self.error) <= self.target


@dataclass(frozen=True, slots=True)
class Comparison:
    """`each_ttft`, `each_tpot`: median absolute error over single requests."""

    name: str
    real: Figures
    simulated: Figures
    rows: tuple[Row, ...]
    each_ttft: float
    each_tpot: float


def compare(real: RealRun, profile: ClusterProfile) -> Comparison:
    """Simulate the requests of the real run with the profile of its system.

    Neither side gets the SLO: an engine with an SLO sizes chunks by predicted step times.
    """
    spec = SYSTEMS[real.system]
    options = RunOptions(seed=real.seed, system=real.system, environment=environment_of(profile), roles=real.roles)
    simulated = simulate(spec, measured_models(profile, spec), real.workload, options)
    return compared(real, simulated)


def at_gateway(run: Run) -> Run:
    """The run with token times from the gateways' ledgers."""
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


def compared(real: RealRun, simulated: Run) -> Comparison:
    """Compare times at the gateways, because the real client shares the machine with the cluster."""
    run, simulated = real.run, at_gateway(simulated)
    ours, theirs = figures(run, real.slo), figures(simulated, real.slo)
    return Comparison(
        real.name,
        ours,
        theirs,
        (
            *_percentiles("TTFT", ours.ttft_s, theirs.ttft_s),
            *_percentiles("TPOT", ours.tpot_s, theirs.tpot_s),
            Row("goodput", _goodput(ours), _goodput(theirs), GOODPUT_TARGET),
        ),
        _each(run, simulated, "ttft_s"),
        _each(run, simulated, "tpot_s"),
    )


def mean_rows(runs: Sequence[Sequence[Row]]) -> list[Row]:
    """The figures of several runs of one cell: means of those that both sides have."""
    made = []
    for alike in zip(*runs, strict=True):
        known = [(row.real, row.simulated) for row in alike if row.real is not None and row.simulated is not None]
        real, simulated = (fmean(side) for side in zip(*known, strict=True)) if known else (None, None)
        made.append(replace(alike[0], real=real, simulated=simulated))
    return made


def _percentiles(metric: str, real: Percentiles | None, simulated: Percentiles | None) -> Iterator[Row]:
    for name, target in TARGETS.items():
        one, other = (None if each is None else getattr(each, name) for each in (real, simulated))
        yield Row(f"{metric} {name}", one, other, target)


def _goodput(found: Figures) -> float:
    """Requests per second that meet both SLOs, at the rate of this run."""
    return found.attainment.both * found.offered_rate


def _each(real: Run, simulated: Run, name: str) -> float:
    errors = []
    for one, other in zip(real.served, simulated.served, strict=True):
        value, guess = _value(one, name), _value(other, name)
        if value and guess is not None:
            errors.append(abs(guess / value - 1.0))
    return median(errors) if errors else 0.0


def _value(served: RequestRecord, name: str) -> float | None:
    value: float | None = getattr(served, name)
    return value
