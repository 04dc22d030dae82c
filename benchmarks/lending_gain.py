"""What borrowed memory does for the throughput of short and long requests together, in the simulator.

    python -m benchmarks.lending_gain

Four workers with Llama-3-8B on one L4 each (43,312 tokens of KV); a tenth of the prompts is long. First prompts that
fit into a worker: lenders by Infinite-LLM's greedy rule, and for every long prompt that finds no room. Then prompts
that fit into no worker: with and without regard to the memory that earlier ones still take. Takes ten minutes of CPU.
"""

import logging
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import fmean, quantiles
from unittest.mock import patch

from msgspec import structs

from cluster.offline.scoring.records import RequestOutcome, Run
from cluster.offline.sim.fleet import fleet, pool_model
from cluster.offline.sim.run import simulate
from cluster.offline.workload.arrivals import Arrival, Workload
from cluster.policy.active_requests import ActiveRequests
from cluster.policy.policy import Policy
from cluster.policy.routing.router import Ask, Later, Placement, Refusal
from cluster.spec import ClusterSpec, GatewaySpec, HealthSpec, PoolSpec, Role
from workers.config import KEPT_SHARE, ParallelConfig
from workers.costs import CostModel
from workers.executor.modelled import AttentionCalls
from workers.executor.modelled_lending import attention_seconds

MODEL, GPU, GPUS = "llama-3-8b", "l4", 4
CALLS = AttentionCalls(num_layers=32, num_heads=32, head_dim=128)
Systems = dict[str, tuple[str, int, AbstractContextManager[object]]]  # routing, GPUs of a worker, what is patched
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


def lends(
    rule: Callable[[CostModel, LendingWorker, Sequence[LendingWorker], int], tuple[str, ...]],
) -> AbstractContextManager[object]:
    """Routers add the rule's lenders for a long request that finds no room on any worker."""
    choose = Policy.choose

    def with_lenders(policy: Policy, ask: Ask) -> Placement | Refusal | Later | None:
        placement = choose(policy, ask)
        tokens = ask.request.num_tokens + policy.expected_tokens(ask.request)
        if not isinstance(placement, Placement) or placement.lenders or tokens < LONG:
            return placement
        instances = {}
        for worker in ask.view.workers:
            load = policy.active.worker_load(worker.name)
            taken = load.assigned.prompt_tokens + load.assigned.output_tokens
            context = load.assigned.prompt_tokens + load.assigned.output_tokens // 2
            room = worker.capacity_tokens - taken
            instances[worker.name] = LendingWorker(worker.name, load.assigned.sequences, context, room)
        if max(each.room for each in instances.values()) >= tokens:
            return placement
        borrower = instances.pop(placement.decode)
        kept = int(KEPT_SHARE * max(worker.capacity_tokens for worker in ask.view.workers))
        lenders = [
            LendingWorker(each.name, each.batch, each.context_tokens, each.room - kept) for each in instances.values()
        ]
        cost = pool_model(MODEL, GPU, ParallelConfig()).cost
        return structs.replace(placement, lenders=rule(cost, borrower, lenders, tokens))

    return patch.object(Policy, "choose", with_lenders)


def always(cost: CostModel, borrower: LendingWorker, lenders: Sequence[LendingWorker], tokens: int) -> tuple[str, ...]:
    """All that have room."""
    return tuple(each.name for each in sorted(lenders, key=lambda each: -each.room) if each.room > 0)


def mix(count: int, rate: float, long: tuple[int, int], answers: tuple[int, int], seed: int) -> Workload:
    """Poisson arrivals; short prompts have 200 to 1,000 tokens, and long ones answers of 100 to 400."""
    draw, at_s, arrivals = random.Random(seed), 0.0, []
    for _ in range(count):
        at_s += draw.expovariate(rate)
        prompt, answer = (long, (100, 400)) if draw.random() < SHARE else ((200, 1000), answers)
        arrivals.append(Arrival(at_s, draw.randint(*prompt), draw.randint(*answer)))
    return Workload("mix", tuple(arrivals))


def served(workload: Workload, routing: str, tensor: int = 1) -> Run:
    parallel, workers = ParallelConfig(tensor=tensor), GPUS // tensor
    engine = fleet(MODEL, GPU, parallel, workers).engine
    pool = PoolSpec("mixed", Role.MIXED, workers, engine=engine, hardware=GPU, parallel=parallel)
    gateway = GatewaySpec(routing=routing, rebalance=routing == "slo", max_requests=1 << 20, placement_timeout_s=3600.0)
    spec = ClusterSpec(MODEL, (pool,), gateway=gateway, health=HealthSpec(1.0, 10.0), executor="modelled")
    return simulate(spec, {"mixed": pool_model(MODEL, GPU, parallel)}, workload)


def shown(runs: Sequence[Run]) -> str:
    rates = [sum(len(each.token_s) for each in run.served) / run.seconds for run in runs]
    done = [each for run in runs for each in run.served if each.outcome is RequestOutcome.FINISHED]
    lost = sum(len(run.served) for run in runs) - len(done)
    parts = []
    for is_long in (False, True):
        ttft_s = [each.ttft_s or 0.0 for each in done if (each.prompt_tokens > LONG) is is_long]
        cuts = quantiles(ttft_s, n=10)
        parts.append(f"{cuts[4]:>7.2f} {cuts[8]:>7.2f}")
    spread = f"{fmean(rates):>7.1f} ({min(rates):.1f} to {max(rates):.1f})"
    return f"{spread:<26}{'   '.join(parts)}{f'   {lost} failed' if lost else ''}"


def table(title: str, workloads: Sequence[Workload], systems: Systems) -> None:
    print(f"\n{title}\n{'':<34}{'output tokens/s':<26}TTFT p50, p90 in s: short, long")
    for name, (routing, tensor, patched) in systems.items():
        with patched:
            print(f"{name:<34}{shown([served(each, routing, tensor) for each in workloads])}", flush=True)


def main() -> None:
    logging.disable(logging.WARNING)  # each attempt that finds no lender
    for rate, answers in ((1.0, (100, 400)), (0.7, (500, 1500))):
        fitting = [mix(150, rate, (20_000, 40_000), answers, seed) for seed in SEEDS]
        systems: Systems = {
            "least-loaded": ("least-loaded", 1, nullcontext()),
            "slo": ("slo", 1, nullcontext()),
            "slo, greedy rule": ("slo", 1, lends(greedy)),
            "slo, always lenders": ("slo", 1, lends(always)),
        }
        table(f"long prompts fit: {rate} requests/s, answers of {answers[0]} to {answers[1]}", fitting, systems)
    for rate in (0.2, 0.5):
        longer = [mix(100, rate, (45_000, 85_000), (100, 400), seed) for seed in SEEDS]
        unaware: AbstractContextManager[object] = patch.object(ActiveRequests, "borrowing", lambda active: [])
        systems = {
            "memory of earlier ones not counted": ("slo", 1, unaware),
            "counted": ("slo", 1, nullcontext()),
            "two workers on two L4 each": ("slo", 2, nullcontext()),
        }
        table(f"long prompts fit into no worker: {rate} requests/s", longer, systems)


if __name__ == "__main__":
    main()
