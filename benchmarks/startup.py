"""Time of `diptych serve` until it is ready, and memory and CPU of its idle processes, beside a lower bound.

The lower bound, the floor, starts Ray the same way and as many actors, which only import torch. The floor of the
controller's and a gateway's memory, and of an idle process, is an actor that imports nothing.
"""

import asyncio
import json
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from benchmarks.figures import BenchmarkPart, Figure, Progress, ratios, spread
from benchmarks.hosted import ENGINE, MODEL, START_TIMEOUT_S, model_folder, split_spec
from benchmarks.pinning import cpu_seconds
from cluster.frontend.preprocessing import MODULE as TOKENIZER
from cluster.offline.load.processes import Child, Line
from diptych.client import AsyncClient
from kvtransfer.layout import KVLayout

ROUNDS = 3
SERVICES = ("controller", "gateway")
RAY = "Ray"
SETTLE_S = 2.0  # startup work ends
IDLE_S, QUICK_IDLE_S = 30.0, 2.0
# A separate program, because only `cluster.runtime` may import Ray.
FLOOR = """
from cluster.runtime.sessions import settle_auth
settle_auth()
import ray
ray.init(include_dashboard=False, log_to_driver=False, num_cpus=2, object_store_memory=100 << 20,
         _node_ip_address="127.0.0.1")
@ray.remote
class Actor:
    def load(self):
        import torch
        return torch.__version__
actors = [Actor.remote() for _ in range(2)]
ray.get([actor.load.remote() for actor in actors])
print("floor: ready", flush=True)
input()
@ray.remote(num_cpus=0)
class BareActor:
    async def pid(self):
        import os
        return os.getpid()
bare = BareActor.remote()
print("floor: bare", ray.get(bare.pid.remote()), flush=True)
input()
"""


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """Memory of processes without (USS) and with shared pages (RSS). `idle`: their share of a core without requests."""

    uss: int
    rss: int
    idle: float
    count: int = 1


@dataclass(frozen=True, slots=True)
class StartupSample:
    """One start of Diptych and one of the floor. `cpu_s` and `floor_cpu_s`: CPU time of all processes until ready."""

    phases_s: Mapping[str, float]
    cpu_s: float
    usage: Mapping[str, ProcessUsage]
    floor_s: float
    floor_cpu_s: float
    floor: ProcessUsage
    bare: ProcessUsage  # an actor that imports nothing


def measure(rounds: int, quick: bool, progress: Progress) -> BenchmarkPart:
    """Raises `ProcessFailed` or `DiptychError`."""
    folder = model_folder()  # a first conversion is not part of a start
    samples = []
    for number in range(rounds):
        phases_s, cpu_s, usage = _ours(QUICK_IDLE_S if quick else IDLE_S)
        floor_s, floor_cpu_s, floor, bare = _floor(QUICK_IDLE_S if quick else IDLE_S)
        samples.append(StartupSample(phases_s, cpu_s, usage, floor_s, floor_cpu_s, floor, bare))
        progress(f"round {number + 1} of {rounds}: ours {sum(phases_s.values()):.1f} s, the floor {floor_s:.1f} s")
    return BenchmarkPart("startup", figures(samples, min_bytes(folder)), (), NOTES)


def _ours(idle_s: float) -> tuple[dict[str, float], float, dict[str, ProcessUsage]]:
    with tempfile.TemporaryDirectory(prefix="diptych-bench-") as folder:
        file = Path(folder) / "cluster.yaml"
        file.write_bytes(msgspec.json.encode(split_spec()))  # JSON is YAML
        command = [sys.executable, "-m", "cluster.cli", "serve", "-f", str(file), "--port", "0", "--no-http"]
        with Child(command) as child:
            ready = child.wait_line("ready: grpc://", START_TIMEOUT_S)
            cpu_s = _cpu_s(child)
            endpoint = ready.text.rpartition("//")[2]
            workers = asyncio.run(_worker_pids(endpoint))
            port = int(endpoint.rpartition(":")[2])
            return phases(child.lines, child.started_s), cpu_s, _usage_by_kind(child, idle_s, workers, port)


def _floor(idle_s: float) -> tuple[float, float, ProcessUsage, ProcessUsage]:
    with Child([sys.executable, "-c", FLOOR]) as child:
        ready = child.wait_line("floor: ready", START_TIMEOUT_S)
        cpu_s = _cpu_s(child)
        usage = total(usage for _, usage in _measured(child, idle_s))
        child.write_line("")
        pid = int(child.wait_line("floor: bare", START_TIMEOUT_S).text.rpartition(" ")[2])
        bare = total(usage for process, usage in _measured(child, idle_s) if process.pid == pid)
        return ready.at_s - child.started_s, cpu_s, usage, bare


def _cpu_s(child: Child) -> float:
    """CPU time of every process of the family so far."""
    return sum(cpu_seconds(process) for process in child.family())


async def _worker_pids(endpoint: str) -> dict[int, str]:
    async with AsyncClient(endpoint) as client:
        return {worker.pid: worker.pool for worker in (await client.status()).view.workers}


# Startup phases, and the line of `diptych serve` that ends each.
MARKS = (
    ("command and imports", re.compile(r"starting Ray ")),
    ("Ray up", re.compile(r"starting \d+ worker")),
    ("workers ready", re.compile(r"[-\w]+: ready\b")),
    ("servers open", re.compile(r"ready: grpc://")),
)


def phases(lines: Sequence[Line], started_s: float) -> dict[str, float]:
    """Seconds of each phase; the last matching line ends it. Raises ValueError without a matching line."""
    lasted: dict[str, float] = {}
    before_s = started_s
    for name, pattern in MARKS:
        ends = [line.at_s for line in lines if pattern.match(line.text)]
        if not ends:
            raise ValueError(f"`diptych serve` printed no end of phase {name!r} ({pattern.pattern!r})")
        lasted[name] = ends[-1] - before_s
        before_s = ends[-1]
    return lasted


def _usage_by_kind(child: Child, idle_s: float, workers: Mapping[int, str], port: int) -> dict[str, ProcessUsage]:
    """Usage by kind of process; processes of one kind are added up."""
    found: dict[str, list[ProcessUsage]] = defaultdict(list)
    for process, usage in _measured(child, idle_s):
        found[_kind(process, child.pid, workers, port)].append(usage)
    return {kind: total(usage) for kind, usage in found.items()}


def _measured(child: Child, idle_s: float) -> list[tuple[psutil.Process, ProcessUsage]]:
    """Every process of the family, after `idle_s` without requests."""
    time.sleep(SETTLE_S)
    before = {process: cpu_seconds(process) for process in child.family()}
    time.sleep(idle_s)
    measured = []
    for process, used_s in before.items():
        try:
            memory = process.memory_full_info()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        idle = max(0.0, cpu_seconds(process) - used_s) / idle_s
        measured.append((process, ProcessUsage(memory.uss, memory.rss, idle)))
    return measured


def total(usages: Iterable[ProcessUsage]) -> ProcessUsage:
    """RSS counts shared pages once for each process."""
    each = list(usages)
    return ProcessUsage(
        sum(one.uss for one in each), sum(one.rss for one in each), sum(one.idle for one in each), len(each)
    )


def _kind(process: psutil.Process, root: int, workers: Mapping[int, str], port: int) -> str:
    if process.pid == root:
        return "diptych serve"
    if process.pid in workers:
        return f"worker {workers[process.pid]}"
    try:
        listening = {each.laddr.port for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN}
        command = process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return RAY
    if port in listening:
        return "gateway"
    if TOKENIZER in command:
        return "tokenizer process"
    if command and command[0].startswith("ray::_ServiceActor"):
        return "controller"
    return RAY


def min_bytes(folder: Path) -> dict[str, int]:
    """Lower bound of each worker's memory: the model's weights on disk and its KV pool."""
    config = json.loads((folder / "config.json").read_text())
    heads = config["num_attention_heads"]
    layout = KVLayout(
        MODEL,
        config["num_hidden_layers"],
        config.get("num_key_value_heads", heads),
        config.get("head_dim") or config["hidden_size"] // heads,
        ENGINE.block_size,
    )
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return {f"worker {pool.name}": weights + pool.engine.kv_blocks * layout.block_bytes for pool in split_spec().pools}


def figures(samples: Sequence[StartupSample], least: Mapping[str, int]) -> tuple[Figure, ...]:
    made: list[Figure] = []
    title = "From `diptych serve` to ready"
    totals = [sum(each.phases_s.values()) for each in samples]
    floors = [each.floor_s for each in samples]
    for name in samples[0].phases_s:
        made.append(Figure(title, name, "time", "s", spread(each.phases_s[name] for each in samples)))
    made.append(Figure(title, "together", "time", "s", spread(totals)))
    made.append(Figure(title, "floor: Ray and 2 actors with torch", "time", "s", spread(floors)))
    made.append(Figure(title, "together", "/ floor", "x", ratios(totals, floors)))
    cpu, floor_cpu = [each.cpu_s for each in samples], [each.floor_cpu_s for each in samples]
    made.append(Figure(title, "together", "CPU", "s", spread(cpu)))
    made.append(Figure(title, "floor: Ray and 2 actors with torch", "CPU", "s", spread(floor_cpu)))
    made.append(Figure(title, "together", "CPU / floor", "x", ratios(cpu, floor_cpu)))
    title = "Memory and idle CPU when ready"
    for kind in sorted({kind for each in samples for kind in each.usage}):
        there = [each.usage[kind] for each in samples if kind in each.usage]
        made.append(Figure(title, kind, "USS", "MiB", spread(usage.uss for usage in there)))
        made.append(Figure(title, kind, "RSS", "MiB", spread(usage.rss for usage in there)))
        made.append(Figure(title, kind, "idle, of a core", "%", spread(usage.idle for usage in there)))
        if kind in SERVICES:
            above = spread(each.usage[kind].uss - each.bare.uss for each in samples if kind in each.usage)
            made.append(Figure(title, kind, "USS above a bare actor", "MiB", above))
        if kind in least:
            share = spread(usage.uss / least[kind] for usage in there)
            made.append(Figure(title, kind, "USS / (weights + KV pool)", "x", share))
    ours = [total(each.usage.values()) for each in samples]
    theirs = [each.floor for each in samples]
    made.append(Figure(title, "bare Ray actor", "USS", "MiB", spread(each.bare.uss for each in samples)))
    made.append(Figure(title, "bare Ray actor", "idle, of a core", "%", spread(each.bare.idle for each in samples)))
    made.append(Figure(title, "our processes", "idle, of a core", "%", spread(map(_our_idle, samples))))
    made.append(Figure(title, "our processes", "idle above bare actors", "%", spread(map(_idle_above_bare, samples))))
    for row, usages in (("together", ours), ("floor: Ray and 2 actors with torch", theirs)):
        made.append(Figure(title, row, "USS", "MiB", spread(usage.uss for usage in usages)))
        made.append(Figure(title, row, "idle, of a core", "%", spread(usage.idle for usage in usages)))
    held = ratios([usage.uss for usage in ours], [usage.uss for usage in theirs])
    made.append(Figure(title, "together", "USS / floor", "x", held))
    return tuple(made)


def _our_idle(sample: StartupSample) -> float:
    return sum(usage.idle for kind, usage in sample.usage.items() if kind != RAY)


def _idle_above_bare(sample: StartupSample) -> float:
    """Ray itself wakes the main thread of each actor a hundred times a second."""
    actors = sum(usage.count for kind, usage in sample.usage.items() if kind in SERVICES or kind.startswith("worker"))
    return _our_idle(sample) - actors * sample.bare.idle


NOTES = ("Each start is a new process; the model is converted and its files are in the page cache.",)
