"""How a worker is doing, as one immutable record; cheap enough to travel with every bundle."""

from dataclasses import dataclass

from msgspec import Struct

from kvtransfer.ticket import PeerAddress


class WorkerStats(Struct, frozen=True, gc=False):
    """`queued_tokens`: prompt tokens still to compute. `reserved`: decode slots promised whose KV is not here yet.

    free + used (sequences, leases and quarantine together) = total blocks; `cached_blocks` is the part of `free`
    that still holds a reusable prefix.
    """

    queued_tokens: int = 0
    waiting: int = 0
    running: int = 0
    reserved: int = 0
    leases: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    quarantined_blocks: int = 0
    total_blocks: int = 0
    steps: int = 0
    step_s: float = 0.0  # moving average of the latest steps
    preemptions: int = 0
    swaps: int = 0  # preemptions that saved the KV in host memory; the others compute it again
    swapped_blocks: int = 0
    expired_leases: int = 0
    bubble_share: float = 0.0  # idle share of the stages' time while anything was in flight, lately
    cache_number: int = 0  # the newest event of its cache; see `CacheNews`


class NameChanges(Struct, frozen=True, gc=False):
    """Names (see `workers.engine.cache_log`) that came to one tier of a cache, and those that went."""

    added: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()


class CacheNews(Struct, frozen=True, gc=False):
    """How a cache changed behind event `first`, up to event `last`: take the removed names away, then add the others.

    `whole`: forget what was known before, this begins anew. Names that came by events up to `reach` have been told;
    where that is not `last` yet, there are more to ask for. Prefixes of multiples of `grain` tokens have names here.
    """

    first: int
    last: int
    reach: int
    grain: int
    whole: bool = False
    device: NameChanges = NameChanges()
    host: NameChanges = NameChanges()


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Who a worker is, told once it is ready. `capacity_tokens`: the longest sequence it can hold."""

    name: str
    pool: str
    node: str
    pid: int
    peer: PeerAddress
    model: str
    context_length: int
    vocab_size: int
    capacity_tokens: int
    memory_bytes: int
    transports: tuple[str, ...]
    tokenizer: str = ""  # its id
    notes: tuple[str, ...] = ()  # such as why a backend is not there

    @property
    def incarnation(self) -> str:
        return self.peer.incarnation
