"""Conversations in the simulator: what the next turn finds of the last one, and its TTFT, by router.

    python -m benchmarks.simulated_turns

Each user waits for an answer, thinks, and asks again; the prompt is all that was said. Two workers prefill and two
decode, Llama-3-8B on one H100 each. Takes a minute.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, quantiles

from cluster.dispatch.dispatcher import Dispatcher
from cluster.events import Completed, Delta, Event
from cluster.offline.sim.clock import run
from cluster.offline.sim.cluster import PoolModel, open_cluster
from cluster.offline.sim.fleet import fleet, pool_model
from cluster.spec import ClusterSpec, GatewaySpec, HealthSpec, PoolSpec, Role
from workers.config import ParallelConfig
from workers.request import Request, SamplingParams

MODEL, GPU = "llama-3-8b", "h100-80gb"
USERS, TURNS = 48, 4
PROMPT, QUESTION, ANSWER = 4000, 100, 400  # tokens
THINKING_S = 5.0  # mean
ROUTERS = ("least-loaded", "mooncake-local", "mooncake", "slo")


@dataclass(frozen=True, slots=True)
class SimulatedTurn:
    """`history`: tokens of the earlier turns."""

    history: int
    cached_tokens: int
    ttft_s: float


def cluster_of(routing: str, *, lends: bool = True) -> tuple[ClusterSpec, dict[str, PoolModel]]:
    """`lends`: decode workers cache what they have, so that prefill workers can fetch it."""
    engine = fleet(MODEL, GPU, ParallelConfig(), 4).engine
    decode = replace(engine, prefix_caching=lends)
    pools = (
        PoolSpec("prefill", Role.PREFILL, 2, engine=engine, hardware=GPU),
        PoolSpec("decode", Role.DECODE, 2, engine=decode, hardware=GPU),
    )
    gateway, health = GatewaySpec(routing=routing, max_requests=1 << 20), HealthSpec(1.0, 10.0)
    model = pool_model(MODEL, GPU, ParallelConfig())
    spec = ClusterSpec(MODEL, pools, gateway=gateway, health=health, executor="simulated")
    return spec, {pool.name: model for pool in pools}


def simulated_turns(
    spec: ClusterSpec, models: dict[str, PoolModel], users: int = USERS, turns: int = TURNS, seed: int = 0
) -> list[SimulatedTurn]:
    """All turns but the first of each user."""
    return run(_turns(spec, models, users, turns, seed))


async def _turns(
    spec: ClusterSpec, models: dict[str, PoolModel], users: int, turns: int, seed: int
) -> list[SimulatedTurn]:
    async with open_cluster(spec, models) as cluster:
        (dispatcher,) = cluster.dispatchers
        talks = [_talk(dispatcher, user, turns, random.Random(f"{seed}, {user}")) for user in range(users)]
        return [turn for talk in await asyncio.gather(*talks) for turn in talk]


async def _talk(dispatcher: Dispatcher, user: int, turns: int, draw: random.Random) -> list[SimulatedTurn]:
    said: list[int] = []
    taken = []
    for turn in range(turns):
        await asyncio.sleep(draw.expovariate(1 / THINKING_S))
        history = len(said)
        said += draw.choices(range(3, 30_000), k=QUESTION if turn else PROMPT)
        sampling = SamplingParams(seed=1, max_tokens=ANSWER, ignore_eos=True)
        events: list[Event] = []
        await dispatcher.run(Request(f"u{user}-{turn}", tuple(said), sampling), events.append)
        said += [token for event in events if isinstance(event, Delta) for token in event.tokens]
        completed = events[-1]
        assert isinstance(completed, Completed)
        if turn:
            taken.append(SimulatedTurn(history, completed.cached_tokens, completed.ledger.ttft_ns / 1e9))
    return taken


def shown(turns: Sequence[SimulatedTurn]) -> str:
    ttft_s = quantiles([each.ttft_s for each in turns], n=10)
    found = fmean(each.cached_tokens / each.history for each in turns)
    return f"{found:>8.1%}  {1e3 * ttft_s[4]:>8.0f}  {1e3 * ttft_s[8]:>8.0f}"


def main() -> None:
    print(f"{USERS} users, turns 2 to {TURNS}: found of the history, TTFT p50 and p90 in ms")
    for routing in ROUTERS:
        print(f"{routing:<32}{shown(simulated_turns(*cluster_of(routing)))}", flush=True)
    alone = simulated_turns(*cluster_of("slo", lends=False))
    print(f"{'slo, decode workers lend nothing':<32}{shown(alone)}")


if __name__ == "__main__":
    main()
