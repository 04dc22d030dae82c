"""What the two doors of a gateway cost for each token and each request, beside bare handlers under the same load.

    bare     grpc.aio, FastAPI: handlers that send messages made before
    doors    door ─> gateway, its tokenizer too, over a dispatcher that answers from memory

Both are one process with one event loop, both give each stream a token every `PERIOD_S`. CPU seconds are those of that
process; the load has its own. From a token's CPU time follows how many streams of that pace one core bears.
"""

import asyncio
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from cluster.bench.figures import Figure, Part, ratios, spread
from cluster.bench.processes import Child, process_cpu_s
from cluster.bench.streams import Steady, grpc_door, http_door, one_token_each, steady

PERIOD_S = 0.05
WAYS = {"bare": "cluster.bench.bare", "doors": "cluster.bench.instant"}
KINDS = {"gRPC": grpc_door, "HTTP": http_door}
AT_ONCE = 32  # of the requests for one token
ROUNDS = 5
START_TIMEOUT_S = 120.0

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Size:
    """How much load: streams at once, tokens of each, requests for one token."""

    streams: tuple[int, ...]
    tokens: int
    requests: int


FULL = Size((32, 128), 120, 1024)
QUICK = Size((4, 8), 24, 64)


@dataclass(frozen=True, slots=True)
class Server:
    """A process with both doors open."""

    child: Child
    addresses: Mapping[str, str]  # by kind of door


@dataclass(frozen=True, slots=True)
class Sample:
    """One door of one server, once."""

    request_cpu_s: float
    streams: Mapping[int, Steady]


Samples = Mapping[tuple[str, str], Sequence[Sample]]  # kind of door, way


def measure(rounds: int, quick: bool, tell: Tell) -> Part:
    """Raises `ProcessFailed` or `DiptychError`."""
    return Part("doors", figures(sampled(rounds, QUICK if quick else FULL, tell)), (), NOTES)


def sampled(rounds: int, size: Size, tell: Tell) -> Samples:
    """The order of the servers changes every round."""
    samples: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    with ExitStack() as stack:
        servers = {way: _opened(stack.enter_context(_started(module))) for way, module in WAYS.items()}
        for number in range(rounds):
            for kind in KINDS:
                for way in list(servers)[:: -1 if number % 2 else 1]:
                    samples[kind, way].append(asyncio.run(_sample(servers[way], kind, size)))
            tell(f"round {number + 1} of {rounds}")
    return samples


def _started(module: str) -> Child:
    return Child([sys.executable, "-m", module, str(PERIOD_S)])


def _opened(child: Child) -> Server:
    _, endpoint, url = child.wait_line("open ", START_TIMEOUT_S).text.split()
    return Server(child, {"gRPC": endpoint, "HTTP": url})


async def _sample(server: Server, kind: str, size: Size) -> Sample:
    cpu_s = partial(process_cpu_s, server.child.pid)
    async with KINDS[kind](server.addresses[kind]) as ask:
        await one_token_each(ask, cpu_s, 2 * AT_ONCE, AT_ONCE)  # connections, caches
        request_cpu_s = await one_token_each(ask, cpu_s, size.requests, AT_ONCE)
        streams = {count: await steady(ask, cpu_s, count, size.tokens, PERIOD_S) for count in size.streams}
    return Sample(request_cpu_s, streams)


READINGS: Mapping[str, tuple[str, Callable[[Steady], float]]] = {
    "CPU time of a token": ("us", lambda each: each.token_cpu_s),
    "Streams of 20 tokens/s that one core bears, by that": ("n", lambda each: PERIOD_S / each.token_cpu_s),
    "Share of a core that was used": ("%", lambda each: each.core_share),
    "Lateness of tokens at the client, 99 of 100": ("ms", lambda each: each.late(0.99)),
}


def figures(samples: Samples) -> tuple[Figure, ...]:
    made: list[Figure] = []
    for kind in KINDS:
        values = {way: [each.request_cpu_s for each in samples[kind, way]] for way in WAYS}
        made += _compared("CPU time of a request for one token", f"{kind}, {AT_ONCE} at once", "us", values)
    for title, (unit, read) in READINGS.items():
        for kind in KINDS:
            for count in samples[kind, "bare"][0].streams:
                values = {way: [read(each.streams[count]) for each in samples[kind, way]] for way in WAYS}
                made += _compared(title, f"{kind}, {count} streams", unit, values)
    return tuple(made)


def _compared(title: str, row: str, unit: str, values: Mapping[str, Sequence[float]]) -> list[Figure]:
    made = [Figure(title, row, way, unit, spread(taken)) for way, taken in values.items()]
    if unit == "us" and min(values["bare"]) > 0:
        made.append(Figure(title, row, "doors / bare", "x", ratios(values["doors"], values["bare"])))
    return made


NOTES = (
    "Prompts are 32 token ids; every stream has a timer of its own in the server, so tokens do not come in bundles.",
    "A token's CPU time is taken while all streams run; beginning and ending a request is in the other table.",
    "Lateness has the load's own delays in it, and those of a busy machine.",
)
