"""The messages between the leader of a gang and its other ranks, over one connection per rank.

    leader calls rank   Open -> its shard              first, after all ranks have joined
                        Execute -> its step            several in flight, computed in the order in which they are sent
                        Connect -> link report         Pull -> read statistics         in any order
                        WriteBlock, ReadBlock -> whether it is there
                        AttendBlocks -> state, of a query to blocks that this worker lends
                        Forget, Prepare, LoadAdapter, Close -> nothing
    rank calls leader   AskLender -> state, of a query to blocks that this worker borrows
    rank -> leader      Settled, Moved, Alive          leader -> rank   ForgetBlocks, Alive

Knows no rank and no plan. Connection, handshake and frames are `kvtransfer.rpc`'s.
"""

import msgspec

import kvtransfer.errors
import workers.errors
from kvtransfer.rpc.connection import RpcProtocol
from kvtransfer.ticket import LinkReport, PeerAddress, ShardAddress
from kvtransfer.transport import PullOrder, ReadStats
from workers.engine.executor import SpanQuery
from workers.engine.kv_event_log import Tier
from workers.engine.step import RemoteKV, StepPlan, StepResult
from workers.request import Adapter, Grammar


class Open(msgspec.Struct, frozen=True, tag=True):
    pass


class Execute(msgspec.Struct, frozen=True, tag=True):
    plan: StepPlan


class Prepare(msgspec.Struct, frozen=True, tag=True):
    grammar: Grammar


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    adapter: Adapter
    drop: tuple[str, ...]


class Connect(msgspec.Struct, frozen=True, tag=True):
    peer: PeerAddress
    measures: bool


class Pull(msgspec.Struct, frozen=True, tag=True):
    read: int  # its number, for `Settled`
    order: PullOrder


class Forget(msgspec.Struct, frozen=True, tag=True):
    incarnation: str


class WriteBlock(msgspec.Struct, frozen=True, tag=True):
    """To the rank's store of this tier, from its host memory. The answer: whether it is there."""

    tier: Tier
    block_hash: bytes = msgspec.field(name="name")
    prefix: int | None
    block: int


class ReadBlock(msgspec.Struct, frozen=True, tag=True):
    """From the rank's store of this tier. The answer, in time: whether it has arrived."""

    tier: Tier
    block_hash: bytes = msgspec.field(name="name")
    block: int
    timeout_s: float


class AttendBlocks(msgspec.Struct, frozen=True, tag=True):
    """See `Rank.attend`."""

    blocks: tuple[int, ...]
    query: SpanQuery


class AskLender(msgspec.Struct, frozen=True, tag=True):
    """See `RemoteAttend`."""

    span: RemoteKV
    query: SpanQuery


class ForgetBlocks(msgspec.Struct, frozen=True, tag=True):
    tier: Tier
    block_hashes: tuple[bytes, ...] = msgspec.field(name="names")


class Close(msgspec.Struct, frozen=True, tag=True):
    pass


class Settled(msgspec.Struct, frozen=True, tag=True):
    """No more bytes of this read can arrive."""

    read: int


class Moved(msgspec.Struct, frozen=True, tag=True):
    """The rank's pool has a new address, because one of its transports was rebuilt."""

    shard: ShardAddress


class Alive(msgspec.Struct, frozen=True, tag=True):
    ticks: int = 0  # of a rank: see `Rank.ticks`


GANG_PROTOCOL = RpcProtocol(
    name="gang",
    calls={
        Open: ShardAddress,
        Execute: StepResult,
        Prepare: None,
        LoadAdapter: None,
        Connect: LinkReport,
        Pull: ReadStats,
        Forget: None,
        WriteBlock: bool,
        ReadBlock: bool,
        AttendBlocks: bytes,
        AskLender: bytes,
        Close: None,
    },
    messages=(Settled, Moved, Alive, ForgetBlocks),
    errors=(kvtransfer.errors, workers.errors),
    other_error=workers.errors.WorkerError,
    lost_error=workers.errors.RankLost,
    max_frame_bytes=256 << 20,  # digests or log probabilities of a long prompt
    max_calls=1 << 16,
)
