"""How a worker is doing, as one immutable record; cheap enough to travel with every bundle."""

from dataclasses import dataclass

from msgspec import Struct, structs

from kvtransfer.ticket import PeerAddress, TransferReport


class Pulls(Struct, frozen=True, gc=False):
    """KV that this worker fetched from others, since it began. Made anew when a pull ends: statistics only name it.

    `failed` ended without all of the KV, `corrupt` of them by a digest; the rest speaks of those that arrived.
    """

    arrived: int = 0
    failed: int = 0
    corrupt: int = 0
    num_bytes: int = 0
    num_descriptors: int = 0
    seconds: float = 0.0

    def arrival(self, report: TransferReport) -> "Pulls":
        return structs.replace(
            self,
            arrived=self.arrived + 1,
            num_bytes=self.num_bytes + report.num_bytes,
            num_descriptors=self.num_descriptors + report.num_descriptors,
            seconds=self.seconds + report.elapsed_s,
        )

    def failure(self, *, corrupt: bool) -> "Pulls":
        return structs.replace(self, failed=self.failed + 1, corrupt=self.corrupt + corrupt)


NO_PULLS = Pulls()


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
    sought_tokens: int = 0  # of prompts that were given blocks, and how many of them a cache had
    found_tokens: int = 0
    pulls: Pulls = NO_PULLS


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
