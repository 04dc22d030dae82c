"""Ways to read and write slots of a KV store's file: threads, as the store does, and NIXL's POSIX plugin."""

import ctypes
import os
import random
import resource
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.figures import BenchmarkPart, Figure, Progress, ratios, spread
from kvtransfer.backends.nixl_agent import load_nixl
from kvtransfer.errors import TransportUnavailable
from workers.kv_store.slab import SLAB_FILES, Slab, aligned_buffer

BLOCK_BYTES = 720 << 10
NUM_SLOTS, QUICK_SLOTS = 384, 16
DEPTHS = (4, 16)  # in flight
PLUGINS = {"NIXL io_uring": {"use_uring": "true"}, "NIXL aio": {"use_aio": "true"}}
PAUSE_S = 5e-5  # between two looks at what is in flight: NIXL cannot wait
ROUNDS = 9
TABLE = "Slots of 720 KiB, direct I/O"
Run = Callable[[bool], None]


def measure(rounds: int, quick: bool, progress: Progress) -> BenchmarkPart:
    """In the system's folder for temporary files (TMPDIR). Threads alone where NIXL is not installed."""
    plugins, notes = PLUGINS, tuple[str, ...]()
    try:
        load_nixl()
    except TransportUnavailable as error:
        plugins, notes = {}, (str(error),)
    rates: dict[tuple[str, str], list[float]] = defaultdict(list)
    cpu_s: dict[tuple[str, str], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="diptych-bench-") as folder:
        slab = Slab(Path(folder) / SLAB_FILES[0], QUICK_SLOTS if quick else NUM_SLOTS, BLOCK_BYTES)
        file = os.open(slab.path, os.O_RDWR | (os.O_DIRECT if slab.is_direct else 0))
        for depth in DEPTHS:
            runs: dict[str, Run] = {"threads": _threads(slab, depth)}
            runs |= {name: _nixl(slab, file, depth, plugin) for name, plugin in plugins.items()}
            runs["threads"](True)  # the first write of an allocated file is slower
            turns = [(name, writes) for name in runs for writes in (True, False)]
            for number in range(rounds):
                for name, writes in random.sample(turns, len(turns)):
                    column = f"{'write' if writes else 'read'}, depth {depth}"
                    begun_s, before_s = time.perf_counter(), _cpu_s()
                    runs[name](writes)
                    cpu_s[name, column].append((_cpu_s() - before_s) / slab.num_slots)
                    rates[name, column].append(slab.num_slots * slab.slot_bytes / (time.perf_counter() - begun_s))
                progress(f"depth {depth}, round {number + 1} of {rounds}")
        os.close(file)
        slab.close()
    return BenchmarkPart("slab-io", tuple(_figures(rates, cpu_s)), (), notes)


def _figures(rates: dict[tuple[str, str], list[float]], cpu_s: dict[tuple[str, str], list[float]]) -> Iterator[Figure]:
    for (name, column), values in rates.items():
        yield Figure(f"{TABLE}: {column}", name, "rate", "GB/s", spread(values))
        yield Figure(f"{TABLE}: {column}", name, "of threads", "x", ratios(values, rates["threads", column]))
        yield Figure(f"{TABLE}: {column}", name, "CPU of a block", "us", spread(cpu_s[name, column]))


def _threads(slab: Slab, depth: int) -> Run:
    buffers = _buffers(slab, depth)

    def run(writes: bool) -> None:
        def part(first: int) -> None:
            for slot in range(first, slab.num_slots, depth):
                (slab.write if writes else slab.read)(slot, buffers[first])

        with ThreadPoolExecutor(depth) as threads:
            list(threads.map(part, range(depth)))

    return run


def _nixl(slab: Slab, file: int, depth: int, plugin: dict[str, str]) -> Run:
    """One thread that keeps `depth` slots in flight."""
    api: Any = load_nixl()
    agent = api.nixl_agent(f"slab-{depth}-{plugin}", api.nixl_agent_config(enable_prog_thread=False, backends=[]))
    agent.create_backend("POSIX", plugin)
    buffers = _buffers(slab, depth)
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(buffer)) for buffer in buffers]
    agent.register_memory([(address, slab.slot_bytes, 0, "") for address in addresses], "DRAM")
    agent.register_memory([(0, slab.offset(slab.num_slots), file, "")], "FILE")

    def begin(slot: int, buffer: int, writes: bool) -> Any:
        memory = agent.get_xfer_descs([(addresses[buffer], slab.slot_bytes, 0)], "DRAM")
        there = agent.get_xfer_descs([(slab.offset(slot), slab.slot_bytes, file)], "FILE")
        handle = agent.initialize_xfer("WRITE" if writes else "READ", memory, there, agent.name)
        agent.transfer(handle)
        return handle

    def run(writes: bool) -> None:
        slots = iter(range(slab.num_slots))
        flying = {buffer: begin(slot, buffer, writes) for buffer, slot in zip(range(depth), slots, strict=False)}
        while flying:
            states = {buffer: agent.check_xfer_state(handle) for buffer, handle in flying.items()}
            assert set(states.values()) <= {"PROC", "DONE"}, states
            done = [buffer for buffer, state in states.items() if state == "DONE"]
            for buffer in done:
                agent.release_xfer_handle(flying.pop(buffer))
                if (slot := next(slots, None)) is not None:
                    flying[buffer] = begin(slot, buffer, writes)
            if not done:
                time.sleep(PAUSE_S)

    run.__dict__["owns"] = agent, buffers
    return run


def _buffers(slab: Slab, depth: int) -> list[memoryview]:
    buffers = [aligned_buffer(slab.slot_bytes) for _ in range(depth)]
    for buffer in buffers:
        buffer[:] = os.urandom(slab.slot_bytes)
    return buffers


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
