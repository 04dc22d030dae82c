"""The part `gang-delivery`: round trip of a plan to a rank in another process.

From plan to result on the leader's event loop, through the rank's compute thread, which computes nothing. The limit
is a round trip of the same bytes over a blocking socket.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from benchmarks.engine.driver_processes import Program, load_engines
from benchmarks.engine.drivers.protocol import MARK, READY, EngineDriverConfig, Task
from benchmarks.figures import BenchmarkClaim, BenchmarkPart, Figure, Progress, ratios, spread
from benchmarks.gang.plans import PLANS, SENT, encode
from benchmarks.gang.transports import CHOSEN, LIMIT, TRANSPORTS
from benchmarks.hosted import MODEL
from benchmarks.pinning import paused, pin
from cluster.offline.load.machine import allowed_cores
from cluster.offline.load.processes import Child

ROUNDS = 3
STEPS, QUICK_STEPS = 400, 40
STEPS_S, QUICK_STEPS_S = 0.5, 0.2  # time limit of one plan in one round
IDLE_S = 0.4
START_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 30.0
MODEL_STEPS = 12
MODEL_PROMPT_TOKENS = 64
MOST_OF_A_STEP = 0.05
BURN = "while True: pass"


@dataclass(frozen=True, slots=True)
class Trip:
    """One round of one plan: median and 99th percentile round trip, and CPU seconds of both processes per step."""

    median_s: float
    p99_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class DeliverySample:
    """One round of one transport. `idle`: the share of a core that both processes use while they wait for a plan.

    `killed_s`: until the leader notices a killed rank; None for the limit, whose leader blocks.
    """

    quiet: Mapping[str, Trip]
    busy: Mapping[str, Trip]
    idle: float
    killed_s: float | None


Samples = Mapping[str, Sequence[DeliverySample]]  # transport


def measure(rounds: int, quick: bool, progress: Progress) -> BenchmarkPart:
    """Raises `ProcessFailed` when a transport does not work here."""
    samples: dict[str, list[DeliverySample]] = defaultdict(list)
    with _burners() as burners:
        for number in range(rounds):
            for transport in TRANSPORTS:
                samples[transport].append(_sample(transport, quick, burners))
            progress(f"round {number + 1} of {rounds}")
        with paused(burners):
            step_s = None if quick else model_step_s()
    if step_s is None:
        return BenchmarkPart(
            "gang-delivery", figures(samples), (), (*NOTES, "No decode step of a real model to compare with.")
        )
    return BenchmarkPart("gang-delivery", figures(samples), claims(samples, step_s), NOTES)


def model_step_s() -> float | None:
    """Median decode step of one sequence of the real model on all cores; None if it does not load."""
    prompt = tuple(range(100, 100 + MODEL_PROMPT_TOKENS))
    with load_engines({"ours": Program("ours", EngineDriverConfig(MODEL, len(allowed_cores())))}) as loaded:
        if loaded.failed:
            return None
        return float(median(wall_s for wall_s, _ in loaded.ask("ours", Task((prompt,), MODEL_STEPS))))


@contextmanager
def _burners() -> Iterator[Sequence[int]]:
    """One busy process per core; yields their pids."""
    with ExitStack() as stack:
        pids = []
        for core in allowed_cores():
            child = stack.enter_context(Child([sys.executable, "-c", BURN]))
            pin([child.pid], [core])
            pids.append(child.pid)
        yield pids


def _sample(transport: str, quick: bool, burners: Sequence[int]) -> DeliverySample:
    number, seconds = (QUICK_STEPS, QUICK_STEPS_S) if quick else (STEPS, STEPS_S)
    with ExitStack() as quiet, Child([sys.executable, "-m", "benchmarks.gang.leader", transport]) as leader:
        quiet.enter_context(paused(burners))
        leader.wait_line(READY, START_TIMEOUT_S)

        def trips() -> dict[str, Trip]:
            return {plan: _trip(_ask(leader, "steps", plan, number, seconds)) for plan in SENT}

        calm = trips()
        idle = float(_ask(leader, "idle", IDLE_S)["share"])
        quiet.close()
        pressed = trips()
        killed_s = None
        if transport != LIMIT:
            with paused(burners):
                killed_s = float(_ask(leader, "kill")["after_s"])
        return DeliverySample(calm, pressed, idle, killed_s)


def _ask(leader: Child, *task: object) -> Any:
    leader.write_line(json.dumps(task))
    return json.loads(leader.wait_line(MARK, ANSWER_TIMEOUT_S).text.partition(MARK)[2])


def _trip(answer: Mapping[str, Any]) -> Trip:
    taken_s = answer["taken_s"]
    p99_s = quantiles(taken_s, n=100, method="inclusive")[-1] if len(taken_s) > 1 else taken_s[0]
    return Trip(median(taken_s), p99_s, answer["cpu_s"])


READINGS: Mapping[str, Callable[[DeliverySample, str], float]] = {
    "Round trip of a plan on an idle machine, median": lambda each, plan: each.quiet[plan].median_s,
    "Round trip of a plan on an idle machine, 99th percentile": lambda each, plan: each.quiet[plan].p99_s,
    "Round trip while every core computes, median": lambda each, plan: each.busy[plan].median_s,
    "Round trip while every core computes, 99th percentile": lambda each, plan: each.busy[plan].p99_s,
    "CPU time of leader and rank for a step, on an idle machine": lambda each, plan: each.quiet[plan].cpu_s,
}
WAITING = "While idle, and after the rank is killed with a plan"


def figures(samples: Samples) -> tuple[Figure, ...]:
    made: list[Figure] = []
    for title, read in READINGS.items():
        for transport, rounds in samples.items():
            for plan in SENT:
                values = [read(each, plan) for each in rounds]
                made.append(Figure(title, transport, f"{plan} ({len(encode(PLANS[plan])):,} B)", "us", spread(values)))
            plan = SENT[0]
            limit = [read(each, plan) for each in samples[LIMIT]]
            made.append(
                Figure(title, transport, f"{plan} / {LIMIT}", "x", ratios([read(e, plan) for e in rounds], limit))
            )
    for transport, rounds in samples.items():
        made.append(Figure(WAITING, transport, "share of a core", "%", spread(each.idle for each in rounds)))
        killed_s = [each.killed_s for each in rounds if each.killed_s is not None]
        if killed_s:
            made.append(Figure(WAITING, transport, "leader notices after", "ms", spread(killed_s)))
    return tuple(made)


def claims(samples: Samples, step_s: float) -> tuple[BenchmarkClaim, ...]:
    """Delivery takes little time beside the shortest step of a real model, `step_s`."""
    made = []
    loads = {"quiet": "an idle machine", "busy": "every core busy"}
    for load, plan in (("quiet", "decode of 1"), ("busy", "decode of 1"), ("quiet", "decode of 32")):
        taken_s = median(getattr(each, load)[plan].median_s for each in samples[CHOSEN])
        what = f"{CHOSEN}, {plan}, {loads[load]}: share of a decode step"
        made.append(BenchmarkClaim(f"{what} of {MODEL} ({step_s * 1e3:.0f} ms)", taken_s / step_s, MOST_OF_A_STEP, "%"))
    return tuple(made)


NOTES = (
    "Plans and results are typed msgpack; encoding and decoding are part of the round trip.",
    "An idle core sleeps and takes tens of microseconds to wake, so a busy machine may answer sooner than an idle one.",
    "Killed: SIGKILL to a rank that holds a plan.",
)
