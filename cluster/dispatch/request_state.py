"""The state of one running request. Only `RequestRunner` sees it (tests/test_imports.py)."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cluster.dispatch.attempt import Attempt, Phase
from cluster.dispatch.placement import PlacementInput
from cluster.events import Completed, Event
from cluster.observe.history import MAX_TEXT_CHARS
from cluster.observe.ledger import Stopwatch, now_ns
from cluster.observe.request_observer import OnTokens
from cluster.observe.request_timing import RequestTiming
from cluster.policy.routing.router import Placement
from diptych.history import RequestTrace
from kvtransfer.ticket import TransferReport
from workers.request import FinishReason, Request


@dataclass(frozen=True, slots=True)
class Replacement:
    """The next attempt, placed before the current one began. The policy has recorded it."""

    request: Request
    placement: Placement


@dataclass(slots=True)
class RequestState:
    """`request`: of the latest attempt. `sent`: the answer's tokens that the client has."""

    request: Request
    watch: Stopwatch
    emit: Callable[[Event], None]
    timing: RequestTiming
    is_stopped: bool = False  # the caller wants no more tokens
    now_s: Callable[[], float] = field(default_factory=lambda: asyncio.get_running_loop().time)
    sent: list[int] = field(default_factory=list)
    avoid: frozenset[str] = frozenset()  # workers that failed or refused this request
    phase: Phase = Phase.QUEUEING  # between attempts
    placement: Placement | None = None  # the latest
    attempt: Attempt | None = None  # the running one
    token_observers: Sequence[OnTokens] = ()  # of the running attempt
    replacement: Replacement | None = None  # of the running attempt, until the next one begins
    running: "asyncio.Task[FinishReason] | None" = None  # of the running attempt
    num_uncounted: int = 0  # attempts that were replaced or continued elsewhere, without a failure
    no_memory_s: float | None = None  # since when other workers have lent too little for the next token
    moves: list[tuple[int, str]] = field(default_factory=list)  # migrations: time in ns, target worker
    # Of finished attempts:
    transfers: list[TransferReport] = field(default_factory=list)
    cached_tokens: int = 0
    cached_from: tuple[tuple[str, int], ...] = ()  # (source, tokens)
    decode_workers: tuple[str, ...] = ()

    @property
    def num_attempts(self) -> int:
        """Attempts, without those that ended without a failure."""
        return self.request.attempt + 1 - self.num_uncounted

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        return len(self.request.prompt) + len(self.sent)

    def interrupt(self) -> None:
        """Cancel the running attempt, unless it ends in this iteration of the event loop."""
        if self.running is not None:
            asyncio.get_running_loop().call_soon(self.running.cancel)

    def placement_input(self) -> PlacementInput:
        return PlacementInput(self.request, self.timing.arrived_s, self.avoid)

    def next_request(self, *, fresh: bool = False) -> Request:
        """The next attempt's request, which continues after the tokens that the client has."""
        return self.request.retry(tuple(self.sent), fresh=fresh)

    def retry(self, *, fresh: bool = False) -> None:
        self.request = self.next_request(fresh=fresh)
        self.phase = Phase.RECOVERY

    def end_attempt(self, attempt: Attempt) -> None:
        """Take over the finished attempt's part of the trace and totals."""
        self.phase, self.attempt = attempt.phase, None
        self.decode_workers = tuple(attempt.decode_workers)
        self.transfers += attempt.transfers
        if attempt.cached_tokens > self.cached_tokens:
            self.cached_tokens, self.cached_from = attempt.cached_tokens, attempt.cached_from

    def completed(self, finish: FinishReason) -> Completed:
        return Completed(
            finish=finish,
            prompt_tokens=len(self.request.prompt),
            completion_tokens=len(self.sent),
            cached_tokens=self.cached_tokens,
            attempts=self.num_attempts,
            ledger=self.watch.ledger(),
            transfers=tuple(self.transfers),
            decode_workers=self.decode_workers,
        )

    def trace(self, outcome: str = "", error: BaseException | None = None) -> RequestTrace:
        """The trace so far; the final one if there is an outcome."""
        if self.attempt is not None:
            self.attempt.decode.report()
        attempt, request, ledger = self.attempt, self.request, self.watch.ledger()
        transfers = [*self.transfers, *(() if attempt is None else attempt.transfers)]
        decode_workers = self.decode_workers if attempt is None else tuple(attempt.decode_workers)
        arrived_ns = self.watch.started_ns
        return RequestTrace(
            request_id=request.id,
            class_name=request.slo.class_name,
            outcome=outcome,
            detail="" if error is None else str(error)[:MAX_TEXT_CHARS],
            arrived_ns=arrived_ns,
            ledger=ledger,
            phase=(self.phase if attempt is None else attempt.phase).value,
            open_ns=0 if outcome == "completed" else max(0, now_ns() - arrived_ns - ledger.total_ns),
            prompt_tokens=len(request.prompt),
            cached_tokens=self.cached_tokens if attempt is None else attempt.cached_tokens,
            output_tokens=len(self.sent),
            attempts=self.num_attempts,
            prefill_worker=self.placement.prefill if self.placement is not None else "",
            decode_worker=decode_workers[0] if decode_workers else "",
            moves=tuple(self.moves),
            transfer_bytes=sum(report.num_bytes for report in transfers),
            transfer_ns=round(1e9 * sum(report.elapsed_s for report in transfers)),
            cached_from=self.cached_from if attempt is None else attempt.cached_from,
        )
