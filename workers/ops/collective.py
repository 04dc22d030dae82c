"""What passes between the ranks of one gang: sums over the tensor ranks of a stage, activations from stage to stage.

Knows process groups and tensors; knows no model and no plan. Groups are plain objects, none is torch's global one, so
several gangs, and several ranks as threads, live in one process. Every wait is bounded: a rank that dies, closes its
groups or stays away longer than the bound is a `RankLost` for those that wait for it, and their groups are of no
further use. Each object is used from one thread; any thread may close it, and lets go whoever waits in it by that.

    how a sum travels    between             order of the summands
    shared memory        CPUs of one host    by rank
    gloo, point to point CPUs                by rank
    nccl                 GPUs                NCCL's

A sum in the order of ranks has the same bits on every rank, and whatever rows lie beside a row.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from workers.config import ParallelConfig
from workers.errors import RankLost
from workers.ops.shared_sum import open_shared_sum

PARTS_BYTES = 128 << 10  # of three ranks and more, each sums only a part of this much
_NEVER_SENT = 1  # a tag beside the one of all that is sent


class Sum(Protocol):
    """How a group adds: x to the sum of all ranks' x, maybe in x's own memory."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def close(self) -> None: ...


class Lines:
    """Sends and receives between the ranks of one process group, in order for each pair.

    Owns the group and the memory that is being sent, so that `close` hangs up whatever frames an error still holds.
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
        """Starts to; x is dense and must not change before `finish` of the answer."""
        number = next(self._numbers)
        self._sending[number] = self._call(lambda group: group.send([x], peer, 0), self._names[peer]), x
        return number

    def finish(self, number: int, peer: int) -> None:
        """Wait until the peer has what was sent."""
        self._call(lambda _: self._sending[number][0].wait(), self._names[peer])
        self._sending.pop(number, None)

    def receive(self, x: Tensor, peer: int) -> Tensor:
        """x, filled with what the peer sent: as many numbers of the same dtype."""
        self._call(lambda group: group.recv([x], peer, 0).wait(), self._names[peer])
        return x

    def exchange(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """Send each rank its own one of `sent`, fill the others' of `received`; this rank's own stay as they are."""
        peers = [peer for peer in range(self.size) if peer != self.rank]
        numbers = [self.send(sent[peer], peer) for peer in peers]
        for peer in peers:
            self.receive(received[peer], peer)
        for number, peer in zip(numbers, peers, strict=True):
            self.finish(number, peer)

    def all_reduce(self, x: Tensor) -> Tensor:
        """By the group's own method, in place."""
        self._call(lambda group: group.allreduce([x]).wait(), "one of " + ", ".join(self._names))
        return x

    def _call(self, act: Callable[[Any], Any], whom: str) -> Any:
        group, begun = self._group, time.perf_counter()
        if group is not None:
            try:
                return act(group)
            except (RuntimeError, KeyError) as error:  # KeyError: closed meanwhile
                lost = _lost(whom, time.perf_counter() - begun, self._timeout_s, error)
        if self._group is None:
            lost = RankLost(f"{self._names[self.rank]} has closed its lines to the others")
        raise lost  # without the error, whose frames would keep the connections that it speaks of

    def close(self) -> None:
        """Whoever waits for this rank learns of it, and so does whoever waits here. What is being sent is given up."""
        group, self._group = self._group, None
        if group is not None:
            _hang_up(group)
        self._sending = {}


def _hang_up(group: Any) -> None:
    """Break a group's connections while others may wait in it.

    Gloo has no call for it, but breaks all of a context's connections when a wait in it runs into its timeout.
    """
    if isinstance(group, dist.ProcessGroupNCCL if dist.is_nccl_available() else ()):
        group.abort()
        return
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(RuntimeError):
                group.recv([torch.empty(1)], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))


class ExchangedSum:
    """Every rank sends every other what it has, or, of much, the part that the other one sums."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines

    def __call__(self, x: Tensor) -> Tensor:
        x, lines = x.contiguous(), self._lines
        if lines.size == 2 or x.nbytes < PARTS_BYTES:
            return self._added([x] * lines.size)
        total = torch.empty_like(x)
        sums = total.view(-1).tensor_split(lines.size)
        sums[lines.rank].copy_(self._added(x.view(-1).tensor_split(lines.size)))
        lines.exchange([sums[lines.rank]] * lines.size, sums)
        return total

    def _added(self, summands: Sequence[Tensor]) -> Tensor:
        """The sum of what all ranks have for this one, each rank having one of `summands` for each."""
        lines = self._lines
        mine = summands[lines.rank]
        received = [mine if peer == lines.rank else torch.empty_like(mine) for peer in range(lines.size)]
        lines.exchange(summands, received)
        total = received[0] + received[1]
        for summand in received[2:]:
            total += summand
        return total

    def close(self) -> None:
        """The lines are the group's."""


class NCCLSum:
    """NCCL's own; a wait there is the GPU's, bounded by the group's watchdog, which ends the process."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines

    def __call__(self, x: Tensor) -> Tensor:
        return self._lines.all_reduce(x.contiguous())

    def close(self) -> None:
        """The lines are the group's."""


class TensorGroup:
    """The ranks that share the layers of one stage. `close` it after its last use."""

    def __init__(self, lines: Lines, sum_: Sum) -> None:
        self._lines = lines
        self._sum = sum_
        self._seconds = 0.0
        self.rank = lines.rank
        self.size = lines.size

    @property
    def way(self) -> str:
        """How sums travel: the class that adds."""
        return type(self._sum).__name__

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, of one shape and dtype, on each of them. x may be overwritten."""
        if x.numel() == 0:
            return x
        begun = time.perf_counter()
        total = self._sum(x)
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
                self._lines.finish(self._lines.send(x, 0), 0)
            return None
        parts = [x, *(x.new_empty(x.shape[0], width) for width in widths[1:])]
        for peer, part in enumerate(parts[1:], start=1):
            if part.numel():
                self._lines.receive(part, peer)
        return torch.cat(parts, dim=1)

    def take_comm_s(self) -> float:
        """Seconds in this group's calls since the last time somebody asked; the wait for slower ranks is in them."""
        taken, self._seconds = self._seconds, 0.0
        return taken

    def close(self) -> None:
        self._sum.close()
        self._lines.close()


class StageLink:
    """The ranks with one tensor rank in all stages: activations go from each to the next. `close` it after all use.

    A send only starts; its memory is kept until the next stage has it. `bound` sends may be under way: as many steps
    as may be ahead of the next stage. Beyond that a send waits for the oldest.
    """

    def __init__(self, lines: Lines, bound: int) -> None:
        self._lines = lines
        self._bound = bound
        self._sending: deque[int] = deque()
        self._seconds = 0.0

    def send(self, x: Tensor) -> None:
        """To the next stage; x [tokens, hidden] must not change any more."""
        self._finish(self._bound - 1)
        self._sending.append(self._lines.send(x.contiguous(), self._lines.rank + 1))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """What the stage before sent, of which the shape is known."""
        begun = time.perf_counter()
        x = self._lines.receive(torch.empty(*shape, dtype=dtype, device=device), self._lines.rank - 1)
        self._seconds += time.perf_counter() - begun
        return x

    def flush(self) -> None:
        """Wait until the next stage has all that was sent."""
        self._finish(0)

    def _finish(self, left: int) -> None:
        while len(self._sending) > left:
            self._lines.finish(self._sending.popleft(), self._lines.rank + 1)

    def take_wait_s(self) -> float:
        """Seconds in `receive` since the last time somebody asked."""
        taken, self._seconds = self._seconds, 0.0
        return taken

    def close(self) -> None:
        """What is still being sent is given up; whoever waits here is let go."""
        self._lines.close()


def open_groups(
    store: Store, parallel: ParallelConfig, rank: int, device: torch.device, host: str, timeout_s: float
) -> tuple[TensorGroup | None, StageLink | None]:
    """Meet the other ranks of a gang, which do the same; None for what has a single rank.

    `store` is one that all of them reach and that nobody used for this before. `host` is the address of this machine
    that the others reach, and the only one that is listened at. `timeout_s` bounds the meeting and every later wait.
    Raises `RankLost`.
    """
    stage, tensor_rank = divmod(rank, parallel.tensor)
    ranks = range(parallel.world_size)
    names = [f"rank {each} (stage {each // parallel.tensor}, tensor {each % parallel.tensor})" for each in ranks]
    group: TensorGroup | None = None
    if parallel.tensor > 1:
        within = PrefixStore(f"stage-{stage}", store)
        peers = names[stage * parallel.tensor : (stage + 1) * parallel.tensor]
        lines = _open_lines(within, tensor_rank, peers, device, host, timeout_s)
        group = TensorGroup(lines, _open_sum(within, lines, peers, device, timeout_s))
    if parallel.pipeline == 1:
        return group, None
    across, column = PrefixStore(f"tensor-{tensor_rank}", store), names[tensor_rank :: parallel.tensor]
    try:
        return group, StageLink(_open_lines(across, stage, column, device, host, timeout_s), 2 * parallel.pipeline)
    except BaseException:
        if group is not None:
            group.close()
        raise


def _open_lines(
    store: Store, rank: int, names: Sequence[str], device: torch.device, host: str, timeout_s: float
) -> Lines:
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
            return Lines(dist.ProcessGroupNCCL(store, rank, len(names), nccl), names, timeout_s)
        options = gloo._Options()
        options._timeout, options._threads = timeout, 1
        options._devices = [listener]
        return Lines(gloo(store, rank, len(names), options), names, timeout_s)
    except RuntimeError as error:
        whom = "one of " + ", ".join(name for at, name in enumerate(names) if at != rank)
        raise _lost(whom, time.perf_counter() - begun, timeout_s, error) from error


def _open_sum(store: Store, lines: Lines, names: Sequence[str], device: torch.device, timeout_s: float) -> Sum:
    if device.type == "cuda":
        return NCCLSum(lines)
    begun = time.perf_counter()
    try:
        shared = open_shared_sum(store, lines.rank, names, timeout_s)
    except RuntimeError as error:
        lines.close()
        raise _lost("one of " + ", ".join(names), time.perf_counter() - begun, timeout_s, error) from error
    return shared or ExchangedSum(lines)


def _lost(whom: str, seconds: float, timeout_s: float, error: Exception) -> RankLost:
    words = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if seconds >= 0.9 * timeout_s:
        return RankLost(f"{whom} did not answer within {timeout_s:g} s")
    return RankLost(f"{whom} is gone: {words}")
