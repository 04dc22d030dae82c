"""The campaign's workloads: machines, SLO, and a load that changes over time.

The scale of a load is relative to the fleet's capacity: at 1 every worker would be busy all the time, with prompts
computed one by one and decodes in the largest batches that meet the SLO. Without a cache no system reaches 1. The scale
has the same meaning in all phases, so a phase of long prompts weighs as much as one of long answers.
"""

import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from benchmarks.elastic.conversations import BLOCK, conversations
from benchmarks.elastic.streams import Stream, denser, sine, superposed
from cluster.offline.plan.trial import capacity
from cluster.offline.sim.cluster import PoolModel
from cluster.offline.sim.fleet import fleet, pool_model
from cluster.offline.sim.systems import EqualWorkers
from cluster.offline.workload.arrivals import Arrival, Workload
from cluster.offline.workload.changes import window
from cluster.offline.workload.lengths import LengthMix, Lengths, Uniform
from cluster.offline.workload.load import load_workload
from cluster.spec import PoolSpec, Role
from workers.config import ParallelConfig
from workers.request import SLO

MODEL, PARALLEL = "llama-2-70b", ParallelConfig(tensor=4)
A100, H100 = "a100-80gb", "h100-80gb"
AZURE = "traces/azure2023/AzureLLMInferenceTrace_conv.csv.gz"
MOONCAKE = "traces/mooncake/conversation_trace.jsonl.gz"
DRAWS = 2000  # samples of lengths for a mean
ROOT = Path(__file__).resolve().parents[2]


class TraceNotFound(RuntimeError):
    """A public trace is not on this machine; the message names the expected path."""


@dataclass(frozen=True, slots=True)
class ScenarioSize:
    """`stretch` multiplies the seconds of every phase."""

    workers: int = 6
    stretch: float = 1.0


@dataclass(frozen=True, slots=True)
class Machines:
    """Equal workers of `MODEL`. `block_size`: tokens of a KV block."""

    hardware: str
    block_size: int = 16

    def model(self) -> PoolModel:
        return pool_model(MODEL, self.hardware, PARALLEL)

    def fleet(self, workers: int) -> EqualWorkers:
        made = fleet(MODEL, self.hardware, PARALLEL, workers)
        blocks = made.engine.kv_blocks * made.engine.block_size // self.block_size
        return replace(made, engine=replace(made.engine, block_size=self.block_size, kv_blocks=blocks))


@dataclass(frozen=True, slots=True)
class ScenarioPhase:
    """A time span of a scenario with one kind of load. Phases with equal names have equal loads."""

    name: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """`draw(scale, seed)` returns its requests; the module explains the scale. `shifts`: its kind of load changes.

    `epochs`: time spans for the best static configuration per phase, if not the phases. They are needed where only the
    rate changes, because there a queue outlasts its phase.
    """

    name: str
    title: str
    machines: Machines
    slo: SLO
    workers: int
    rate: float  # mean requests per second at scale 1
    phases: tuple[ScenarioPhase, ...]
    streams: tuple[Stream, ...] = ()
    trace: Workload | None = None
    per_scale: float = 1.0  # density of the trace at scale 1
    shifts: bool = True
    epochs: tuple[ScenarioPhase, ...] = ()
    part: ScenarioPhase | None = None  # the only phase with requests

    @property
    def seconds(self) -> float:
        return self.phases[-1].end_s

    @property
    def fleet(self) -> EqualWorkers:
        return self.machines.fleet(self.workers)

    def draw(self, scale: float, seed: int) -> Workload:
        """Raises `WorkloadError` without requests."""
        if self.trace is not None:
            whole = denser(self.trace, scale * self.per_scale, seed)
        else:
            whole = superposed(self.name, self.streams, scale, seed)
        return whole if self.part is None else window(whole, self.part.begin_s, self.part.end_s)

    def only(self, phase: ScenarioPhase) -> "Scenario":
        """The scenario with the requests of this phase only. Scales and rates stay those of the whole scenario."""
        return replace(self, phases=(replace(phase, begin_s=0.0, end_s=phase.end_s - phase.begin_s),), part=phase)


# ---- rates of a fleet -----------------------------------------------------------------------------------------


def rate_of(lengths: Lengths, machines: Machines, slo: SLO, workers: int) -> float:
    """Requests per second of these lengths that keep `workers` workers busy all the time."""
    source = random.Random("lengths")
    return rate_of_all([Arrival(0.0, *lengths.draw(source)) for _ in range(DRAWS)], machines, slo, workers)


def rate_of_all(arrivals: list[Arrival], machines: Machines, slo: SLO, workers: int) -> float:
    cost, engine = machines.model().cost, machines.fleet(1).engine
    pools = (PoolSpec(role.value, role, 1, engine=engine) for role in (Role.PREFILL, Role.DECODE))
    return workers / sum(1.0 / capacity(pool, cost, arrivals, slo.tpot_s).usual for pool in pools)


# ---- the scenarios -----------------------------------------------------------------------------------------------


def _lengths(least: int, most: int, shortest: int, longest: int) -> Lengths:
    return LengthMix(((Uniform(least, most), Uniform(shortest, longest)),))


LONG_PROMPTS = _lengths(1500, 4000, 20, 120)
LONG_ANSWERS = _lengths(100, 600, 200, 600)
CHAT = _lengths(300, 2000, 50, 350)
REGION = _lengths(1000, 3000, 100, 300)  # TaiChi's, as in tests/offline/plan/test_regions.py


def _spans(parts: list[tuple[str, float]]) -> tuple[ScenarioPhase, ...]:
    phases, begin_s = [], 0.0
    for name, seconds in parts:
        phases.append(ScenarioPhase(name, begin_s, begin_s + seconds))
        begin_s += seconds
    return tuple(phases)


def _streamed(
    name: str,
    title: str,
    machines: Machines,
    slo: SLO,
    size: ScenarioSize,
    parts: list[tuple[str, float]],
    streams: list[Stream],
) -> Scenario:
    rate = sum(each.requests for each in streams) / sum(seconds for _, seconds in parts)
    return Scenario(name, title, machines, slo, size.workers, rate, _spans(parts), tuple(streams))


def _swapping(name: str, hardware: str, slo: SLO, size: ScenarioSize) -> Scenario:
    """Long prompts, then long answers, twice."""
    machines, span = Machines(hardware), 60.0 * size.stretch
    parts = [("prompts", span), ("answers", span)] * 2
    streams = []
    for kind, lengths in (("prompts", LONG_PROMPTS), ("answers", LONG_ANSWERS)):
        rate = rate_of(lengths, machines, slo, size.workers)
        streams.append(Stream(kind, lengths, tuple((seconds, rate * (part == kind)) for part, seconds in parts)))
    title = f"long prompts and long answers by turns of {span:g} s"
    return _streamed(name, title, machines, slo, size, parts, streams)


def _bursts(size: ScenarioSize) -> Scenario:
    """Bursts of five times the load during a fifth of the time; the mean scale is 1."""
    machines, slo = Machines(A100), SLO(4.0, 0.075)
    calm_s, burst_s = 40.0 * size.stretch, 10.0 * size.stretch
    low = (calm_s + burst_s) / (calm_s + 5.0 * burst_s)
    rate = rate_of(CHAT, machines, slo, size.workers)
    parts = [("burst", burst_s), ("calm", calm_s)] * 4
    steps = tuple((seconds, rate * low * (5.0 if part == "burst" else 1.0)) for part, seconds in parts)
    title = f"chat with bursts x5 of {burst_s:g} s every {calm_s + burst_s:g} s"
    made = _streamed("bursts", title, machines, slo, size, parts, [Stream("chat", CHAT, steps)])
    return replace(made, epochs=_spans([("burst and calm", burst_s + calm_s)] * 4))


def _day(size: ScenarioSize) -> Scenario:
    """Long answers by day, long prompts by night: two sines in antiphase, a day in minutes."""
    machines, slo, span = Machines(A100), SLO(4.0, 0.075), 240.0 * size.stretch
    streams = [
        Stream(kind, lengths, sine(span, rate_of(lengths, machines, slo, size.workers) / 2.0, 0.9, at=at))
        for kind, lengths, at in (("answers", LONG_ANSWERS, 0.0), ("prompts", LONG_PROMPTS, 0.5))
    ]
    parts = [(f"{name} {half}", span / 4.0) for name in ("day", "night") for half in ("rising", "falling")]
    title = f"a day of {span:g} s: long answers by day, long prompts by night"
    return _streamed("day", title, machines, slo, size, parts, streams)


def _mix(name: str, slo: SLO, size: ScenarioSize) -> Scenario:
    machines, span = Machines(A100), 150.0 * size.stretch
    rate = rate_of(REGION, machines, slo, size.workers)
    title = (
        f"prompts of 1000-3000 and answers of 100-300 at a steady rate, TTFT {slo.ttft_s:g} s, TPOT {slo.tpot_s:g} s"
    )
    stream = Stream("mixed", REGION, ((span, rate),))
    return replace(_streamed(name, title, machines, slo, size, [("steady", span)], [stream]), shifts=False)


def shared(path: str) -> Path:
    """Raises `TraceNotFound`."""
    folder = Path(os.environ.get("DIPTYCH_SHARED", ROOT.parent / "shared"))
    if not (folder / path).exists():
        raise TraceNotFound(f"the public trace {path} is not under {folder}; put it there, or set DIPTYCH_SHARED")
    return folder / path


def _trace(
    name: str, path: str, options: str, machines: Machines, slo: SLO, size: ScenarioSize, begin_s: float
) -> Scenario:
    """A window of a trace at its original speed."""
    span = 240.0 * size.stretch
    whole = load_workload(f"{shared(path)}:{options}", seed=0)
    trace = replace(window(whole, begin_s, begin_s + span), name=name)
    return _replayed(trace, span, Path(path).name.partition(".")[0], machines, slo, size)


def mooncake(size: ScenarioSize, begin_s: float) -> Scenario:
    """Four minutes of Mooncake's conversation trace from `begin_s` on."""
    return _trace("mooncake", MOONCAKE, "clip=32768", Machines(H100, 512), SLO(10.0, 0.1), size, begin_s)


def _replayed(trace: Workload, span: float, what: str, machines: Machines, slo: SLO, size: ScenarioSize) -> Scenario:
    """A trace at another density, with its quarters as phases."""
    full = rate_of_all(list(trace.arrivals), machines, slo, size.workers)
    parts = [(f"quarter {number}", span / 4.0) for number in (1, 2, 3, 4)]
    title = f"{span:g} s of {what}, made denser"
    factor = full * span / len(trace.arrivals)
    made = Scenario(trace.name, title, machines, slo, size.workers, full, _spans(parts), trace=trace, per_scale=factor)
    return replace(made, shifts=False, epochs=_spans([("first half", span / 2.0), ("second half", span / 2.0)]))


def _prefixes(size: ScenarioSize) -> Scenario:
    """Turns of conversations, which share prefixes."""
    span = 240.0 * size.stretch
    trace = conversations("prefixes", span, 0.5, seed=0)
    return _replayed(trace, span, "drawn conversations", Machines(H100, BLOCK), SLO(10.0, 0.1), size)


SCENARIOS: Mapping[str, Callable[[ScenarioSize], Scenario]] = {
    "phases-a100": lambda size: _swapping("phases-a100", A100, SLO(4.0, 0.075), size),
    "phases-h100": lambda size: _swapping("phases-h100", H100, SLO(2.0, 0.05), size),
    "bursts": _bursts,
    "day": _day,
    "azure": lambda size: _trace("azure", AZURE, "clip=8192", Machines(A100), SLO(4.0, 0.075), size, 1200.0),
    "mooncake": lambda size: mooncake(size, 1200.0),
    "prefixes": _prefixes,
    "tight-tight": lambda size: _mix("tight-tight", SLO(3.0, 0.06), size),
    "tight-loose": lambda size: _mix("tight-loose", SLO(3.0, 0.2), size),
    "loose-tight": lambda size: _mix("loose-tight", SLO(12.0, 0.06), size),
    "loose-loose": lambda size: _mix("loose-loose", SLO(12.0, 0.2), size),
}


@cache
def scenario(name: str, size: ScenarioSize = ScenarioSize()) -> Scenario:
    """Raises `TraceNotFound` when its trace is missing, and KeyError for an unknown name."""
    return SCENARIOS[name](size)
