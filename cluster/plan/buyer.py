"""The buyer's question, in three answers that are never mixed: how long a prompt takes until its first token, how long
each further token takes, and how much load there may be while both still hold.

One instance of the model on each kind of GPU, simulated: for a user who has it to himself; for several who each ask
again as soon as they have their answer; and for the largest rate of requests that keeps the promise.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random

import numpy as np

from cluster.plan.asked import Asked, PlanError
from cluster.plan.deploy import Group, Layout, case_of
from cluster.plan.search import LEAST, SLACK
from cluster.plan.shapes import instances
from cluster.plan.trial import Trial, whole
from cluster.scoring.figures import Percentiles, percentiles
from cluster.scoring.goodput import Goodput, Map, Probes, Search, goodput
from cluster.scoring.records import Served
from cluster.scoring.watch import Watch
from cluster.sim.clock import run
from cluster.sim.cluster import SimCluster, open_cluster
from cluster.sim.compare import Case
from cluster.spec import Role
from cluster.workload.arrivals import Arrival, Workload, WorkloadError
from cluster.workload.lengths import Uniform
from cluster.workload.prompts import request
from workers.profiles.capacity import least_gpus
from workers.request import SLO

ROUNDS = 6  # requests of each user, of which the first is not counted: they all begin with an idle machine
SAMPLED = 512
VOCAB_SIZE = 32_000  # which tokens there are changes no time


@dataclass(frozen=True, slots=True)
class Lengths:
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
class Answer:
    """For one instance. `ttft_s` and `tpot_s`: of a single user, for the shortest and for the longest request."""

    group: Group
    ttft_s: tuple[float, float]
    tpot_s: tuple[float, float]
    users: tuple[UnderLoad, ...]
    throughput: Goodput
    mean_output: float


def least(model: str, hardware: str) -> int:
    """The fewest GPUs of a kind that hold the model. Raises `DoesNotFit` and `ProfileError`."""
    return least_gpus(model, hardware)[0]


def answers(asked: Asked, lengths: Lengths, users: Sequence[int], each: Map = map) -> list[Answer]:
    """For every kind of GPU and every tensor-parallel instance of it. Raises `PlanError`."""
    groups = [group for group in instances(asked) if group.pipeline == 1] or instances(asked)
    return list(each(partial(answer, asked, lengths, tuple(users)), groups))


def answer(asked: Asked, lengths: Lengths, users: tuple[int, ...], group: Group) -> Answer:
    layout = Layout("colocated", (replace(group, role=Role.MIXED),))
    case = case_of(asked, layout)
    alone = [run(_one_after_another(case, pair)) for pair in lengths.ends]
    slowest_s = max(each.tpot_s or 0.0 for each in alone)
    # An engine that can never keep a promise would starve prompts for it.
    slo = asked.slo if asked.slo.tpot_s is None or slowest_s <= asked.slo.tpot_s else SLO()
    loaded = tuple(run(_users(case, lengths, count, slo)) for count in users)
    return Answer(
        group,
        ttft_s=(alone[0].ttft_s or 0.0, alone[1].ttft_s or 0.0),
        tpot_s=(alone[0].tpot_s or 0.0, alone[1].tpot_s or 0.0),
        users=loaded,
        throughput=_throughput(asked, whole(asked, layout)),
        mean_output=(lengths.output.least + lengths.output.most) / 2,
    )


def _throughput(asked: Asked, trial: Trial) -> Goodput:
    cap = trial.most * SLACK
    search = Search(min(trial.estimate, cap) / 2.0, cap / LEAST, cap, asked.tolerance)
    return goodput(Probes(trial), search, asked.slo, target=asked.target, seeds=asked.seeds, gpus=trial.gpus)


async def _one_after_another(case: Case, lengths: tuple[int, int]) -> Served:
    async with open_cluster(case.spec, case.models) as cluster:
        workload = Workload("one request", (Arrival(0.0, *lengths),))
        return await _ask(cluster, workload, 0, SLO())


async def _users(case: Case, lengths: Lengths, users: int, slo: SLO) -> UnderLoad:
    """They begin one after another, at random within the time of one answer."""
    source = Random(f"users, {users}")
    pairs = [(lengths.prompt.draw(source), lengths.output.draw(source)) for _ in range(users * ROUNDS)]
    workload = Workload("users", tuple(Arrival(0.0, *pair) for pair in pairs))
    async with open_cluster(case.spec, case.models) as cluster:
        first = await _ask(cluster, workload, 0, slo)
        within_s = first.e2e_s or 0.0
        begins = [source.random() * within_s for _ in range(users)]
        begun_s = asyncio.get_running_loop().time()
        tasks = [_user(cluster, workload, slo, number, begin_s) for number, begin_s in enumerate(begins)]
        served = [each for of_one in await asyncio.gather(*tasks) for each in of_one]
        seconds = asyncio.get_running_loop().time() - begun_s
    ttft = percentiles(np.array([each.ttft_s for each in served]))
    assert ttft is not None, "every user has counted requests"
    tpot = percentiles(np.array([each.tpot_s for each in served if each.output_tokens > 1]))
    return UnderLoad(users, ttft, tpot, sum(output for _, output in pairs) / seconds)


async def _user(cluster: SimCluster, workload: Workload, slo: SLO, number: int, begin_s: float) -> list[Served]:
    await asyncio.sleep(begin_s)
    indices = range(number * ROUNDS, (number + 1) * ROUNDS)
    return [await _ask(cluster, workload, index, slo) for index in indices][1:]


async def _ask(cluster: SimCluster, workload: Workload, index: int, slo: SLO) -> Served:
    """Sends a request now and waits for its end. Raises what production raises."""
    clock = asyncio.get_running_loop().time
    arrival = replace(workload.arrivals[index], at_s=clock())
    watch = Watch(index, arrival, clock)
    await cluster.dispatchers[0].run(request(workload, index, VOCAB_SIZE, slo=slo), watch.see)
    return watch.served()
