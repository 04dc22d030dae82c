"""A worker's identity and statistics, as immutable records."""

from dataclasses import dataclass

from diptych.view import NO_PULLS as NO_PULLS
from diptych.view import BorrowStats as BorrowStats
from diptych.view import Pulls as Pulls
from diptych.view import TierStats as TierStats
from diptych.view import WorkerStats as WorkerStats
from kvtransfer.ticket import PeerAddress


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker's identity, known once it is ready. `capacity_tokens`: the longest sequence that it can hold."""

    name: str
    node: str
    pid: int
    peer: PeerAddress
    context_length: int
    vocab_size: int
    capacity_tokens: int
    memory_bytes: int
    tokenizer: str = ""  # its id
    default_sampling: tuple[tuple[str, float], ...] = ()  # (name, value) pairs that the model's authors recommend
    disk_byte_s: float = 0.0  # seconds to read a byte of KV from its disk; 0: it has none
    remote_byte_s: float = 0.0  # the same of its remote server
    remote_store: str = ""  # equal for workers that read the same blocks from the same remote server

    @property
    def incarnation(self) -> str:
        return self.peer.incarnation
