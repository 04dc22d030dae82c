"""Tickets for KV transfers, and the addresses of the two sides.

Frozen records that are sent through Ray and over sockets (msgpack). Nothing here does I/O.
"""

from dataclasses import dataclass

from msgspec import Struct

from diptych.events import TransferReport as TransferReport
from diptych.view import LinkReport as LinkReport
from kvtransfer.layout import KVLayout


@dataclass(frozen=True, slots=True)
class ShardAddress:
    """One rank's registered pool and its addresses.

    `transports` maps a backend's name to its opaque address bytes, in the owner's order of preference.
    """

    rank: int
    layout: KVLayout
    num_blocks: int
    transports: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True)
class HostIdentity:
    """Same boot id: one host. Same pid namespace too: one process may read the memory of the other."""

    boot_id: str
    pid_namespace: str
    pid: int


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """A worker as another worker sees it. `incarnation` is new for every start: a restart is a new peer."""

    worker: str
    incarnation: str
    host: str
    control_port: int
    shards: tuple[ShardAddress, ...]


def rank_name(incarnation: str, rank: int) -> str:
    """The name of one rank of one incarnation, for transports: this detects a reply from another rank."""
    return f"{incarnation}/{rank}"


@dataclass(frozen=True, slots=True)
class Piece:
    """The KV that a reader's rank takes from an owner's rank: absolute half-open ranges of KV heads and layers.

    `shard` is an index into the owner's `PeerAddress.shards`.
    """

    shard: int
    heads: tuple[int, int]
    layers: tuple[int, int]

    @property
    def num_cells(self) -> int:
        return (self.heads[1] - self.heads[0]) * (self.layers[1] - self.layers[0])


@dataclass(frozen=True, slots=True)
class TransferTicket:
    """A growing or finished prompt's KV, held for one reader under a lease.

    `blocks` are the owner's block ids of the whole prompt, in order; the same ids on every shard.
    Block i may be read once the ready watermark (see `Progress`) has passed i.
    """

    lease: str
    epoch: int
    owner: PeerAddress
    blocks: tuple[int, ...]
    num_tokens: int
    ttl_s: float  # a duration, because the clocks of two hosts may differ


@dataclass(frozen=True, slots=True)
class Progress:
    """The reply to a watch: how far the KV under a lease is computed.

    `digests[piece][i]` belongs to the piece in block `first_block + i` of the ticket (see `kvtransfer.digest`), and
    is empty where the owner makes none; `ready_blocks` is the watermark, counted in blocks; `finished` means that
    the watermark will not move again.
    """

    ready_blocks: int
    first_block: int
    digests: tuple[tuple[int, ...], ...]
    finished: bool
    ttl_s: float


class SpanQuery(Struct, frozen=True, gc=False):
    """Queries of some heads of one layer, from `position` on, to KV of earlier positions, from `first_position` on.

    `layer` and `heads`, a half-open range of query heads, count in the whole model. `query` is [tokens, heads,
    head_dim] and `state` [tokens, heads, head_dim + 2] in float32: maximum, sum and values of the keys before,
    which may be none: empty. `is_chunk`: of several tokens of a prompt, not of a decode.
    """

    layer: int
    heads: tuple[int, int]
    first_position: int
    position: int
    query: bytes
    state: bytes = b""
    is_chunk: bool = False
