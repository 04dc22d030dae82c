"""A gateway's history: recent requests, cluster events, worker loads and traffic. Pure."""

from dataclasses import dataclass, replace

from diptych.events import LatencyLedger


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """One request. Times are nanoseconds of the gateway's clock.

    After the ledger come `open_ns` in `phase`, up to the request's end, or to now while `outcome` is empty. `moves`:
    times and target workers of its decode's migrations. `cached_from`: the source of cached tokens (the device,
    "fetched" from another worker, or another tier) and their number.
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
    cached_from: tuple[tuple[str, int], ...] = ()

    @property
    def end_ns(self) -> int:
        return self.arrived_ns + self.ledger.total_ns + self.open_ns


@dataclass(frozen=True, slots=True)
class ClusterEvent:
    """A flip, a migration, a requeued prompt, a refusal, the loss of a worker, ..."""

    at_ns: int
    kind: str  # "flip", "move", "requeue", "refused", "lost", "left", "back" or "crash loop"
    worker: str
    text: str
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Load:
    """The load of one worker at one moment."""

    at_ns: int
    worker: str
    running: int
    waiting: int
    queued_tokens: int
    used_blocks: int


@dataclass(slots=True)
class Traffic:
    """The traffic of one worker since this gateway started, and its last change, `changed_ns` ago.

    Prompts count at the worker that computed them, transfers at their reader. `prompt_tokens` includes cached ones.
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
    """Traffic by worker, and the latest events with their ages in seconds."""

    uptime_s: float = 0.0
    traffic: tuple[tuple[str, Traffic], ...] = ()
    events: tuple[tuple[float, ClusterEvent], ...] = ()


@dataclass(frozen=True, slots=True)
class Window:
    """The history of a time window. Traces are in the order of their ends, running requests last.

    `whole_ns`: the history is complete from this time on; 0: completely.
    """

    traces: tuple[RequestTrace, ...] = ()
    events: tuple[ClusterEvent, ...] = ()
    loads: tuple[Load, ...] = ()
    whole_ns: int = 0

    def shifted(self, offset_ns: int) -> "Window":
        """The window by another clock, which is `offset_ns` ahead."""
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
