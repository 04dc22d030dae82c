"""What borrowed memory does for the throughput of short and long requests together, in the simulator.

    python -m benchmarks.lending_gain

Four workers with Llama-3-8B on one L4 each (43,312 tokens of KV), the router `slo`; a tenth of the prompts is long.
First prompts that fit into no worker: refused, with borrowed memory, and with two L4 for each worker. Then prompts that
fit: with Infinite-LLM's greedy rule, and with lenders for every long prompt that finds no room. Takes five minutes.
"""

import logging
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from statistics import fmean, quantiles
from unittest.mock import patch

from msgspec import structs

from cluster.offline.scoring.records import RequestOutcome, Run
from cluster.offline.sim.fleet import fleet, pool_model
from cluster.offline.sim.run import simulate
from cluster.offline.workload.arrivals import Arrival, Workload
from cluster.policy.policy import Policy
from cluster.policy.routing.router import Enqueue, Placement, PlacementQuery, Refusal
from cluster.spec import ClusterSpec, GatewaySpec, HealthSpec, PoolSpec, Role
from workers.config import KEPT_SHARE, ParallelConfig
from workers.costs import CostModel
from workers.executor.simulated_lending import AttentionCalls, attention_seconds

MODEL, GPU, GPUS = "llama-3-8b", "l4", 4
CALLS = AttentionCalls(num_layers=32, num_heads=32, head_dim=128)
LONG = 5_000  # tokens; longer prompts are the long ones
SHARE = 0.1  # of the requests that are long
SEEDS = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class LendingWorker:
    """A worker's decodes, and the tokens that fit beside all that is assigned to it."""

    name: str
    batch: int
    context_tokens: int
    room: int


Rule = Callable[[CostModel, LendingWorker, Sequence[LendingWorker], int], tuple[str, ...]]


def greedy(cost: CostModel, borrower: LendingWorker, lenders: Sequence[LendingWorker], tokens: int) -> tuple[str, ...]:
    """The lenders with which the borrower should hold a request of this many tokens; none if output tokens/s fall.

    Source: Lin et al., Infinite-LLM: the instances with most free memory lend first.
    """
    missing, chosen = tokens - borrower.room, list[LendingWorker]()
    for lender in sorted(lenders, key=lambda each: -each.room):
        if missing > sum(each.room for each in chosen) and lender.room > 0:
            chosen.append(lender)
    if not chosen or missing > sum(each.room for each in chosen):
        return ()
    attention_s = attention_seconds(cost, 1, missing)
    waits_s = len(chosen) * CALLS.seconds(cost, 1) + attention_s
    before = sum(_rate(cost, each) for each in (borrower, *chosen))
    local = LendingWorker(borrower.name, borrower.batch + 1, borrower.context_tokens + borrower.room, 0)
    after = _rate(cost, local, waits_s) + sum(_rate(cost, each, attention_s / len(chosen)) for each in chosen)
    return tuple(each.name for each in chosen) if after > before else ()


def _rate(cost: CostModel, instance: LendingWorker, more_s: float = 0.0) -> float:
    return instance.batch / (cost.decode_seconds(instance.batch, instance.context_tokens) + more_s)


def always(cost: CostModel, borrower: LendingWorker, lenders: Sequence[LendingWorker], tokens: int) -> tuple[str, ...]:
    """All that have room."""
    return tuple(each.name for each in sorted(lenders, key=lambda each: -each.room) if each.room > 0)


def lends(rule: Rule) -> AbstractContextManager[object]:
    """The router adds the rule's lenders for a long request that finds no room on any worker."""
    choose = Policy.choose

    def with_lenders(policy: Policy, query: PlacementQuery) -> Placement | Refusal | Enqueue | None:
        placement = choose(policy, query)
        tokens = query.request.num_tokens + policy.expected_tokens(query.request)
        if not isinstance(placement, Placement) or placement.lenders or tokens < LONG:
            return placement
        instances = {}
        for worker in query.view.workers:
            assigned = policy.active.assigned(worker.name)
            taken = assigned.prompt_tokens + assigned.output_tokens
            context = assigned.prompt_tokens + assigned.output_tokens // 2
            room = worker.capacity_tokens - taken
            instances[worker.name] = LendingWorker(worker.name, assigned.sequences, context, room)
        if max(each.room for each in instances.values()) >= tokens:
            return placement
        borrower = instances.pop(placement.decode)
        kept = int(KEPT_SHARE * max(worker.capacity_tokens for worker in query.view.workers))
        lenders = [replace(each, room=each.room - kept) for each in instances.values()]
        cost = pool_model(MODEL, GPU, ParallelConfig()).cost
        return structs.replace(placement, lenders=rule(cost, borrower, lenders, tokens))

    return patch.object(Policy, "choose", with_lenders)


def mix(count: int, rate: float, long: tuple[int, int], answers: tuple[int, int], seed: int) -> Workload:
    """Poisson arrivals; short prompts have 200 to 1,000 tokens, and long ones answers of 100 to 400."""
    draw, at_s, arrivals = random.Random(seed), 0.0, []
    for _ in range(count):
        at_s += draw.expovariate(rate)
        prompt, answer = (long, (100, 400)) if draw.random() < SHARE else ((200, 1000), answers)
        arrivals.append(Arrival(at_s, draw.randint(*prompt), draw.randint(*answer)))
    return Workload("mix", tuple(arrivals))


def served(workload: Workload, tensor: int = 1, *, borrows: bool = True) -> Run:
    """On workers of `tensor` GPUs each. Without borrowed memory no request is longer than a worker's KV pool."""
    parallel, workers = ParallelConfig(tensor=tensor), GPUS // tensor
    engine = fleet(MODEL, GPU, parallel, workers).engine
    if not borrows:
        engine = replace(engine, max_model_len=engine.kv_blocks * engine.block_size)
    pool = PoolSpec("mixed", Role.MIXED, workers, engine=engine, hardware=GPU, parallel=parallel)
    gateway = GatewaySpec(routing="slo", rebalance=True, max_requests=1 << 20, placement_timeout_s=3600.0)
    spec = ClusterSpec(MODEL, (pool,), gateway=gateway, health=HealthSpec(1.0, 10.0), executor="simulated")
    return simulate(spec, {"mixed": pool_model(MODEL, GPU, parallel)}, workload)


def shown(runs: Sequence[Run]) -> str:
    rates = [sum(len(each.token_s) for each in run.served) / run.seconds for run in runs]
    done = [each for run in runs for each in run.served if each.outcome is RequestOutcome.FINISHED]
    parts = []
    for is_long in (False, True):
        ttft_s = [each.ttft_s or 0.0 for each in done if (each.prompt_tokens > LONG) is is_long]
        cuts = quantiles(ttft_s, n=10) if len(ttft_s) > 1 else [float("nan")] * 9
        parts.append(f"{len(ttft_s):>4} {cuts[4]:>7.2f} {cuts[8]:>7.2f}")
    spread = f"{fmean(rates):>7.1f} ({min(rates):.1f} to {max(rates):.1f})"
    return f"{spread:<26}{'   '.join(parts)}   {sum(len(run.served) for run in runs) - len(done):>4}"


def table(title: str, systems: dict[str, Callable[[], list[Run]]]) -> None:
    print(f"\n{title}\n{'':<34}{'output tokens/s':<26}short: served, TTFT p50, p90; long; not served")
    for name, run in systems.items():
        print(f"{name:<34}{shown(run())}", flush=True)


def main() -> None:
    logging.disable(logging.WARNING)  # each attempt that finds no lender
    longer = [mix(100, 0.2, (45_000, 85_000), (100, 400), seed) for seed in SEEDS]
    table(
        "long prompts fit into no worker: 0.2 requests/s",
        {
            "no memory is borrowed": lambda: [served(each, borrows=False) for each in longer],
            "borrowed": lambda: [served(each) for each in longer],
            "two workers on two L4 each": lambda: [served(each, 2) for each in longer],
        },
    )
    fitting = [mix(150, 0.7, (20_000, 40_000), (500, 1500), seed) for seed in SEEDS]

    def run_with(patched: AbstractContextManager[object]) -> list[Run]:
        with patched:
            return [served(each) for each in fitting]

    table(
        "long prompts fit: 0.7 requests/s, answers of 500 to 1,500",
        {
            "no memory is borrowed": lambda: run_with(nullcontext()),
            "the greedy rule": lambda: run_with(lends(greedy)),
            "lenders for each without room": lambda: run_with(lends(always)),
        },
    )


if __name__ == "__main__":
    main()
