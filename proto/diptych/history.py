"""What a gateway remembers of the last while: how requests went, and what happened beside them. Pure."""

from dataclasses import dataclass, replace

from diptych.events import LatencyLedger


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """How one request went. Nanoseconds of the gateway's clock.

    The ledger goes to its last lap; behind it come `open_ns` in `phase` (as an attempt names it), up to the end or,
    where `outcome` is empty, up to now. `moves`: when its decode moved, and to whom.
    """

    request_id: str
    class_name: str
    outcome: str
    detail: str
    arrived_ns: int
    ledger: LatencyLedger
    phase: str
    open_ns: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    attempts: int
    prefill_worker: str
    decode_worker: str
    moves: tuple[tuple[int, str], ...] = ()
    transfer_bytes: int = 0
    transfer_ns: int = 0

    @property
    def end_ns(self) -> int:
        return self.arrived_ns + self.ledger.total_ns + self.open_ns


@dataclass(frozen=True, slots=True)
class ClusterEvent:
    """Something beside the ordinary: a flip, a move, a prompt placed anew, a refusal, a worker that is gone."""

    at_ns: int
    kind: str  # "flip", "move", "anew", "refused", "lost", "left", "back" or "crash loop"
    worker: str
    text: str
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Load:
    """One worker at one moment."""

    at_ns: int
    worker: str
    running: int
    waiting: int
    queued_tokens: int
    used_blocks: int


@dataclass(slots=True)
class Traffic:
    """What went through one worker since this gateway began, and what changed there last, `changed_ns` ago.

    Prompts are counted where they were computed, with the tokens of them that were cached; transfers at their reader.
    """

    prompts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    transfers: int = 0
    transfer_bytes: int = 0
    transfer_s: float = 0.0
    change: str = ""
    changed_ns: int = 0


@dataclass(frozen=True, slots=True)
class Recent:
    """For who looks every second: counters by worker, and the latest happenings with how many seconds ago they were."""

    uptime_s: float = 0.0
    traffic: tuple[tuple[str, Traffic], ...] = ()
    events: tuple[tuple[float, ClusterEvent], ...] = ()


@dataclass(frozen=True, slots=True)
class Window:
    """What is known of a stretch of time; trails by their end, those under way last.

    `whole_ns`: what was up to then may be missing, and nothing behind it; 0: nothing at all is missing.
    """

    traces: tuple[RequestTrace, ...] = ()
    events: tuple[ClusterEvent, ...] = ()
    loads: tuple[Load, ...] = ()
    whole_ns: int = 0

    def shifted(self, offset_ns: int) -> "Window":
        """The same by another clock, which is `offset_ns` ahead."""
        return Window(
            tuple(
                replace(
                    each,
                    arrived_ns=each.arrived_ns + offset_ns,
                    moves=tuple((at_ns + offset_ns, worker) for at_ns, worker in each.moves),
                )
                for each in self.traces
            ),
            tuple(replace(each, at_ns=each.at_ns + offset_ns) for each in self.events),
            tuple(replace(each, at_ns=each.at_ns + offset_ns) for each in self.loads),
            self.whole_ns and self.whole_ns + offset_ns,
        )
