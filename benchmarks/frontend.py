"""CPU cost of a token and a request in a gateway's gRPC and HTTP servers, beside bare handlers under the same load.

    bare     grpc.aio and FastAPI handlers that send prebuilt messages
    servers  gRPC and HTTP servers, gateway and tokenizer over a stub dispatcher
    served   the gateway process of a cluster on Ray, with its dispatcher

Each is one process with one event loop that gives each stream a token every `PERIOD_S`. CPU seconds are those of that
process, without the load generator and the workers. Streams per core follow from a token's CPU time.
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

from benchmarks.figures import BenchmarkPart, Figure, Progress, ratios, spread
from benchmarks.hosted import split_spec
from benchmarks.pinning import process_cpu_s
from benchmarks.stream_load import Ask, Steady, grpc_streams, http_streams, one_token_each, steady
from cluster.offline.load.processes import Child, ProcessFailed
from cluster.spec import ClusterSpec, GatewaySpec
from workers.config import TransferConfig
from workers.costs import LinearCost

PERIOD_S = 0.05
MODULES = {"bare": "benchmarks.bare_servers", "servers": "benchmarks.stub_gateway"}
SYSTEMS = (*MODULES, "served")
PROTOCOLS = ("gRPC", "HTTP")
BLOCKS = 8192  # of each worker; never written, so they take no memory
MAX_REQUESTS = 512  # in flight
CONCURRENCY = 32  # of the requests for one token
ROUNDS = 3
TRIES = 3
START_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class LoadSize:
    """Concurrent streams, tokens per stream, and requests for one token."""

    streams: tuple[int, ...]
    tokens: int
    requests: int


FULL = LoadSize((32, 128, 256), 120, 1024)
QUICK = LoadSize((4, 8), 24, 64)


@dataclass(frozen=True, slots=True)
class MeasuredServer:
    """The process of a gRPC and an HTTP server. `uniform_text`: all its tokens have the same text.

    `family`: the processes of its cluster.
    """

    pid: int
    addresses: Mapping[str, str]  # by protocol
    uniform_text: bool = True
    family: Callable[[], list[psutil.Process]] = list


@dataclass(frozen=True, slots=True)
class ServerSample:
    """One measurement of one protocol of one server."""

    request_cpu_s: float
    streams: Mapping[int, Steady]


Samples = Mapping[tuple[str, str], Sequence[ServerSample]]  # protocol, system


def measure(rounds: int, quick: bool, progress: Progress) -> BenchmarkPart:
    """Raises `ProcessFailed` or `DiptychError`."""
    samples = sampled(SYSTEMS, rounds, QUICK if quick else FULL, progress)
    return BenchmarkPart("frontend", figures(samples), (), (*NOTES, _disturbed(samples)))


def _disturbed(samples: Samples) -> str:
    judged = [
        load
        for (_, system), each in samples.items()
        if system != "served"
        for one in each
        for load in one.streams.values()
    ]
    late = sum(map(_is_late, judged))
    return f"A load with late tokens was repeated, {TRIES} tries at most; {late} of {len(judged)} stayed late."


def sampled(systems: Sequence[str], rounds: int, size: LoadSize, progress: Progress) -> Samples:
    """The order of the systems alternates between rounds."""
    samples: dict[tuple[str, str], list[ServerSample]] = defaultdict(list)
    with ExitStack() as stack:
        servers = {
            system: stack.enter_context(served(served_spec()) if system == "served" else _alone(MODULES[system]))
            for system in systems
        }
        for number in range(rounds):
            for protocol in PROTOCOLS:
                for system in systems[:: -1 if number % 2 else 1]:
                    samples[protocol, system].append(asyncio.run(_sample(servers[system], protocol, size)))
            progress(f"round {number + 1} of {rounds}")
    return samples


@contextmanager
def _alone(module: str) -> Iterator[MeasuredServer]:
    with Child([sys.executable, "-m", module, str(PERIOD_S)]) as child:
        _, endpoint, url = child.wait_line("open ", START_TIMEOUT_S).text.split()
        yield MeasuredServer(child.pid, {"gRPC": endpoint, "HTTP": url})


@contextmanager
def served(spec: ClusterSpec) -> Iterator[MeasuredServer]:
    """A cluster on Ray with one gateway."""
    with tempfile.TemporaryDirectory(prefix="diptych-bench-") as folder:
        file = Path(folder) / "cluster.yaml"
        file.write_bytes(msgspec.json.encode(spec, enc_hook=int))  # JSON is YAML
        with Child([sys.executable, "-m", "cluster.cli", "serve", "-f", str(file)]) as child:
            endpoint = child.wait_line("ready: grpc://", START_TIMEOUT_S).text.rpartition("//")[2]
            url = child.wait_line("ready: http://", START_TIMEOUT_S).text.split()[1].removesuffix("/v1")
            addresses = {"gRPC": endpoint, "HTTP": url}
            yield MeasuredServer(_listener(child, endpoint), addresses, uniform_text=False, family=child.family)


def served_spec() -> ClusterSpec:
    """One prefill and one decode worker whose steps take `PERIOD_S` and no CPU time."""
    spec = split_spec("servers", executor="simulated")
    cost = LinearCost(PERIOD_S, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    with_room = [
        replace(each.engine, kv_blocks=BLOCKS, max_batch_tokens=2048, max_running=MAX_REQUESTS) for each in spec.pools
    ]
    pools = tuple(replace(each, engine=engine, cost=cost) for each, engine in zip(spec.pools, with_room, strict=True))
    gateway = GatewaySpec(grpc_port=0, http_port=0, max_requests=MAX_REQUESTS)
    return replace(spec, pools=pools, transfer=TransferConfig(backends=("simulated",)), gateway=gateway)


def _listener(child: Child, endpoint: str) -> int:
    """The process of the cluster that listens on the endpoint's port. Raises `ProcessFailed`."""
    port = int(endpoint.rpartition(":")[2])
    for process in child.family():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if any(each.laddr.port == port and each.status == psutil.CONN_LISTEN for each in process.net_connections()):
                return process.pid
    raise ProcessFailed(f"no process of the cluster listens at {endpoint}")


async def _sample(server: MeasuredServer, protocol: str, size: LoadSize) -> ServerSample:
    cpu_s = partial(process_cpu_s, server.pid)
    address = server.addresses[protocol]
    async with grpc_streams(address) if protocol == "gRPC" else http_streams(address, server.uniform_text) as ask:
        await one_token_each(ask, cpu_s, 2 * CONCURRENCY, CONCURRENCY)  # connections, caches
        request_cpu_s = await one_token_each(ask, cpu_s, size.requests, CONCURRENCY)
        tries = TRIES if server.uniform_text else 1  # a cluster's step times vary, so lateness means nothing there
        streams = {count: await _timely(ask, cpu_s, count, size.tokens, tries) for count in size.streams}
    return ServerSample(request_cpu_s, streams)


async def _timely(ask: Ask, cpu_s: Callable[[], float], streams: int, tokens: int, tries: int) -> Steady:
    """The first load with tokens in time, or the least late one: late tokens share a message, which costs less."""
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
    "Streams of 20 tokens/s per core": ("n", lambda each: PERIOD_S / each.token_cpu_s),
    "Share of a core that was used": ("%", lambda each: each.core_share),
    LATENESS: ("ms", lambda each: each.late(0.99)),
}


def figures(samples: Samples) -> tuple[Figure, ...]:
    systems = list(dict.fromkeys(system for _, system in samples))
    made: list[Figure] = []
    for protocol in PROTOCOLS:
        values = {system: [each.request_cpu_s for each in samples[protocol, system]] for system in systems}
        made += _compared("CPU time of a request for one token", f"{protocol}, {CONCURRENCY} at once", "us", values)
    for title, (unit, read) in READINGS.items():
        shown = [system for system in systems if title != LATENESS or system != "served"]  # see `_sample`
        for protocol in PROTOCOLS:
            for count in samples[protocol, "bare"][0].streams:
                values = {system: [read(each.streams[count]) for each in samples[protocol, system]] for system in shown}
                made += _compared(title, f"{protocol}, {count} streams", unit, values)
    return tuple(made)


def _compared(title: str, row: str, unit: str, values: Mapping[str, Sequence[float]]) -> list[Figure]:
    made = [Figure(title, row, system, unit, spread(taken)) for system, taken in values.items()]
    if unit == "us" and min(values["bare"]) > 0:
        others = [system for system in values if system != "bare"]
        made += [
            Figure(title, row, f"{system} / bare", "x", ratios(values[system], values["bare"])) for system in others
        ]
    return made


NOTES = (
    "Prompts are 32 token ids; every stream of bare and servers has its own timer, so each message has one token.",
    "In served, 13 % of the simulated tokens are no whole character; over HTTP their text comes with a later token.",
    "A token's CPU time is measured while all streams run; the start and end of a request are in the other table.",
    "Lateness includes delays of the load generator and of a busy machine.",
)
