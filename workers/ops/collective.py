"""Communication between the ranks of one gang: sums over the tensor ranks of a stage, activations between stages.

Knows process groups and tensors; knows no model and no plan. Groups are plain objects, none is torch's global one, so
several gangs, and several ranks as threads, can share a process. Every wait is bounded: if a rank dies, closes its
groups or does not answer in time, the ranks that wait for it raise `RankLost` and must close their groups. Each object
is used from one thread; any thread may close it, which also wakes the thread that waits in it.

    method of a sum      between             order of the summands
    shared memory        CPUs of one host    by rank
    point to point       CPUs, over gloo     by rank
    NCCL                 GPUs                NCCL's

A sum in the order of ranks has the same bits on every rank, whatever other rows are in the batch.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from workers.config import ParallelConfig
from workers.errors import RankLost
from workers.ops.shared_sum import SharedSum, open_shared_sum

PARTS_BYTES = 128 << 10  # with three ranks or more, each sums only a part of a tensor that is at least this large
_UNUSED_TAG = 1  # all messages have tag 0


class PointToPoint:
    """Sends and receives between the ranks of one process group, in order for each pair.

    Owns the group and the memory in flight, so that `close` ends the connections even if an error still holds frames.
    """

    def __init__(self, group: Any, names: Sequence[str], timeout_s: float) -> None:
        self._group = group
        self._names = names
        self._timeout_s = timeout_s
        self._numbers = itertools.count()
        self._sending: dict[int, tuple[Any, Tensor]] = {}
        self.rank: int = group.rank()
        self.size: int = group.size()

    def send(self, x: Tensor, peer: int) -> int:
        """Start sending; x is dense and must not change before `finish` with the number that this returns."""
        number = next(self._numbers)
        self._sending[number] = self._call(lambda group: group.send([x], peer, 0), self._names[peer]), x
        return number

    def finish(self, number: int, peer: int) -> None:
        """Wait until the peer has received it."""
        self._call(lambda _: self._sending[number][0].wait(), self._names[peer])
        self._sending.pop(number, None)

    def receive(self, x: Tensor, peer: int) -> Tensor:
        """Fill x with the tensor that the peer sent, of the same size and dtype; returns x."""
        self._call(lambda group: group.recv([x], peer, 0).wait(), self._names[peer])
        return x

    def exchange(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """Send sent[rank] to each rank and fill received[rank] from it; this rank's own entries stay as they are."""
        peers = [peer for peer in range(self.size) if peer != self.rank]
        numbers = [self.send(sent[peer], peer) for peer in peers]
        for peer in peers:
            self.receive(received[peer], peer)
        for number, peer in zip(numbers, peers, strict=True):
            self.finish(number, peer)

    def nccl_sum(self, x: Tensor) -> Tensor:
        """In place. The GPU waits, bounded by the group's watchdog, which ends the process."""
        self._call(lambda group: group.allreduce([x]).wait(), "one of " + ", ".join(self._names))
        return x

    def _call(self, act: Callable[[Any], Any], peers: str) -> Any:
        group, begun = self._group, time.perf_counter()
        if group is not None:
            try:
                return act(group)
            except (RuntimeError, KeyError) as error:  # KeyError: closed meanwhile
                lost = _lost(peers, time.perf_counter() - begun, self._timeout_s, error)
        if self._group is None:
            lost = RankLost(f"{self._names[self.rank]} has closed its connections")
        raise lost  # without the cause: its frames would keep the connections open

    def close(self) -> None:
        """Ranks that wait for this one, and a thread that waits here, raise `RankLost`. Sends in flight are dropped."""
        group, self._group = self._group, None
        if group is not None:
            _break_connections(group)
        self._sending = {}


def _break_connections(group: Any) -> None:
    """Break a group's connections while other threads may wait in it.

    Gloo has no call for it, but it breaks all connections of a context when a wait in it times out.
    """
    if isinstance(group, dist.ProcessGroupNCCL if dist.is_nccl_available() else ()):
        group.abort()
        return
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(RuntimeError):
                group.recv([torch.empty(1)], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))


class TensorGroup:
    """The ranks that share the layers of one stage. `close` it after its last use."""

    def __init__(self, p2p: PointToPoint, shared_sum: SharedSum | None) -> None:
        """Sums go through `shared_sum` if there is one, else through NCCL on GPUs and point to point on CPUs."""
        self._p2p = p2p
        self._shared_sum = shared_sum
        self._seconds = 0.0
        self.rank = p2p.rank
        self.size = p2p.size

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, of one shape and dtype, on each of them. May overwrite x."""
        if x.numel() == 0:
            return x
        begun = time.perf_counter()
        if self._shared_sum is not None:
            total = self._shared_sum(x)
        elif x.is_cuda:
            total = self._p2p.nccl_sum(x.contiguous())
        else:
            total = exchanged_sum(self._p2p, x.contiguous())
        self._seconds += time.perf_counter() - begun
        return total

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor | None:
        """The ranks' x [rows, widths[rank]] side by side on rank 0; None on the others."""
        begun = time.perf_counter()
        gathered = self._gather(x.contiguous(), widths)
        self._seconds += time.perf_counter() - begun
        return gathered

    def _gather(self, x: Tensor, widths: Sequence[int]) -> Tensor | None:
        if self.rank != 0:
            if x.numel():
                self._p2p.finish(self._p2p.send(x, 0), 0)
            return None
        parts = [x, *(x.new_empty(x.shape[0], width) for width in widths[1:])]
        for peer, part in enumerate(parts[1:], start=1):
            if part.numel():
                self._p2p.receive(part, peer)
        return torch.cat(parts, dim=1)

    def take_comm_s(self) -> float:
        """Seconds in this group's calls since the last `take_comm_s`, waits for slower ranks included."""
        taken, self._seconds = self._seconds, 0.0
        return taken

    def close(self) -> None:
        if self._shared_sum is not None:
            self._shared_sum.close()
        self._p2p.close()


def exchanged_sum(p2p: PointToPoint, x: Tensor) -> Tensor:
    """The sum over CPUs, point to point: each rank sends x to all others and adds in the order of ranks.

    With three ranks or more a large x is split: each rank adds one part and sends the result to the others.
    """
    if p2p.size == 2 or x.nbytes < PARTS_BYTES:
        return _add_received(p2p, [x] * p2p.size)
    total = torch.empty_like(x)
    sums = total.view(-1).tensor_split(p2p.size)
    sums[p2p.rank].copy_(_add_received(p2p, x.view(-1).tensor_split(p2p.size)))
    p2p.exchange([sums[p2p.rank]] * p2p.size, sums)
    return total


def _add_received(p2p: PointToPoint, summands: Sequence[Tensor]) -> Tensor:
    """Send summands[rank] to each rank; returns the sum of the summands that all ranks have for this one."""
    own = summands[p2p.rank]
    received = [own if peer == p2p.rank else torch.empty_like(own) for peer in range(p2p.size)]
    p2p.exchange(summands, received)
    total = received[0] + received[1]
    for summand in received[2:]:
        total += summand
    return total


class StageLink:
    """Passes activations from one stage to the next, between ranks of one tensor rank. `close` it after its last use.

    `send` returns at once and keeps the memory until the next stage has received it. At most `bound` sends are in
    flight; beyond that `send` waits for the oldest.
    """

    def __init__(self, p2p: PointToPoint, bound: int) -> None:
        self._p2p = p2p
        self._bound = bound
        self._sending: deque[int] = deque()
        self._seconds = 0.0

    def send(self, x: Tensor) -> None:
        """To the next stage; x [tokens, hidden] must not change afterwards."""
        self._finish(self._bound - 1)
        self._sending.append(self._p2p.send(x.contiguous(), self._p2p.rank + 1))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """The tensor that the previous stage sent; its shape must be known."""
        begun = time.perf_counter()
        x = self._p2p.receive(torch.empty(*shape, dtype=dtype, device=device), self._p2p.rank - 1)
        self._seconds += time.perf_counter() - begun
        return x

    def flush(self) -> None:
        """Wait until the next stage has received everything."""
        self._finish(0)

    def _finish(self, left: int) -> None:
        while len(self._sending) > left:
            self._p2p.finish(self._sending.popleft(), self._p2p.rank + 1)

    def take_wait_s(self) -> float:
        """Seconds in `receive` since the last `take_wait_s`."""
        taken, self._seconds = self._seconds, 0.0
        return taken

    def close(self) -> None:
        """Drops sends in flight; a thread that waits here raises `RankLost`."""
        self._p2p.close()


def open_groups(
    store: Store, parallel: ParallelConfig, rank: int, device: torch.device, host: str, timeout_s: float
) -> tuple[TensorGroup | None, StageLink | None]:
    """Connect to the other ranks of a gang, all of which call this; None for a dimension of size 1.

    `store` must be reachable from all ranks and not used for this before. `host` is this machine's address for the
    other ranks, and the only one to listen on. `timeout_s` bounds this call and every later wait. Raises `RankLost`.
    """
    stage, tensor_rank = divmod(rank, parallel.tensor)
    ranks = range(parallel.world_size)
    names = [f"rank {each} (stage {each // parallel.tensor}, tensor {each % parallel.tensor})" for each in ranks]
    group: TensorGroup | None = None
    if parallel.tensor > 1:
        within = PrefixStore(f"stage-{stage}", store)
        peers = names[stage * parallel.tensor : (stage + 1) * parallel.tensor]
        p2p = _open_point_to_point(within, tensor_rank, peers, device, host, timeout_s)
        group = TensorGroup(p2p, _open_shared_sum(within, p2p, peers, device, timeout_s))
    if parallel.pipeline == 1:
        return group, None
    across, column = PrefixStore(f"tensor-{tensor_rank}", store), names[tensor_rank :: parallel.tensor]
    try:
        return group, StageLink(
            _open_point_to_point(across, stage, column, device, host, timeout_s), 2 * parallel.pipeline
        )
    except BaseException:
        if group is not None:
            group.close()
        raise


def _open_point_to_point(
    store: Store, rank: int, names: Sequence[str], device: torch.device, host: str, timeout_s: float
) -> PointToPoint:
    begun, timeout = time.perf_counter(), timedelta(seconds=timeout_s)
    gloo: Any = dist.ProcessGroupGloo
    try:
        listener = gloo.create_device(hostname=host, lazy_init=False) if device.type == "cpu" else None
    except RuntimeError as error:
        raise RankLost(f"{names[rank]} cannot listen at {host}: {str(error).splitlines()[0]}") from error
    try:
        if device.type == "cuda":
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = timeout
            return PointToPoint(dist.ProcessGroupNCCL(store, rank, len(names), nccl), names, timeout_s)
        options = gloo._Options()
        options._timeout, options._threads = timeout, 1
        options._devices = [listener]
        return PointToPoint(gloo(store, rank, len(names), options), names, timeout_s)
    except RuntimeError as error:
        others = "one of " + ", ".join(name for at, name in enumerate(names) if at != rank)
        raise _lost(others, time.perf_counter() - begun, timeout_s, error) from error


def _open_shared_sum(
    store: Store, p2p: PointToPoint, names: Sequence[str], device: torch.device, timeout_s: float
) -> SharedSum | None:
    """None on GPUs, and where the ranks cannot share memory."""
    if device.type == "cuda":
        return None
    begun = time.perf_counter()
    try:
        return open_shared_sum(store, p2p.rank, names, timeout_s)
    except RuntimeError as error:
        p2p.close()
        raise _lost("one of " + ", ".join(names), time.perf_counter() - begun, timeout_s, error) from error


def _lost(peers: str, seconds: float, timeout_s: float, error: Exception) -> RankLost:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if seconds >= 0.9 * timeout_s:
        return RankLost(f"{peers} did not answer within {timeout_s:g} s")
    return RankLost(f"{peers} is gone: {reason}")
