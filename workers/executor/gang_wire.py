"""The messages between the leader of a gang and its other ranks, over one connection per rank.

    leader calls rank   `METHODS` but the last: open first, after all ranks have joined; several `execute` in flight,
                        computed in the order in which they are sent; others in any order
    rank calls leader   ask_lender -> state, of a query to blocks that this worker borrows
    rank -> leader      Settled, Moved, Alive          leader -> rank   ForgetBlocks, Alive

Knows no rank and no plan. Connection, handshake and frames are `kvtransfer.rpc`'s.
"""

import msgspec

import kvtransfer.errors
import workers.errors
from kvtransfer.rpc.connection import RpcProtocol
from kvtransfer.rpc.methods import Methods, replies, request_types
from kvtransfer.ticket import LinkReport, PeerAddress, ShardAddress
from kvtransfer.transport import PullOrder, ReadStats
from workers.engine.executor import SpanQuery
from workers.engine.kv_event_log import Tier
from workers.engine.step import RemoteKV, StepPlan, StepResult
from workers.request import Adapter, Grammar

METHODS: Methods = {
    "open": ({}, ShardAddress),
    "execute": ({"plan": StepPlan}, StepResult),
    "prepare": ({"grammar": Grammar}, None),
    "load_adapter": ({"adapter": Adapter, "drop": tuple[str, ...]}, None),
    "connect": ({"peer": PeerAddress, "measures": bool}, LinkReport),
    "pull": ({"number": int, "order": PullOrder}, ReadStats),  # `number`: for `Settled`
    "forget": ({"incarnation": str}, None),
    # To and from the rank's store of this tier, and its host memory. The answer: whether it is there, or has arrived.
    "write_block": ({"tier": Tier, "block_hash": bytes, "prefix": int | None, "block": int}, bool),
    "read_block": ({"tier": Tier, "block_hash": bytes, "block": int, "timeout_s": float}, bool),
    "attend": ({"blocks": tuple[int, ...], "query": SpanQuery}, bytes),
    "close": ({}, None),
    "ask_lender": ({"span": RemoteKV, "query": SpanQuery}, bytes),  # see `RemoteAttend`
}
CALLS = request_types(METHODS)


class ForgetBlocks(msgspec.Struct, frozen=True, tag=True):
    tier: Tier
    block_hashes: tuple[bytes, ...]


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
    calls=replies(CALLS, METHODS),
    messages=(Settled, Moved, Alive, ForgetBlocks),
    errors=(kvtransfer.errors, workers.errors),
    other_error=workers.errors.WorkerError,
    lost_error=workers.errors.RankLost,
    max_frame_bytes=256 << 20,  # digests or log probabilities of a long prompt
    max_calls=1 << 16,
)
