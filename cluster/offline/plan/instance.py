"""What one instance of a model delivers: TTFT, TPOT, and throughput while both meet their SLOs. Never mixed.

One instance on each kind of GPU, by closed forms at once, then simulated: with a single user; with several users in a
closed loop; and at the highest request rate that meets the SLOs.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from random import Random

import numpy as np

from cluster.offline.plan.deploy import Layout, WorkerGroup
from cluster.offline.plan.estimate import Estimate, estimate
from cluster.offline.plan.layouts import instances
from cluster.offline.plan.placement import OnProgress
from cluster.offline.plan.request import PlanError, PlanRequest
from cluster.offline.plan.search import SLACK
from cluster.offline.plan.trial import FLOOR, Trial, full_trial
from cluster.offline.scoring.figures import Percentiles, percentiles
from cluster.offline.scoring.goodput import Goodput, Map, Probes, Search, TimeUp, goodput, trying
from cluster.offline.scoring.records import RequestRecord
from cluster.offline.scoring.request_recorder import RequestRecorder
from cluster.offline.sim.case import Case
from cluster.offline.sim.clock import run
from cluster.offline.sim.cluster import SimCluster, open_cluster
from cluster.offline.workload.arrivals import Arrival, Workload, WorkloadError
from cluster.offline.workload.lengths import Uniform
from cluster.offline.workload.prompts import request as sim_request
from workers.request import SLO

ROUNDS = 6  # requests of each user; the first is not counted, since all users start on an idle machine
FEW_ROUNDS = 3  # with many users, which give enough samples
MANY_USERS = 20
START, STRIDE = 0.75, 1.25  # where a search begins: queueing usually leaves this share of the closed form
SAMPLED = 512
VOCAB_SIZE = 32_000  # token ids do not change any time


@dataclass(frozen=True, slots=True)
class LengthRanges:
    """Ranges of prompt and output tokens."""

    prompt: Uniform
    output: Uniform

    @property
    def name(self) -> str:
        prompt, output = (
            f"{each.least}" if each.least == each.most else f"{each.least}-{each.most}"
            for each in (self.prompt, self.output)
        )
        return f"prompts of {prompt}, answers of {output} tokens"

    def workload(self) -> Workload:
        """Lengths to sample from; the arrival times mean nothing."""
        source = Random("buyer, 0")
        pairs = [self.draw(source) for _ in range(SAMPLED)]
        return Workload(self.name, tuple(Arrival(float(at), *pair) for at, pair in enumerate(pairs)))

    def draw(self, source: Random) -> tuple[int, int]:
        return self.prompt.draw(source), self.output.draw(source)

    @property
    def ends(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The shortest and the longest request."""
        return (self.prompt.least, self.output.least), (self.prompt.most, self.output.most)


def parse_range(text: str, what: str) -> Uniform:
    """`1500-2000` or `500` tokens. Raises `PlanError`."""
    low, dash, high = text.strip().partition("-")
    try:
        return Uniform(int(low), int(high) if dash else int(low))
    except (ValueError, WorkloadError):
        raise PlanError(
            f"{what} is {text!r}; it must be a number of tokens such as 500, or a range such as 1500-2000, the smaller "
            "first, 1 or more"
        ) from None


@dataclass(frozen=True, slots=True)
class Instance:
    """One way to run the model on GPUs of one kind. `estimate`: by closed forms."""

    request: PlanRequest
    lengths: LengthRanges
    group: WorkerGroup
    trial: Trial
    estimate: Estimate

    @property
    def name(self) -> str:
        """`2 x h100-80gb (TP2 PP1)`."""
        return self.estimate.name


def instances_of(request: PlanRequest, lengths: LengthRanges) -> list[Instance]:
    """Every tensor-parallel instance that fits; if there is none, every one. Raises `PlanError`."""
    groups = [group for group in instances(request) if group.pipeline == 1] or instances(request)
    return [_instance(request, lengths, group) for group in groups]


def _instance(request: PlanRequest, lengths: LengthRanges, group: WorkerGroup) -> Instance:
    trial = replace(full_trial(request, Layout("colocated", (group,))), give_up=request.target)
    gpus, name = group.gpus_each, group.hardware
    if gpus > 1:
        name = f"{gpus} x {name} (TP{group.tensor} PP{group.pipeline})"
    return Instance(request, lengths, group, trial, estimate(request, trial, lengths.ends, name))


@dataclass(frozen=True, slots=True)
class UnderLoad:
    """What `users` in a closed loop see. `output_tokens_rate`: per second, of all users together."""

    users: int
    ttft_s: Percentiles
    tpot_s: Percentiles | None
    output_tokens_rate: float


@dataclass(slots=True)
class InstanceAnswer:
    """`ttft_s` and `tpot_s`: of a single user, for the shortest and the longest request. `users`: simulated in time.

    Until they are simulated, latencies are those of the estimate. `throughput` is None where the estimate already shows
    that no load meets the SLO.
    """

    instance: Instance
    ttft_s: tuple[float, float]
    tpot_s: tuple[float, float]
    users: tuple[UnderLoad, ...] = ()
    throughput: Goodput | None = None
    simulated_users: bool = False

    @property
    def complete(self) -> bool:
        return self.simulated_users and (self.throughput is None or self.throughput.complete)

    @property
    def mean_output(self) -> float:
        output = self.instance.lengths.output
        return (output.least + output.most) / 2


def answers(
    wanted: Sequence[Instance],
    users: Sequence[int],
    each: Map = map,
    on_progress: OnProgress = lambda what, how_far: None,
) -> list[InstanceAnswer]:
    """Simulate all instances at the same time, so that each has some results when the time is up; latencies first."""
    found = [InstanceAnswer(one, one.estimate.ttft_s, one.estimate.tpot_s) for one in wanted]
    with ThreadPoolExecutor(len(found)) as threads:  # they only wait for `each`
        list(threads.map(lambda answer: _latencies(answer, tuple(users), each, on_progress), found))
        list(threads.map(lambda answer: _throughput(answer, each, on_progress), found))
    return found


def _latencies(answer: InstanceAnswer, users: tuple[int, ...], each: Map, on_progress: OnProgress) -> None:
    one = answer.instance
    case, slo = one.trial.case, one.request.slo
    if not one.estimate.at_once:  # the KV does not hold a long request
        answer.simulated_users = True
        return
    with suppress(TimeUp):
        short, long = each(partial(_single_request, case), one.lengths.ends)
        answer.ttft_s = short.ttft_s or 0.0, long.ttft_s or 0.0
        answer.tpot_s = short.tpot_s or 0.0, long.tpot_s or 0.0
        if slo.tpot_s is not None and max(answer.tpot_s) > slo.tpot_s:
            slo = SLO()  # an engine that can never meet the TPOT SLO would starve prompts for it
        for count, found in zip(users, each(partial(_closed_loop, case, one.lengths, slo), users), strict=True):
            answer.users += (found,)
            on_progress(one.name, f"{count} user{'s' * (count > 1)} simulated")
        answer.simulated_users = True


def _throughput(answer: InstanceAnswer, each: Map, on_progress: OnProgress) -> None:
    one = answer.instance
    trial, request = one.trial, one.request
    if not one.estimate.rate:
        return
    cap = trial.max_rate * SLACK
    answer.throughput = goodput(
        Probes(trial, each),
        Search(START * min(trial.estimate, cap), cap / FLOOR, cap, request.tolerance, STRIDE),
        request.slo,
        target=request.target,
        seeds=request.seeds,
        gpus=trial.gpus,
        led=True,
        on_probe=lambda rate, held: on_progress(one.name, trying(rate, held)),
    )


def _single_request(case: Case, lengths: tuple[int, int]) -> RequestRecord:
    async def main() -> RequestRecord:
        async with open_cluster(case.spec, case.models) as cluster:
            return await _send(cluster, Workload("one request", (Arrival(0.0, *lengths),)), 0, SLO())

    return run(main())


def _closed_loop(case: Case, lengths: LengthRanges, slo: SLO, users: int) -> UnderLoad:
    return run(_users(case, lengths, users, slo))


async def _users(case: Case, lengths: LengthRanges, users: int, slo: SLO) -> UnderLoad:
    """They start at random times within the duration of one answer."""
    source = Random(f"users, {users}")
    rounds = ROUNDS if users < MANY_USERS else FEW_ROUNDS
    pairs = [lengths.draw(source) for _ in range(users * rounds)]
    workload = Workload("users", tuple(Arrival(0.0, *pair) for pair in pairs))
    clock = asyncio.get_running_loop().time
    async with open_cluster(case.spec, case.models) as cluster:

        async def user(number: int, start_s: float) -> list[RequestRecord]:
            await asyncio.sleep(start_s)
            indices = range(number * rounds, (number + 1) * rounds)
            return [await _send(cluster, workload, index, slo) for index in indices][1:]

        within_s = (await _send(cluster, workload, 0, slo)).e2e_s or 0.0
        starts_s = [source.random() * within_s for _ in range(users)]
        begin_s = clock()
        of_users = await asyncio.gather(*(user(*each) for each in enumerate(starts_s)))
        seconds = clock() - begin_s
    served = [each for one in of_users for each in one]
    ttft = percentiles(np.array([each.ttft_s for each in served]))
    assert ttft is not None, "every user has counted requests"
    tpot = percentiles(np.array([each.tpot_s for each in served if each.output_tokens > 1]))
    return UnderLoad(users, ttft, tpot, sum(output for _, output in pairs) / seconds)


async def _send(cluster: SimCluster, workload: Workload, index: int, slo: SLO) -> RequestRecord:
    """Send a request now and wait for its end. Raises what production raises."""
    clock = asyncio.get_running_loop().time
    recorder = RequestRecorder(index, replace(workload.arrivals[index], at_s=clock()), clock)
    await cluster.dispatchers[0].run(sim_request(workload, index, VOCAB_SIZE, slo=slo), recorder.record)
    return recorder.served()
