"""How many streams of 20 tokens/s one gateway process carries on one core, over gRPC and over HTTP.

A cluster on Ray with simulated workers, whose steps take `PERIOD_S` and compute nothing. The gateway is bound to core
0; workers, controller, Ray and the load generator to the other cores. The load grows until the gateway's core is used
for more than `MAX_SHARE`, or gaps between tokens exceed `MAX_GAPS` periods.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import psutil

from benchmarks.figures import BenchmarkPart, Figure, Progress, spread
from benchmarks.frontend import PERIOD_S, PROTOCOLS, MeasuredServer, served, served_spec
from benchmarks.pinning import cpu_seconds, pin, process_cpu_s
from benchmarks.raw_streams import RawStream, open_grpc, open_http
from cluster.offline.load import machine
from cluster.offline.load.processes import ProcessFailed
from cluster.spec import ClusterSpec
from workers.costs import LinearCost

ROUNDS = 1
STREAMS = (100, 200, 300, 400, 600, 800, 1000, 1200, 1600, 2000)
QUICK_STREAMS = (16, 32)
STARTS = 100.0  # streams started per second
WINDOW_S, QUICK_WINDOW_S = 5.0, 1.0
MARGIN_S = 3.0  # after the last start, and between the end of the window and that of the first stream
MAX_SHARE, MAX_GAPS = 0.9, 2.0
MAX_REQUESTS = 4096
WORKERS = 4  # that decode
ANSWER_S = 120.0


@dataclass(frozen=True, slots=True)
class StreamLoad:
    """All `streams` ran for `wall_s`. CPU seconds of the gateway, of the load generator, and of everything else.

    `gaps_s`: between two tokens of the probes, ascending.
    """

    streams: int
    wall_s: float
    gateway_s: float
    client_s: float
    others_s: float
    tokens: float
    gaps_s: tuple[float, ...]

    @property
    def share(self) -> float:
        return self.gateway_s / self.wall_s

    def gap_s(self, share: float) -> float:
        """The quantile `share` of the gaps."""
        return self.gaps_s[min(len(self.gaps_s) - 1, int(share * len(self.gaps_s)))]

    @property
    def is_carried(self) -> bool:
        return self.share <= MAX_SHARE and self.gap_s(0.99) <= MAX_GAPS * PERIOD_S


Loads = Mapping[str, Sequence[StreamLoad]]  # by protocol


def measure(rounds: int, quick: bool, progress: Progress) -> BenchmarkPart:
    """Raises `ProcessFailed`, or ValueError on a machine with one core."""
    cores = sorted(machine.allowed_cores())
    if len(cores) < 2:
        raise ValueError("the gateway needs a core of its own; run this where two are allowed")
    sizes, window_s = (QUICK_STREAMS, QUICK_WINDOW_S) if quick else (STREAMS, WINDOW_S)
    loads: defaultdict[str, list[StreamLoad]] = defaultdict(list)
    with served(crowded_spec()) as server:
        pin([each.pid for each in server.family()] + [psutil.Process().pid], cores[1:])
        pin([server.pid], cores[:1])
        for _ in range(rounds):
            for protocol in PROTOCOLS:
                for streams in sizes:
                    load = asyncio.run(_load(server, protocol, streams, window_s))
                    loads[protocol].append(load)
                    progress(f"{protocol}, {described(load)}")
                    if load.share > MAX_SHARE:
                        break
    return BenchmarkPart("capacity", figures(loads), (), NOTES)


def described(load: StreamLoad) -> str:
    gaps = "/".join(f"{1e3 * load.gap_s(share):.0f}" for share in (0.5, 0.99))
    cpu = ", ".join(
        f"{name} {100 * seconds / load.wall_s:.0f} %"
        for name, seconds in (("gateway", load.gateway_s), ("client", load.client_s), ("others", load.others_s))
    )
    return f"{load.streams} streams: {cpu}; {load.tokens / load.wall_s:.0f} tokens/s; gaps p50/p99 {gaps} ms"


def crowded_spec() -> ClusterSpec:
    """`WORKERS` decode workers, with room for all streams."""
    spec = served_spec()
    prefill, decode = (replace(pool, engine=replace(pool.engine, kv_blocks=1 << 16)) for pool in spec.pools)
    engine = replace(decode.engine, max_batch_tokens=MAX_REQUESTS, max_running=MAX_REQUESTS)
    pools = (
        replace(prefill, cost=LinearCost(0.005, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)),
        replace(decode, engine=engine, replicas=WORKERS, resources=replace(decode.resources, cpu=0.1)),
    )
    return replace(spec, pools=pools, gateway=replace(spec.gateway, max_requests=MAX_REQUESTS))


async def _load(server: MeasuredServer, protocol: str, streams: int, window_s: float) -> StreamLoad:
    """Start the streams one after another, measure while all run, and wait for their ends."""
    address = server.addresses[protocol]
    start, close = await (open_grpc(address) if protocol == "gRPC" else open_http(address))
    tokens = round((2 * streams / STARTS + 2 * MARGIN_S + window_s) / PERIOD_S)  # starts may be late
    running = [RawStream(index, tokens) for index in range(streams)]
    others = [each for each in server.family() if each.pid != server.pid]

    def cpu_s() -> tuple[float, float, float]:
        return process_cpu_s(server.pid), time.process_time(), sum(map(cpu_seconds, others))

    try:
        begun_s = time.perf_counter()
        for index, stream in enumerate(running):
            await asyncio.sleep(max(0.0, begun_s + index / STARTS - time.perf_counter()))
            start(stream)
        async with asyncio.timeout(ANSWER_S):
            await asyncio.gather(*(stream.begun for stream in running))
            await asyncio.sleep(MARGIN_S)
            from_s, before = time.perf_counter(), cpu_s()
            await asyncio.sleep(window_s)
            until_s, after = time.perf_counter(), cpu_s()
            ended = [stream.ended for stream in running if stream.ended.done()]
            await asyncio.gather(*ended)  # raises the first failure
            if ended:
                raise ProcessFailed(f"{streams} streams of {tokens} tokens never ran all at once")
            await asyncio.gather(*(stream.ended for stream in running))
    finally:
        close()
    gateway_s, client_s, others_s = (late - early for early, late in zip(before, after, strict=True))
    probes = [_within(stream.marks, from_s, until_s) for stream in running if stream.is_probe]
    gaps_s = tuple(sorted(gap for marks in probes for gap in _gaps(marks)))
    seen = sum(marks[-1][1] - marks[0][1] for marks in probes)
    return StreamLoad(streams, until_s - from_s, gateway_s, client_s, others_s, seen * streams / len(probes), gaps_s)


def _within(marks: Sequence[tuple[float, int]], from_s: float, until_s: float) -> list[tuple[float, int]]:
    found = [mark for mark in marks if from_s <= mark[0] < until_s]
    if not found:
        raise ProcessFailed("a stream had no token while all ran")
    return found


def _gaps(marks: Sequence[tuple[float, int]]) -> list[float]:
    """Between any two tokens; tokens of one message have none between them."""
    return [
        gap
        for (before_s, before), (at_s, count) in pairwise(marks)
        for gap in (at_s - before_s, *[0.0] * (count - before - 1))
    ]


def figures(loads: Loads) -> tuple[Figure, ...]:
    made = []
    for protocol, each in loads.items():
        for load in each:
            row = f"{protocol}, {load.streams} streams"
            values = {
                "gateway's core": ("%", load.share),
                "client's core": ("%", load.client_s / load.wall_s),
                "others' CPU": ("%", load.others_s / load.wall_s),
                "CPU time of a token": ("us", load.gateway_s / load.tokens),
                "gap p50": ("ms", load.gap_s(0.5)),
                "gap p99": ("ms", load.gap_s(0.99)),
            }
            made += [Figure("Load", row, name, unit, spread([value])) for name, (unit, value) in values.items()]
        carried = max((load.streams for load in each if load.is_carried), default=0)
        made.append(Figure("Most streams that were carried", protocol, "streams", "n", spread([float(carried)])))
    return tuple(made)


NOTES = (
    f"Carried: the gateway's core is used for at most {MAX_SHARE:.0%}, and 99 of 100 gaps between tokens are at most "
    f"{MAX_GAPS:g} periods of {1e3 * PERIOD_S:.0f} ms.",
    "Gaps are those of every eighth stream, a probe. The others' CPU is that of workers, controller and Ray.",
)
