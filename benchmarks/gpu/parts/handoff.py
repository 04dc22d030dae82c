"""KV between two processes on one device, through the transports of workers: speed, every byte, and owners that die.

An owner has three pools: whole, and one for each of two ranks. A reader pulls whole blocks, the halves of two ranks,
and blocks into larger ones. On a CPU the same program runs over TCP.
"""

import asyncio
import faulthandler
import importlib.util
import multiprocessing as mp
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvtransfer.backends.nixl_agent import MODULES
from kvtransfer.copies import pieces_of, plan_copies
from kvtransfer.digest import combine, digest_cells
from kvtransfer.errors import DigestMismatch, TransferError
from kvtransfer.host import host_identity
from kvtransfer.layout import KVLayout
from kvtransfer.links import TransportSet
from kvtransfer.open import RESERVED_BLOCKS, open_transports
from kvtransfer.ticket import PeerAddress, Piece, ShardAddress
from kvtransfer.transport import Copies, PullOrder, Region, Transport
from workers.executor.kv_pool import KVPool, allocate_pool

LLAMA_8B = KVLayout("8b", num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")
TINY = KVLayout("tiny", num_layers=2, num_kv_heads=4, head_dim=16, block_size=16, dtype="bfloat16")
# A pull's name, the pools that it reads, and by how much our blocks are larger.
KINDS = (("whole", (0,), 1), ("tensor", (1, 2), 1), ("blocks", (0,), 2))
ROUNDS, SMALL_ROUNDS = 7, 50
DEADLINE_S = 5.0
KILL_AFTER_S = 0.05
ANSWER_S, NIXL_ANSWER_S = 60.0, 20.0
STUCK_S = 4.0
SECRET = b"the secret of the benchmark"

Shards = list[ShardAddress]
Reads = list[tuple[str, Copies]]


def measure(device: torch.device, *, tiny: bool) -> dict[str, object]:
    return asyncio.run(_measure(device, TINY if tiny else LLAMA_8B, (256, 512) if tiny else (2048, 8192)))


async def _measure(device: torch.device, layout: KVLayout, sizes: tuple[int, ...]) -> dict[str, object]:
    own = "tcp" if device.type == "cpu" else "cuda_ipc"
    place = "cpu" if device.type == "cpu" else f"cuda:{device.index or 0}"
    children = [_Child(_own, own, layout, max(sizes), place) for _ in range(3)]
    children.append(_Child(_own_checked, own, layout, max(sizes), place))
    has_nixl = any(importlib.util.find_spec(name) for name in MODULES)
    if has_nixl:
        children.append(_Child(_own_nixl, layout, max(sizes), place))
    try:
        owners = [(child, child.answer()) for child in children[:3]]
        figures = await _compare(own, layout, sizes, place, owners[0][1])
        figures |= await _checked(own, layout, max(sizes), place, children[3])
        figures["nixl"] = "not installed"
        if has_nixl:
            try:
                children.append(_Child(_compare_nixl, layout, sizes, place, children[4].answer()))
                figures |= children[-1].answer(NIXL_ANSWER_S) | {"nixl": "works"}
            except TransferError as error:
                figures["nixl"] = f"does not work: {error}"
        figures |= await _killed(own, layout, max(sizes), place, owners[1:])
    finally:
        for child in children:
            child.kill()
    return figures


async def _compare(
    backend: str,
    layout: KVLayout,
    sizes: tuple[int, ...],
    place: str,
    shards: Shards,
    *,
    kinds: int = len(KINDS),
    num_rounds: int = ROUNDS,
) -> dict[str, object]:
    """Check every byte of each kind of pull, then time it in turn with a plain copy of as many bytes."""
    figures: dict[str, object] = {}
    for name, theirs, times_larger in KINDS[:kinds]:
        target = replace(layout, block_size=layout.block_size * times_larger)
        region, memory = _pool(target, target.blocks_for(max(sizes)) + 2, place)
        transport = _open(backend, region, "reader")
        try:
            for index in theirs:
                figures[f"{backend}_path"] = await transport.connect(
                    f"owner/{index}", shards[index], deadline_s=DEADLINE_S
                )
            print(f"{backend} {name}: connected", file=sys.stderr, flush=True)
            for num_tokens in sizes:
                key, reads = f"{backend}_{name}_{num_tokens}", _reads(shards, theirs, target, num_tokens)
                memory.zero_()
                _synchronize(place)
                await _read(transport, reads)
                print(f"{key}: read", file=sys.stderr, flush=True)
                if not torch.equal(memory, _expected(shards, theirs, region, num_tokens, place)):
                    raise AssertionError(f"{key}: the bytes that arrived are not the owner's")
                num_bytes = sum(int(copies[:, 2].sum()) for _, copies in reads)
                plain = torch.zeros(2, num_bytes, dtype=torch.uint8, device=place)
                _copy_seconds(plain)
                rounds = [(*await _timed_read(transport, reads), _copy_seconds(plain)) for _ in range(num_rounds)]
                seconds, moving_s, copy_s = (statistics.median(each) for each in zip(*rounds, strict=True))
                figures[f"{key}_gb_s"] = num_bytes / seconds / 1e9
                figures[f"{key}_share_of_copy"] = copy_s / seconds
                figures[f"{key}_moving_share_of_copy"] = copy_s / moving_s
                figures[f"{key}_ranges"] = sum(len(copies) for _, copies in reads)
                figures[f"copy_{num_tokens}_gb_s"] = num_bytes / copy_s / 1e9
            if name == "whole":
                block: Reads = [("owner/0", np.array([[0, 0, layout.block_bytes]], np.int64))]
                times = [await _read(transport, block) for _ in range(SMALL_ROUNDS)]
                figures[f"{backend}_block_us"] = statistics.median(times) * 1e6
        finally:
            await transport.close()
    return figures


async def _checked(backend: str, layout: KVLayout, num_tokens: int, place: str, owner: "_Child") -> dict[str, object]:
    """A pull as a worker's: preflight, and a digest of every block; one that differs must be found."""
    peer, order = owner.answer()
    pool, opened = _open_set(backend, layout, num_tokens, place, "reader")
    try:
        report = await opened.connect(peer)
        order = replace(order, target_blocks=_live_blocks(layout, num_tokens, 2))
        piece, digests = order.digests[0]
        damaged = opened.pull(replace(order, digests=((piece, (digests[0] ^ 1, *digests[1:])),)))
        await damaged.settled
        if not isinstance(damaged.done.exception(), DigestMismatch):
            raise AssertionError("a block whose digest differs was taken")
        pool.blocks.zero_()
        _synchronize(place)
        stats = await opened.pull(order).done
        theirs = _pattern(len(pool.memory), 3, place)[: pool.region.pool_bytes].view(torch.int16)
        ours, theirs = (each.view(-1, *layout.shape) for each in (pool.blocks.view(torch.int16), theirs))
        if not torch.equal(ours[list(order.target_blocks)], theirs[list(order.source_blocks)]):
            raise AssertionError("the bytes that arrived by a checked pull are not the owner's")
        rounds = []
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            stats = await opened.pull(order).done
            rounds.append(time.perf_counter() - begun)
    finally:
        await opened.close()
    return {
        f"{backend}_checked_{num_tokens}_gb_s": stats.num_bytes / statistics.median(rounds) / 1e9,
        f"{backend}_checked_{num_tokens}_digests": stats.num_digests,
        f"{backend}_checked_{num_tokens}_digest_ms": stats.digest_seconds * 1e3,
        f"{backend}_preflight_latency_us": report.latency_s * 1e6,
        f"{backend}_preflight_gb_s": report.bytes_per_s / 1e9,
    }


async def _killed(
    backend: str, layout: KVLayout, num_tokens: int, place: str, owners: "list[tuple[_Child, Shards]]"
) -> dict[str, object]:
    """Owners killed before a read and during reads: what the reader sees, and how much memory its mapping holds."""
    figures: dict[str, object] = {}
    region, memory = _pool(layout, layout.blocks_for(num_tokens) + 2, place)
    transport = _open(backend, region, "reader")
    for (moment, delay_s), (owner, shards) in zip((("before", 0.0), ("during", KILL_AFTER_S)), owners, strict=True):
        await transport.connect("owner/0", shards[0], deadline_s=DEADLINE_S)
        reads = _reads(shards, (0,), layout, num_tokens)
        if not delay_s:
            await asyncio.to_thread(owner.kill)
        killing = asyncio.get_running_loop().run_in_executor(None, owner.kill, delay_s)
        begun, arrived, outcome = time.perf_counter(), 0, "arrived, every time"
        while time.perf_counter() < begun + DEADLINE_S:
            try:
                await _read(transport, reads)
                arrived += 1
            except TransferError as error:
                outcome = f"{arrived} reads, then {type(error).__name__} after {time.perf_counter() - begun:.3f} s"
                break
        await killing
        figures[f"{backend}_owner_killed_{moment}"] = outcome
        if place != "cpu":
            free_bytes = torch.cuda.mem_get_info(place)[0]
            await transport.forget("owner/0")
            held = torch.cuda.mem_get_info(place)[0] - free_bytes
            figures[f"{backend}_killed_{moment}_held_until_forgotten_mib"] = held / 2**20
    await transport.close()
    memory.fill_(1)
    if int(memory[-4096:].sum()) != 4096:
        raise AssertionError("the reader's device no longer computes")
    return figures


class _Child:
    """A process of ours that sends one answer and then waits until it is killed."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def answer(self, limit_s: float = ANSWER_S) -> Any:
        """Raises the `TransferError` that the process sent, or one for a process that ended or hangs."""
        try:
            answer = self._pipe.recv() if self._pipe.poll(limit_s) else TransferError(f"no answer in {limit_s} s")
        except EOFError:
            self._process.join()
            answer = TransferError(f"the process ended with {self._process.exitcode}")
        if isinstance(answer, TransferError):
            raise answer
        return answer

    def kill(self, delay_s: float = 0.0) -> None:
        time.sleep(delay_s)
        self._process.kill()
        self._process.join()


def _explain(who: str) -> None:
    """UCX's words, and where this process waits after a while, go to the part's log."""
    os.environ |= {"UCX_LOG_LEVEL": "info", "NIXL_LOG_LEVEL": "WARN", "UCX_PROTO_INFO": "y"}
    faulthandler.enable()
    faulthandler.dump_traceback_later(STUCK_S, repeat=True)
    print(f"NIXL's {who} has started", file=sys.stderr, flush=True)


def _own_checked(pipe: Connection, backend: str, layout: KVLayout, num_tokens: int, place: str) -> None:
    pool, opened = _open_set(backend, layout, num_tokens, place, "owner")
    blocks = _live_blocks(layout, num_tokens, 1)
    live = slice(RESERVED_BLOCKS * layout.block_bytes, None)
    pool.memory[live] = _pattern(len(pool.memory), 3, place)[live]
    _synchronize(place)
    piece = Piece(0, layout.heads, layout.layers)
    cells = digest_cells(pool.region, [(block, layout.block_size) for block in blocks])
    digests = ((piece, combine(cells, layout, piece)),)
    peer = PeerAddress("owner", "owner", "127.0.0.1", 0, (opened.shard(),))
    pipe.send((peer, PullOrder("owner", blocks, (), 0, num_tokens, digests, DEADLINE_S)))
    pipe.poll(None)


def _open_set(backend: str, layout: KVLayout, num_tokens: int, place: str, name: str) -> tuple[KVPool, TransportSet]:
    pool = allocate_pool(layout, layout.blocks_for(num_tokens) + RESERVED_BLOCKS, torch.device(place))
    return pool, open_transports(pool.region, (backend,), incarnation=name, secret=SECRET, host="127.0.0.1")


def _own_nixl(pipe: Connection, *arguments: Any) -> None:
    _explain("owner")
    _own(pipe, "nixl", *arguments)


def _compare_nixl(pipe: Connection, layout: KVLayout, sizes: tuple[int, ...], place: str, shards: Shards) -> None:
    """In a process of its own, which UCX may end. Few reads: it copies range by range."""
    _explain("reader")
    try:
        pipe.send(asyncio.run(_compare("nixl", layout, sizes[:1], place, shards, kinds=2, num_rounds=2)))
    except TransferError as error:
        pipe.send(error)
    pipe.poll(None)


def _own(pipe: Connection, backend: str, layout: KVLayout, num_tokens: int, place: str) -> None:
    half = layout.num_kv_heads // 2
    layouts = [layout, replace(layout, heads=(0, half)), replace(layout, heads=(half, layout.num_kv_heads))]
    shards, transports = [], []
    try:
        for index, each in enumerate(layouts):
            region, memory = _pool(each, each.blocks_for(num_tokens) + 2, place)
            memory.copy_(_pattern(len(memory), index, place))
            _synchronize(place)
            transports.append(_open(backend, region, f"owner/{index}"))
            address = ((backend, transports[-1].address()),)
            shards.append(ShardAddress(index, each, region.num_blocks, address))
    except TransferError as error:
        pipe.send(error)
        return
    pipe.send(shards)
    pipe.poll(None)


def _open(backend: str, region: Region, name: str) -> Transport:
    if backend == "cuda_ipc":
        from kvtransfer.backends.cuda_ipc import CudaIpcTransport

        return CudaIpcTransport(region, identity=host_identity())
    if backend == "nixl":
        from kvtransfer.backends.nixl import NixlTransport

        return NixlTransport(region, identity=host_identity(), quarantine_s=1.0)
    from kvtransfer.backends.tcp import TcpTransport

    return TcpTransport(region, host="127.0.0.1", secret=SECRET, incarnation=name, max_readers=8)


def _pool(layout: KVLayout, num_blocks: int, place: str) -> tuple[Region, Tensor]:
    memory = torch.zeros(num_blocks * layout.block_bytes, dtype=torch.uint8, device=place)
    return Region(layout, num_blocks, memory.data_ptr(), memory, place), memory


def _pattern(num_bytes: int, seed: int, place: str) -> Tensor:
    """The same random bytes in every process."""
    generator = torch.Generator(place).manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=place, generator=generator)


def _blocks(layout: KVLayout, num_tokens: int, seed: int) -> list[int]:
    """Scattered blocks, as in a pool that has served for a while."""
    count = layout.blocks_for(num_tokens)
    return [int(each) for each in np.random.default_rng(seed).permutation(count + 2)[:count]]


def _live_blocks(layout: KVLayout, num_tokens: int, seed: int) -> tuple[int, ...]:
    count = layout.blocks_for(num_tokens)
    return tuple(int(each) + RESERVED_BLOCKS for each in np.random.default_rng(seed).permutation(count))


def _reads(shards: Shards, theirs: tuple[int, ...], target: KVLayout, num_tokens: int) -> Reads:
    layouts = [shards[index].layout for index in theirs]
    reads: Reads = []
    for piece in pieces_of(layouts, target, 0):
        source = layouts[piece.shard]
        blocks = _blocks(source, num_tokens, 1), _blocks(target, num_tokens, 2)
        copies = plan_copies(piece, source, target, *blocks, 0, num_tokens)
        reads.append((f"owner/{theirs[piece.shard]}", copies))
    return reads


def _expected(shards: Shards, theirs: tuple[int, ...], region: Region, num_tokens: int, place: str) -> Tensor:
    """Our pool after the reads, by indexing whole blocks, heads and slots instead of byte ranges."""
    target = region.layout
    expected = torch.zeros(region.num_bytes, dtype=torch.uint8, device=place)
    ours = expected.view(torch.int16).view(-1, *target.shape)
    parts = []
    for index in theirs:
        shard = shards[index]
        pool = _pattern(shard.num_blocks * shard.layout.block_bytes, index, place).view(torch.int16)
        parts.append(pool.view(-1, *shard.layout.shape)[_blocks(shard.layout, num_tokens, 1)])
    blocks = torch.cat(parts, dim=1)  # [block, kv_head, layer, k|v, slot, head_dim]
    merged = target.block_size // blocks.shape[4]
    recut = blocks.view(-1, merged, *blocks.shape[1:]).permute(0, 2, 3, 4, 1, 5, 6).reshape(-1, *target.shape)
    ours[_blocks(target, num_tokens, 2)] = recut
    return expected


async def _read(transport: Transport, reads: Reads) -> float:
    """Seconds until all have arrived."""
    return (await _timed_read(transport, reads))[0]


async def _timed_read(transport: Transport, reads: Reads) -> tuple[float, float]:
    """Seconds until all have arrived; and those that the transport spent on them, without the way to its thread."""
    begun = time.perf_counter()
    started = [transport.read(peer, copies, deadline_s=DEADLINE_S) for peer, copies in reads]
    try:
        moving_s = sum([(await each.done).seconds for each in started])
        return time.perf_counter() - begun, moving_s
    finally:
        for each in started:
            await each.settled


def _copy_seconds(plain: Tensor) -> float:
    begun = time.perf_counter()
    plain[0].copy_(plain[1])
    _synchronize(str(plain.device))
    return time.perf_counter() - begun


def _synchronize(place: str) -> None:
    if place != "cpu":
        torch.cuda.synchronize(place)
