"""The frames between the leader of a gang and its other ranks, over one connection each.

    leader -> rank   Hello(nonce)
    rank -> leader   Join(rank, nonce, proof)                    both prove that they know the cluster's secret
    leader -> rank   Welcome(proof), then Open once all are there
    rank -> leader   Opened(shard)   or   Failed
    leader -> rank   Execute | Connect | Pull | Forget | Close   } many at once; plans are computed in the order
    rank -> leader   Stepped | Connected | Pulled | Done | Failed   in which they were sent, the rest in any order
    rank -> leader   Settled (no byte of that pull can land any more), Moved (its pool has a new address) for Alive
    both             Alive, every second from Welcome on

Knows frames and errors by name; knows no rank and no plan.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

import kvtransfer.errors
import workers.errors
from kvtransfer.control_wire import Channel
from kvtransfer.ticket import LinkReport, PeerAddress, ShardAddress
from kvtransfer.transport import PullOrder, ReadStats
from workers.engine.step import StepPlan
from workers.executor.rank import RankStep

FRAME_BYTES = 256 << 20  # digests of a long prompt, log probabilities of a whole one
STRANGER_BYTES = 4096  # before the handshake
BEAT_S = 1.0


class Hello(msgspec.Struct, frozen=True, tag=True):
    nonce: bytes


class Join(msgspec.Struct, frozen=True, tag=True):
    rank: int
    nonce: bytes
    proof: bytes


class Welcome(msgspec.Struct, frozen=True, tag=True):
    proof: bytes


class Open(msgspec.Struct, frozen=True, tag=True):
    pass


class Opened(msgspec.Struct, frozen=True, tag=True):
    shard: ShardAddress


class Execute(msgspec.Struct, frozen=True, tag=True):
    number: int
    plan: StepPlan


class Connect(msgspec.Struct, frozen=True, tag=True):
    number: int
    peer: PeerAddress


class Pull(msgspec.Struct, frozen=True, tag=True):
    number: int
    order: PullOrder


class Forget(msgspec.Struct, frozen=True, tag=True):
    number: int
    incarnation: str


class Close(msgspec.Struct, frozen=True, tag=True):
    number: int


class Stepped(msgspec.Struct, frozen=True, tag=True):
    number: int
    step: RankStep


class Connected(msgspec.Struct, frozen=True, tag=True):
    number: int
    report: LinkReport


class Pulled(msgspec.Struct, frozen=True, tag=True):
    number: int
    stats: ReadStats


class Settled(msgspec.Struct, frozen=True, tag=True):
    number: int


class Moved(msgspec.Struct, frozen=True, tag=True):
    shard: ShardAddress


class Done(msgspec.Struct, frozen=True, tag=True):
    number: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    number: int
    kind: str  # the name of an error of ours, or of any other
    reason: str


class Alive(msgspec.Struct, frozen=True, tag=True):
    ticks: int = 0  # of a rank: see `Rank.ticks`


ToRank = Hello | Welcome | Open | Execute | Connect | Pull | Forget | Close | Alive
ToLeader = Join | Opened | Stepped | Connected | Pulled | Settled | Moved | Done | Failed | Alive

_KINDS: dict[str, type[Exception]] = {
    name: kind
    for module in (kvtransfer.errors, workers.errors)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and issubclass(kind, Exception)
}


def seat_name(incarnation: str, rank: int) -> str:
    """What both sides of a handshake bind their proofs to."""
    return f"{incarnation}/{rank}"


def failed(number: int, error: BaseException) -> Failed:
    name, words = type(error).__name__, str(error).strip()
    return Failed(number, name, words if name in _KINDS else words.partition("\n")[0])


def error_of(frame: Failed, rank: int) -> Exception:
    """The error that a rank met: of the same class where it is one of ours with a message alone."""
    kind = _KINDS.get(frame.kind)
    if kind is None or kind.__init__ is not Exception.__init__:
        return workers.errors.WorkerError(f"rank {rank}: {frame.kind}: {frame.reason}")
    return kind(frame.reason)


class Line:
    """A connection after its handshake. Both ends beat, so that each learns when the other is stopped or cut off.

    Silence is counted in beats of our own: an end that was itself stopped or starved for a while suspects nobody.
    """

    def __init__(self, channel: Channel, patience_s: float) -> None:
        self.patience_s = patience_s
        self.silent = False
        self._channel = channel
        self._quiet = 0

    def send(self, frame: msgspec.Struct) -> None:
        self._channel.send(frame)

    async def receive(self, kinds: Any) -> Any:
        """The next frame. Raises the errors of `Channel.receive`, EOFError after silence, and msgspec's."""
        data = await self._channel.receive(FRAME_BYTES)
        self._quiet = 0
        return msgspec.msgpack.decode(data, type=kinds)

    async def beat(self, news: Callable[[], msgspec.Struct] = Alive) -> None:
        """Until cancelled, or until the other end has been silent for `patience_s`: that closes the connection."""
        while self._quiet * BEAT_S < self.patience_s:
            self.send(news())
            self._quiet += 1
            await asyncio.sleep(BEAT_S)
        self.silent = True
        await self._channel.close()
