"""What the two doors of a gateway cost for each token and each request, beside bare handlers under the same load.

    bare     grpc.aio, FastAPI: handlers that send messages made before
    doors    door ─> gateway, its tokenizer too, over a dispatcher that answers from memory
    served   the gateway's process of a cluster on Ray: dispatcher, workers' bundles and reports as well

Each is one process with one event loop that gives each stream a token every `PERIOD_S`. CPU seconds are those of that
process; load and workers have their own. From a token's CPU time follows how many streams of that pace one core bears.
"""

import asyncio
import contextlib
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import psutil

from benchmarks.figures import Figure, Part, Progress, ratios, spread
from benchmarks.hosted import split_spec
from benchmarks.pinning import process_cpu_s
from benchmarks.streams import Ask, Steady, grpc_door, http_door, one_token_each, steady
from cluster.offline.load.processes import Child, ProcessFailed
from cluster.spec import ClusterSpec, GatewaySpec
from workers.config import TransferConfig
from workers.costs import LinearCost

PERIOD_S = 0.05
MODULES = {"bare": "benchmarks.bare", "doors": "benchmarks.instant"}
WAYS = (*MODULES, "served")
KINDS = ("gRPC", "HTTP")
BLOCKS = 8192  # of each worker; never written, so they take no memory
MOST = 512  # requests in flight
AT_ONCE = 32  # of the requests for one token
ROUNDS = 3
TRIES = 3
START_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Size:
    """How much load: streams at once, tokens of each, requests for one token."""

    streams: tuple[int, ...]
    tokens: int
    requests: int


FULL = Size((32, 128, 256), 120, 1024)
QUICK = Size((4, 8), 24, 64)


@dataclass(frozen=True, slots=True)
class Server:
    """Both doors, open, and the process behind them. `alike`: all its tokens have the same text."""

    pid: int
    addresses: Mapping[str, str]  # by kind of door
    alike: bool = True


@dataclass(frozen=True, slots=True)
class Sample:
    """One door of one server, once."""

    request_cpu_s: float
    streams: Mapping[int, Steady]


Samples = Mapping[tuple[str, str], Sequence[Sample]]  # kind of door, way


def measure(rounds: int, quick: bool, progress: Progress) -> Part:
    """Raises `ProcessFailed` or `DiptychError`."""
    samples = sampled(WAYS, rounds, QUICK if quick else FULL, progress)
    return Part("doors", figures(samples), (), (*NOTES, _disturbed(samples)))


def _disturbed(samples: Samples) -> str:
    judged = [
        load for (_, way), each in samples.items() if way != "served" for one in each for load in one.streams.values()
    ]
    late = sum(map(_is_late, judged))
    return (
        f"A load with late tokens was tried again, at most {TRIES} times in all; {late} of {len(judged)} stayed late."
    )


def sampled(ways: Sequence[str], rounds: int, size: Size, progress: Progress) -> Samples:
    """The order of the servers changes every round."""
    samples: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    with ExitStack() as stack:
        servers = {way: stack.enter_context(_served() if way == "served" else _alone(MODULES[way])) for way in ways}
        for number in range(rounds):
            for kind in KINDS:
                for way in ways[:: -1 if number % 2 else 1]:
                    samples[kind, way].append(asyncio.run(_sample(servers[way], kind, size)))
            progress(f"round {number + 1} of {rounds}")
    return samples


@contextmanager
def _alone(module: str) -> Iterator[Server]:
    with Child([sys.executable, "-m", module, str(PERIOD_S)]) as child:
        _, endpoint, url = child.wait_line("open ", START_TIMEOUT_S).text.split()
        yield Server(child.pid, {"gRPC": endpoint, "HTTP": url})


@contextmanager
def _served() -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="diptych-bench-") as folder:
        file = Path(folder) / "cluster.yaml"
        file.write_bytes(msgspec.json.encode(served_spec()))  # JSON is YAML
        with Child([sys.executable, "-m", "cluster.cli", "serve", "-f", str(file)]) as child:
            endpoint = child.wait_line("ready: grpc://", START_TIMEOUT_S).text.rpartition("//")[2]
            url = child.wait_line("ready: http://", START_TIMEOUT_S).text.split()[1].removesuffix("/v1")
            yield Server(_listener(child, endpoint), {"gRPC": endpoint, "HTTP": url}, alike=False)


def served_spec() -> ClusterSpec:
    """One prefill and one decode worker whose steps take `PERIOD_S` and no CPU time."""
    spec = split_spec("doors", executor="modelled")
    cost = LinearCost(PERIOD_S, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    roomy = [replace(each.engine, kv_blocks=BLOCKS, max_batch_tokens=2048, max_running=MOST) for each in spec.pools]
    pools = tuple(replace(each, engine=engine, cost=cost) for each, engine in zip(spec.pools, roomy, strict=True))
    gateway = GatewaySpec(grpc_port=0, http_port=0, max_requests=MOST)
    return replace(spec, pools=pools, transfer=TransferConfig(backends=("modelled",)), gateway=gateway)


def _listener(child: Child, endpoint: str) -> int:
    """The process of a family that listens there. Raises `ProcessFailed`."""
    port = int(endpoint.rpartition(":")[2])
    for process in child.family():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if any(each.laddr.port == port and each.status == psutil.CONN_LISTEN for each in process.net_connections()):
                return process.pid
    raise ProcessFailed(f"no process of the cluster listens at {endpoint}")


async def _sample(server: Server, kind: str, size: Size) -> Sample:
    cpu_s = partial(process_cpu_s, server.pid)
    address = server.addresses[kind]
    async with grpc_door(address) if kind == "gRPC" else http_door(address, server.alike) as ask:
        await one_token_each(ask, cpu_s, 2 * AT_ONCE, AT_ONCE)  # connections, caches
        request_cpu_s = await one_token_each(ask, cpu_s, size.requests, AT_ONCE)
        tries = TRIES if server.alike else 1  # what a cluster's steps take is no clock to be late by
        streams = {count: await _timely(ask, cpu_s, count, size.tokens, tries) for count in size.streams}
    return Sample(request_cpu_s, streams)


async def _timely(ask: Ask, cpu_s: Callable[[], float], streams: int, tokens: int, tries: int) -> Steady:
    """The first load whose tokens came in time, or the least late: late ones join in one message, which costs less."""
    taken: list[Steady] = []
    for _ in range(tries):
        taken.append(await steady(ask, cpu_s, streams, tokens, PERIOD_S))
        if not _is_late(taken[-1]):
            break
    return min(taken, key=lambda each: each.late(0.99))


def _is_late(taken: Steady) -> bool:
    return taken.late(0.99) > PERIOD_S


LATENESS = "Lateness of tokens at the client, 99 of 100"
READINGS: Mapping[str, tuple[str, Callable[[Steady], float]]] = {
    "CPU time of a token": ("us", lambda each: each.token_cpu_s),
    "Streams of 20 tokens/s that one core bears, by that": ("n", lambda each: PERIOD_S / each.token_cpu_s),
    "Share of a core that was used": ("%", lambda each: each.core_share),
    LATENESS: ("ms", lambda each: each.late(0.99)),
}


def figures(samples: Samples) -> tuple[Figure, ...]:
    ways = list(dict.fromkeys(way for _, way in samples))
    made: list[Figure] = []
    for kind in KINDS:
        values = {way: [each.request_cpu_s for each in samples[kind, way]] for way in ways}
        made += _compared("CPU time of a request for one token", f"{kind}, {AT_ONCE} at once", "us", values)
    for title, (unit, read) in READINGS.items():
        asked = [way for way in ways if title != LATENESS or way != "served"]  # a step of its workers sets no clock
        for kind in KINDS:
            for count in samples[kind, "bare"][0].streams:
                values = {way: [read(each.streams[count]) for each in samples[kind, way]] for way in asked}
                made += _compared(title, f"{kind}, {count} streams", unit, values)
    return tuple(made)


def _compared(title: str, row: str, unit: str, values: Mapping[str, Sequence[float]]) -> list[Figure]:
    made = [Figure(title, row, way, unit, spread(taken)) for way, taken in values.items()]
    if unit == "us" and min(values["bare"]) > 0:
        others = [way for way in values if way != "bare"]
        made += [Figure(title, row, f"{way} / bare", "x", ratios(values[way], values["bare"])) for way in others]
    return made


NOTES = (
    "Prompts are 32 token ids; every stream of bare and doors has a timer of its own, so tokens come in no bundles.",
    "Of the modelled tokens of served 13 in 100 are no whole character; over HTTP their text goes with a later token.",
    "A token's CPU time is taken while all streams run; beginning and ending a request is in the other table.",
    "Lateness has the load's own delays in it, and those of a busy machine.",
)
