"""What a decision costs: microseconds to choose and to note it, by router and number of workers.

Each worker has told of `NAMES` prefixes, half of which some others have too, and every second one has some of those
that are asked for.

python -m benchmarks.routing
"""

import random
import statistics
import time
from dataclasses import replace

import psutil
from msgspec import structs

from cluster.policy.policy import open_policy
from cluster.policy.routing.prefix_index import GRAIN, PrefixIndex, chain
from cluster.policy.routing.router import Ask, Placement
from cluster.spec import ADMISSION, ROUTING, ClusterSpec, GatewaySpec, PoolSpec, Role
from diptych.view import ClusterView, WorkerState, WorkerView
from workers.config import EngineConfig
from workers.costs import LinearCost
from workers.kv_events import KVEvents, NameChanges
from workers.request import SLO, Request, SamplingParams
from workers.stats import WorkerStats

WORKERS = (10, 100, 1000)
PROMPT_TOKENS = 1000
REQUESTS = 60
UNDER_WAY = 40  # requests; the oldest ends when another begins
PROMPTS = 7  # that are asked for again and again
ENGINE = EngineConfig(max_running=512)  # all of them fit on one worker
NAMES = 10_000  # of prefixes, on each worker
DOCUMENT = 50  # names of one chain that is shared
SHARED_BY = 8  # workers, on average


def measure(routing: str, admission: str, num_workers: int, index: PrefixIndex, changing: int = 0) -> float:
    """Seconds for one request, asked and noted, with `UNDER_WAY` others in the book: the median.

    Since the request before, `changing` workers have told new statistics.
    """
    gateway = GatewaySpec(routing=routing, admission=admission, slo=SLO(ttft_s=1e6, tpot_s=1e6))
    pools = tuple(
        PoolSpec(role.value, role, num_workers // 2, engine=ENGINE, cost=LinearCost())
        for role in (Role.PREFILL, Role.DECODE)
    )
    policy = open_policy(ClusterSpec(model="m", pools=pools, gateway=gateway), seed=1, index=index)
    view = _view(num_workers)
    keys: list[str] = []
    taken_s: list[float] = []
    for number in range(UNDER_WAY + REQUESTS):
        view = _changed(view, number, changing)
        request = Request(f"r{number}", _prompt(number), SamplingParams(max_tokens=100))
        ask = Ask(view, request, now_s=number * 0.01)
        begun_s = time.perf_counter()
        placement = policy.choose(ask)
        assert isinstance(placement, Placement)
        policy.began(ask, placement)
        keys.append(ask.request.key)
        if number >= UNDER_WAY:
            policy.prefilled(keys[0], ask.now_s)
            policy.ended(keys.pop(0), ask.now_s)
            taken_s.append(time.perf_counter() - begun_s)
    return statistics.median(taken_s)


def _changed(view: ClusterView, number: int, changing: int) -> ClusterView:
    """As many workers, others each time, have told something new."""
    if not changing:
        return view
    workers = list(view.workers)
    for row in range(number * changing, (number + 1) * changing):
        worker = workers[row % len(workers)]
        stats = structs.replace(worker.stats, queued_tokens=(number + row) % 13, running=(number + row) % 7)
        workers[row % len(workers)] = structs.replace(worker, stats=stats)
    return replace(view, workers=tuple(workers))


def _prompt(number: int) -> tuple[int, ...]:
    return tuple(range(number % PROMPTS, number % PROMPTS + PROMPT_TOKENS))


def filled(num_workers: int) -> PrefixIndex:
    """What `NAMES` prefixes on each worker make of an index."""
    index, draw = PrefixIndex(), random.Random("names")
    num_documents = max(1, num_workers * NAMES // 2 // DOCUMENT // SHARED_BY)
    documents = [[draw.getrandbits(60) for _ in range(DOCUMENT)] for _ in range(num_documents)]
    asked = [chain(_prompt(number)) for number in range(PROMPTS)]
    for number in range(num_workers):
        names = []
        if number % 4 < 2:
            names += [name for each in asked for name in each[: 1 + draw.randrange(len(each))]]
        while len(names) < NAMES // 2:
            names += documents[draw.randrange(num_documents)]
        names += [draw.getrandbits(60) for _ in range(NAMES - len(names))]
        news = KVEvents(0, NAMES, NAMES, GRAIN, whole=True, device=NameChanges(tuple(names)))
        index.take(_name(number), "1", news)
    return index


def _role(number: int) -> Role:
    return Role.PREFILL if number % 2 else Role.DECODE


def _name(number: int) -> str:
    return f"{_role(number).value}-{number}"


def lookup_seconds(index: PrefixIndex) -> float:
    """One lookup of a prompt that half the workers have some of, its chain's computation included."""
    prompts = [_prompt(number) for number in range(PROMPTS)]
    for prompt in prompts:  # as it is when these prompts are common
        index.matches(chain(prompt))
    begun_s = time.perf_counter()
    for number in range(REQUESTS):
        index.matches(chain(prompts[number % PROMPTS]))
    return (time.perf_counter() - begun_s) / REQUESTS


def _view(num_workers: int) -> ClusterView:
    workers = []
    for number in range(num_workers):
        role = _role(number)
        stats = WorkerStats(queued_tokens=number % 13, running=number % 7, total_blocks=4000, free_blocks=2000)
        workers.append(
            WorkerView(_name(number), role.value, role, WorkerState.READY, "1", capacity_tokens=8192, stats=stats)
        )
    names = [worker.name for worker in workers]
    pairs = frozenset((owner, reader) for owner in names for reader in names if owner != reader)
    return ClusterView(1, "bench", None, tuple(workers), pairs=pairs)


def main() -> None:
    process, indices, megabytes = psutil.Process(), {}, {}
    for count in WORKERS:
        before = process.memory_info().rss
        indices[count] = filled(count)
        megabytes[count] = (process.memory_info().rss - before) / 1e6
    print(f"microseconds a request of {PROMPT_TOKENS} tokens, by workers" + "".join(f"{n:>10}" for n in WORKERS))
    rows = [(routing, "none") for routing in ROUTING] + [("least-loaded", each) for each in ADMISSION[1:]]
    for routing, admission in rows:
        name = routing if admission == "none" else f"{routing}, {admission} admission"
        figures = "".join(f"{measure(routing, admission, n, indices[n]) * 1e6:>10.0f}" for n in WORKERS)
        print(f"{name:<52}{figures}", flush=True)
    for share in (0.01, 0.1, 1.0):
        name = f"promise, {share:.0%} of workers with new statistics"
        times = (measure("slo", "none", n, indices[n], round(n * share)) for n in WORKERS)
        print(f"{name:<52}" + "".join(f"{each * 1e6:>10.0f}" for each in times), flush=True)
    lookups = "".join(f"{lookup_seconds(indices[n]) * 1e6:>10.0f}" for n in WORKERS)
    print(f"{'of these, to look up what all workers have':<52}{lookups}")
    print(f"{'megabytes of the index':<52}" + "".join(f"{megabytes[n]:>10.0f}" for n in WORKERS))


if __name__ == "__main__":
    main()
