"""What a decision costs: microseconds to choose and to note it, by router and number of workers.

python -m cluster.bench.routing
"""

import time

from cluster.policy.placement import Ask, Placement
from cluster.policy.policy import open_policy
from cluster.spec import ADMISSION, ROUTING, ClusterSpec, GatewaySpec, PoolSpec, Role
from cluster.view import ClusterView, WorkerState, WorkerView
from workers.costs import LinearCost
from workers.request import SLO, Request, SamplingParams
from workers.stats import WorkerStats

WORKERS = (10, 100, 1000)
PROMPT_TOKENS = 1000
REQUESTS = 60
UNDER_WAY = 40  # requests; the oldest ends when another begins


def measure(routing: str, admission: str, num_workers: int) -> float:
    """Seconds for one request, asked and noted, with `UNDER_WAY` others in the book."""
    gateway = GatewaySpec(routing=routing, admission=admission, slo=SLO(ttft_s=1e6, tpot_s=1e6))
    pools = tuple(
        PoolSpec(role.value, role, num_workers // 2, cost=LinearCost()) for role in (Role.PREFILL, Role.DECODE)
    )
    policy = open_policy(ClusterSpec(model="m", pools=pools, gateway=gateway), seed=1)
    view = _view(num_workers)
    keys: list[str] = []
    begun_s = 0.0
    for number in range(UNDER_WAY + REQUESTS):
        if number == UNDER_WAY:
            begun_s = time.perf_counter()
        prompt = tuple(range(number % 7, number % 7 + PROMPT_TOKENS))
        ask = Ask(view, Request(f"r{number}", prompt, SamplingParams(max_tokens=100)), now_s=number * 0.01)
        placement = policy.choose(ask)
        assert isinstance(placement, Placement)
        policy.began(ask, placement)
        keys.append(ask.request.key)
        if number >= UNDER_WAY:
            policy.prefilled(keys[0], ask.now_s)
            policy.ended(keys.pop(0), ask.now_s)
    return (time.perf_counter() - begun_s) / REQUESTS


def _view(num_workers: int) -> ClusterView:
    workers = []
    for number in range(num_workers):
        role = Role.PREFILL if number % 2 else Role.DECODE
        stats = WorkerStats(queued_tokens=number % 13, running=number % 7, total_blocks=4000, free_blocks=2000)
        name = f"{role.value}-{number}"
        workers.append(WorkerView(name, role.value, role, WorkerState.READY, "1", capacity_tokens=8192, stats=stats))
    names = [worker.name for worker in workers]
    pairs = frozenset((owner, reader) for owner in names for reader in names if owner != reader)
    return ClusterView(1, "bench", None, tuple(workers), pairs=pairs)


def main() -> None:
    print(f"microseconds a request of {PROMPT_TOKENS} tokens, by workers" + "".join(f"{n:>10}" for n in WORKERS))
    rows = [(routing, "none") for routing in ROUTING] + [("least-loaded", each) for each in ADMISSION[1:]]
    for routing, admission in rows:
        name = routing if admission == "none" else f"{routing}, {admission} admission"
        figures = "".join(f"{measure(routing, admission, count) * 1e6:>10.0f}" for count in WORKERS)
        print(f"{name:<52}{figures}")


if __name__ == "__main__":
    main()
