"""The buyer's question, in three answers that are never mixed: how long a prompt takes until its first token, how long
each further token takes, and how much load there may be while both still hold.

One instance of the model on each kind of GPU, by closed forms at once; then simulated: for a user who has it to
himself; for several who each ask again as soon as they have their answer; and for the largest rate of requests that
keeps the promise.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from random import Random

import numpy as np

from cluster.offline.plan.asked import PlanError, PlanRequest
from cluster.offline.plan.deploy import Layout, WorkerGroup
from cluster.offline.plan.estimate import Estimate, estimate
from cluster.offline.plan.placement import Told
from cluster.offline.plan.search import LEAST, SLACK
from cluster.offline.plan.shapes import instances
from cluster.offline.plan.trial import Trial, whole
from cluster.offline.scoring.figures import Percentiles, percentiles
from cluster.offline.scoring.goodput import Goodput, Map, Probes, Search, TimeUp, goodput, trying
from cluster.offline.scoring.records import Served
from cluster.offline.scoring.watch import RequestWatch
from cluster.offline.sim.clock import run
from cluster.offline.sim.cluster import SimCluster, open_cluster
from cluster.offline.sim.compare import Case
from cluster.offline.workload.arrivals import Arrival, Workload, WorkloadError
from cluster.offline.workload.lengths import Uniform
from cluster.offline.workload.prompts import request
from cluster.spec import Role
from workers.profiles.capacity import least_gpus
from workers.request import SLO

ROUNDS = 6  # requests of each user, of which the first is not counted: they all begin with an idle machine
FEW_ROUNDS = 3  # of many users, who are samples enough
MANY = 20  # users
OF_ESTIMATE, STRIDE = 0.75, 1.25  # where a search begins: what queueing usually leaves of the closed form
SAMPLED = 512
VOCAB_SIZE = 32_000  # which tokens there are changes no time


@dataclass(frozen=True, slots=True)
class LengthRanges:
    """Tokens of prompts and answers, from and to."""

    prompt: Uniform
    output: Uniform

    @property
    def name(self) -> str:
        prompt, output = (
            f"{each.least}" if each.least == each.most else f"{each.least}-{each.most}"
            for each in (self.prompt, self.output)
        )
        return f"prompts of {prompt}, answers of {output} tokens"

    def workload(self, seed: int = 0) -> Workload:
        """Lengths to draw from; their times mean nothing."""
        draws = Random(f"buyer, {seed}")
        drawn = [(self.prompt.draw(draws), self.output.draw(draws)) for _ in range(SAMPLED)]
        return Workload(self.name, tuple(Arrival(float(at), *pair) for at, pair in enumerate(drawn)))

    @property
    def ends(self) -> tuple[tuple[int, int], tuple[int, int]]:
        return (self.prompt.least, self.output.least), (self.prompt.most, self.output.most)


def span(text: str, what: str) -> Uniform:
    """`1500-2000` or `500` tokens. Raises `PlanError`."""
    least, dash, most = text.strip().partition("-")
    try:
        return Uniform(int(least), int(most) if dash else int(least))
    except (ValueError, WorkloadError):
        raise PlanError(
            f"{what} is {text!r}; it must be tokens as 500, or a range as 1500-2000, the smaller first, 1 or more"
        ) from None


@dataclass(frozen=True, slots=True)
class UnderLoad:
    """What `users` who each ask again and again see. `output_tokens_rate`: a second, all users together."""

    users: int
    ttft_s: Percentiles
    tpot_s: Percentiles | None
    output_tokens_rate: float


@dataclass(frozen=True, slots=True)
class InstanceAnswer:
    """For one instance. `ttft_s` and `tpot_s`: of a single user, for the shortest and for the longest request. `users`:
    those that were simulated in time. `throughput` is None where `estimate` shows that no load keeps the promise, which
    needs no simulation."""

    group: WorkerGroup
    estimate: Estimate
    ttft_s: tuple[float, float]
    tpot_s: tuple[float, float]
    users: tuple[UnderLoad, ...]
    throughput: Goodput | None
    mean_output: float
    complete: bool = True


def least(model: str, hardware: str) -> int:
    """The fewest GPUs of a kind that hold the model. Raises `DoesNotFit` and `ProfileError`."""
    return least_gpus(model, hardware)[0]


@dataclass(frozen=True, slots=True)
class Instance:
    """One way to run the model on GPUs of one kind, and what closed forms say of it."""

    asked: PlanRequest
    lengths: LengthRanges
    group: WorkerGroup
    trial: Trial
    estimate: Estimate

    @property
    def name(self) -> str:
        """`2 x h100-80gb (TP2 PP1)`."""
        return self.estimate.name


def instances_of(asked: PlanRequest, lengths: LengthRanges) -> list[Instance]:
    """Every tensor-parallel instance that fits; where there is none, every one. Raises `PlanError`."""
    groups = [group for group in instances(asked) if group.pipeline == 1] or instances(asked)
    return [_instance(asked, lengths, group) for group in groups]


def _instance(asked: PlanRequest, lengths: LengthRanges, group: WorkerGroup) -> Instance:
    trial = replace(whole(asked, _layout(group)), give_up=asked.target)
    count = f"{group.gpus_each} x " if group.gpus_each > 1 else ""
    cut = f" (TP{group.tensor} PP{group.pipeline})" if group.gpus_each > 1 else ""
    name = f"{count}{group.hardware}{cut}"
    return Instance(asked, lengths, group, trial, estimate(trial, lengths.ends, asked.target, name))


def _layout(group: WorkerGroup) -> Layout:
    return Layout("colocated", (replace(group, role=Role.MIXED),))


def answers(
    wanted: Sequence[Instance], users: Sequence[int], each: Map = map, told: Told = lambda what, how_far: None
) -> list[InstanceAnswer]:
    """Of every instance, all at the same time, so that each has some when the time is up. Raises `PlanError`."""
    with ThreadPoolExecutor(max(1, 2 * len(wanted))) as threads:  # they wait for `each`
        loaded = [threads.submit(_loaded, one, tuple(users), each, told) for one in wanted]
        throughputs = [threads.submit(_throughput, one, each, told) for one in wanted]
        return [
            _answer(one, few.result(), many.result())
            for one, few, many in zip(wanted, loaded, throughputs, strict=True)
        ]


def _answer(one: Instance, loaded: "_Loaded", throughput: Goodput | None) -> InstanceAnswer:
    lengths, found = one.lengths, one.estimate
    return InstanceAnswer(
        one.group,
        found,
        ttft_s=loaded.ttft_s or found.ttft_s,
        tpot_s=loaded.tpot_s or found.tpot_s,
        users=loaded.users,
        throughput=throughput,
        mean_output=(lengths.output.least + lengths.output.most) / 2,
        complete=loaded.complete and (throughput is None or throughput.complete),
    )


@dataclass(slots=True)
class _Loaded:
    """What is known of a single user, and of several."""

    ttft_s: tuple[float, float] | None = None
    tpot_s: tuple[float, float] | None = None
    users: tuple[UnderLoad, ...] = ()
    complete: bool = False


def _loaded(one: Instance, users: tuple[int, ...], each: Map, told: Told) -> _Loaded:
    known = _Loaded()
    try:
        case = one.trial.case
        alone = list(each(partial(_alone, case), one.lengths.ends))
        known.ttft_s = alone[0].ttft_s or 0.0, alone[1].ttft_s or 0.0
        known.tpot_s = alone[0].tpot_s or 0.0, alone[1].tpot_s or 0.0
        slo = one.asked.slo
        if slo.tpot_s is not None and max(known.tpot_s) > slo.tpot_s:
            slo = SLO()  # an engine that can never keep a promise would starve prompts for it
        for count, found in zip(users, each(partial(_several, case, one.lengths, slo), users), strict=True):
            known.users += (found,)
            told(one.name, f"{count} users simulated")
        known.complete = True
    except TimeUp:
        pass
    return known


def _throughput(one: Instance, each: Map, told: Told) -> Goodput | None:
    trial, asked = one.trial, one.asked
    if not one.estimate.rate:
        return None
    cap = trial.most * SLACK
    search = Search(OF_ESTIMATE * min(trial.estimate, cap), cap / LEAST, cap, asked.tolerance, STRIDE)
    return goodput(
        Probes(trial, each),
        search,
        asked.slo,
        target=asked.target,
        seeds=asked.seeds,
        gpus=trial.gpus,
        led=True,
        on_probe=lambda rate, held: told(one.name, trying(rate, held)),
    )


def _alone(case: Case, lengths: tuple[int, int]) -> Served:
    return run(_one_after_another(case, lengths))


def _several(case: Case, lengths: LengthRanges, slo: SLO, users: int) -> UnderLoad:
    return run(_users(case, lengths, users, slo))


async def _one_after_another(case: Case, lengths: tuple[int, int]) -> Served:
    async with open_cluster(case.spec, case.models) as cluster:
        workload = Workload("one request", (Arrival(0.0, *lengths),))
        return await _ask(cluster, workload, 0, SLO())


async def _users(case: Case, lengths: LengthRanges, users: int, slo: SLO) -> UnderLoad:
    """They begin one after another, at random within the time of one answer."""
    source = Random(f"users, {users}")
    rounds = ROUNDS if users < MANY else FEW_ROUNDS
    pairs = [(lengths.prompt.draw(source), lengths.output.draw(source)) for _ in range(users * rounds)]
    workload = Workload("users", tuple(Arrival(0.0, *pair) for pair in pairs))
    async with open_cluster(case.spec, case.models) as cluster:
        first = await _ask(cluster, workload, 0, slo)
        within_s = first.e2e_s or 0.0
        begins = [source.random() * within_s for _ in range(users)]
        begun_s = asyncio.get_running_loop().time()
        each = [range(number * rounds, (number + 1) * rounds) for number in range(users)]
        tasks = [_user(cluster, workload, slo, *one) for one in zip(each, begins, strict=True)]
        served = [each for of_one in await asyncio.gather(*tasks) for each in of_one]
        seconds = asyncio.get_running_loop().time() - begun_s
    ttft = percentiles(np.array([each.ttft_s for each in served]))
    assert ttft is not None, "every user has counted requests"
    tpot = percentiles(np.array([each.tpot_s for each in served if each.output_tokens > 1]))
    return UnderLoad(users, ttft, tpot, sum(output for _, output in pairs) / seconds)


async def _user(cluster: SimCluster, workload: Workload, slo: SLO, indices: range, begin_s: float) -> list[Served]:
    await asyncio.sleep(begin_s)
    return [await _ask(cluster, workload, index, slo) for index in indices][1:]


async def _ask(cluster: SimCluster, workload: Workload, index: int, slo: SLO) -> Served:
    """Sends a request now and waits for its end. Raises what production raises."""
    clock = asyncio.get_running_loop().time
    arrival = replace(workload.arrivals[index], at_s=clock())
    watch = RequestWatch(index, arrival, clock)
    await cluster.dispatchers[0].run(request(workload, index, VOCAB_SIZE, slo=slo), watch.see)
    return watch.served()
