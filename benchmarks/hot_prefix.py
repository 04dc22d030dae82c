"""How copies of one hot prefix spread over eight simulated workers, and what that costs the other caches.

    python -m benchmarks.hot_prefix

Half of the requests begin with the same 8,000 tokens, from the 20th second on; the others with one of 160 prefixes of
2,000 tokens, which fill most of the workers' memory. `mooncake-local` never fetches a prefix from another worker;
`mooncake` and `slo` do. Virtual time, no compute; takes about a minute for each router.
"""

import asyncio
import random
from dataclasses import dataclass
from statistics import quantiles

from cluster.events import Completed, Delta, Event
from cluster.offline.sim.clock import run
from cluster.offline.sim.cluster import PoolModel, open_cluster
from cluster.offline.sim.systems import RARE_HEARTBEATS
from cluster.policy.routing.prefix_index import prefix_hashes
from cluster.spec import ClusterSpec, GatewaySpec, PoolSpec, Role
from workers.config import EngineConfig
from workers.costs import LinearCost
from workers.request import SLO, Request, SamplingParams

ROUTERS = ("mooncake-local", "mooncake", "slo")
WORKERS = 8
# An 8B model on a GPU: 20,000 prompt tokens/s, 128 KiB of KV a token, links of 10 GB/s.
COST = LinearCost(0.005, 5e-5, 1e-9, 1e-5, 1e-8, 0.002, 1e-10, 0.0)
KV_TOKEN_BYTES = 1 << 17
ENGINE = EngineConfig(block_size=16, kv_blocks=4_000, max_batch_tokens=2048, max_running=64)  # 64,000 tokens
HOT_TOKENS, COLD_TOKENS, NEW_TOKENS, ANSWER = 8_000, 2_000, 512, 16
CONVERSATIONS = 160
RATE, SECONDS, HOT_FROM_S = 64.0, 50.0, 20.0
SAMPLES_S = (1.0, 2.0, 5.0, 10.0, 20.0, 29.0)  # after the first hot request


@dataclass(frozen=True, slots=True)
class _Asked:
    is_hot: bool
    at_s: float
    ttft_s: float
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Spreading:
    """`copies`: workers that have the whole hot prefix, at `SAMPLES_S`. Cached shares leave out new tokens."""

    copies: tuple[int, ...]
    hot_ttft_s: tuple[float, float]  # p50, p99
    cold_ttft_s: tuple[float, float]
    hot_cached: float
    cold_cached: float
    cold_cached_before: float  # without hot requests


def measure(router: str) -> Spreading:
    pool = PoolSpec("both", Role.MIXED, WORKERS, engine=ENGINE, cost=COST)
    gateway = GatewaySpec(routing=router, admission="none", slo=SLO(2.0, 0.1))
    spec = ClusterSpec("m", (pool,), gateway=gateway, health=RARE_HEARTBEATS, executor="simulated")
    return run(_measure(spec))


async def _measure(spec: ClusterSpec) -> Spreading:
    draw, asked, copies = random.Random(0), list[_Asked](), list[int]()
    hot = _tokens(draw, HOT_TOKENS)
    conversations = [_tokens(draw, COLD_TOKENS) for _ in range(CONVERSATIONS)]
    async with open_cluster(spec, {"both": PoolModel(COST, KV_TOKEN_BYTES)}) as cluster:
        (dispatcher,) = cluster.dispatchers
        clock = asyncio.get_running_loop()
        begin_s = clock.time()

        async def ask(number: int, prompt: tuple[int, ...], is_hot: bool) -> None:
            sent_s = clock.time()
            first_s: list[float] = []
            events: list[Event] = []

            def take(event: Event) -> None:
                events.append(event)
                if isinstance(event, Delta) and not first_s:
                    first_s.append(clock.time())

            sampling = SamplingParams(temperature=0.0, seed=1, max_tokens=ANSWER, ignore_eos=True)
            await dispatcher.run(Request(f"w-{number}", prompt, sampling), take)
            assert isinstance(events[-1], Completed), events[-1]
            asked.append(_Asked(is_hot, sent_s - begin_s, first_s[0] - sent_s, events[-1].cached_tokens))

        async def sample() -> None:
            for at_s in SAMPLES_S:
                await asyncio.sleep(begin_s + HOT_FROM_S + at_s - clock.time())
                found = dispatcher._policy.index.matches(prefix_hashes(hot), clock.time())
                copies.append(sum(match.tokens >= HOT_TOKENS // 128 * 128 for match in found.values()))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(sample())
            number = 0
            while (now_s := clock.time() - begin_s) < SECONDS:
                is_hot = now_s >= HOT_FROM_S and draw.random() < 0.5
                prefix = hot if is_hot else draw.choice(conversations)
                tasks.create_task(ask(number, prefix + _tokens(draw, NEW_TOKENS), is_hot))
                number += 1
                await asyncio.sleep(draw.expovariate(RATE))
    late = [each for each in asked if each.at_s >= HOT_FROM_S]
    warm = [each for each in asked if 15.0 <= each.at_s < HOT_FROM_S]
    hot_ones, cold = [each for each in late if each.is_hot], [each for each in late if not each.is_hot]
    return Spreading(
        tuple(copies),
        _ttft(hot_ones),
        _ttft(cold),
        _cached(hot_ones, HOT_TOKENS),
        _cached(cold, COLD_TOKENS),
        _cached(warm, COLD_TOKENS),
    )


def _tokens(draw: random.Random, count: int) -> tuple[int, ...]:
    return tuple(draw.randrange(3, 30_000) for _ in range(count))


def _ttft(asked: list[_Asked]) -> tuple[float, float]:
    cuts = quantiles([each.ttft_s for each in asked], n=100)
    return cuts[49], cuts[98]


def _cached(asked: list[_Asked], tokens: int) -> float:
    return sum(min(each.cached_tokens, tokens) for each in asked) / (tokens * len(asked))


def main() -> None:
    print(f"copies of the hot prefix after {', '.join(f'{each:.0f}' for each in SAMPLES_S)} s; TTFT p50 and p99")
    for router in ROUTERS:
        found = measure(router)
        ttft = "  ".join(
            f"{name} {1e3 * p50:.0f} ms {1e3 * p99:.0f} ms"
            for name, (p50, p99) in (("hot", found.hot_ttft_s), ("cold", found.cold_ttft_s))
        )
        cached = f"cached: hot {found.hot_cached:.0%}, cold {found.cold_cached:.0%} ({found.cold_cached_before:.0%})"
        print(f"{router:<15} {' '.join(map(str, found.copies))}  {ttft}  {cached}", flush=True)


if __name__ == "__main__":
    main()
