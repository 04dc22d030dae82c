"""What the leader of a gang and its other ranks send each other, over one connection for each rank.

    leader calls rank   Open -> its shard              first, once all ranks have joined
                        Execute -> its step            many at once, computed in the order in which they were sent
                        Connect -> link report         Pull -> read statistics         in any order
                        Forget, Close -> nothing
    rank -> leader      Settled, Moved, Alive          leader -> rank   Alive

Knows no rank and no plan. Connection, handshake and frames are `kvtransfer.rpc`'s.
"""

import msgspec

import kvtransfer.errors
import workers.errors
from kvtransfer.rpc.connection import RpcProtocol
from kvtransfer.ticket import LinkReport, PeerAddress, ShardAddress
from kvtransfer.transport import PullOrder, ReadStats
from workers.engine.step import StepPlan
from workers.executor.rank import RankStep


class Open(msgspec.Struct, frozen=True, tag=True):
    pass


class Execute(msgspec.Struct, frozen=True, tag=True):
    plan: StepPlan


class Connect(msgspec.Struct, frozen=True, tag=True):
    peer: PeerAddress


class Pull(msgspec.Struct, frozen=True, tag=True):
    read: int  # its number, for `Settled`
    order: PullOrder


class Forget(msgspec.Struct, frozen=True, tag=True):
    incarnation: str


class Close(msgspec.Struct, frozen=True, tag=True):
    pass


class Settled(msgspec.Struct, frozen=True, tag=True):
    """No byte of this read can land any more."""

    read: int


class Moved(msgspec.Struct, frozen=True, tag=True):
    """The rank's pool has a new address: one of its transports was rebuilt."""

    shard: ShardAddress


class Alive(msgspec.Struct, frozen=True, tag=True):
    ticks: int = 0  # of a rank: see `Rank.ticks`


GANG_PROTOCOL = RpcProtocol(
    name="gang",
    calls={Open: ShardAddress, Execute: RankStep, Connect: LinkReport, Pull: ReadStats, Forget: None, Close: None},
    messages=(Settled, Moved, Alive),
    errors=(kvtransfer.errors, workers.errors),
    other_error=workers.errors.WorkerError,
    lost_error=workers.errors.RankLost,
    max_frame_bytes=256 << 20,  # digests of a long prompt, log probabilities of a whole one
    max_calls=1 << 16,
)
