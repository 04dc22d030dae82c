"""The interface of everything that records requests: metrics, history, SLO scores, load reports, logs, spans.
Has the smallest of them, too.

on_arrived ─> (on_placed ─> on_transfer, on_prefilled, on_first_token, on_moved | on_replaced)... ─> on_end

For speed, tokens are reported separately: `token_observers` is called once per attempt, and returns callbacks for the
outputs of its worker.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

from cluster.events import Accepted, Completed
from cluster.policy.slo_attainment import Ended, SLOScores
from diptych.history import RequestTrace
from kvtransfer.ticket import TransferReport
from workers.log_fields import log_fields
from workers.request import Request

logger = logging.getLogger(__name__)

# Gets the number of new tokens, and the seconds before each of them (none for the answer's first).
OnTokens = Callable[[int, Sequence[float]], None]


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """The end of a request: `completed` or an `error`. `trace` computes the trace on demand."""

    request: Request
    score: Ended
    error: BaseException | None
    completed: Completed | None
    num_tokens: int
    transfers: Sequence[TransferReport]
    trace: Callable[[], RequestTrace]


class RequestObserver:
    """Base class: override the events of interest. Methods must be fast, and must not wait or raise."""

    def on_arrived(self, request: Request, arrived_s: float, expected_tokens: int) -> None:
        """A request arrived. `expected_tokens`: of its answer."""

    def on_placed(self, request: Request, accepted: Accepted) -> None:
        """An attempt starts on its workers."""

    def on_prefilled(self, worker: str, prompt_tokens: int, cached_tokens: int) -> None:
        """This worker has computed an attempt's prompt."""

    def on_first_token(self, request: Request) -> None:
        """The answer's first token arrived; once per request."""

    def token_observers(self, request: Request, worker: str) -> Sequence[OnTokens]:
        """Callbacks for the tokens of an attempt on this worker; called at the attempt's start and its migrations."""
        return ()

    def on_transfer(self, reader: str, report: TransferReport) -> None:
        """KV has arrived at a worker."""

    def on_moved(self, request: Request, source: str, target: str) -> None:
        """A running decode has migrated."""

    def on_replaced(self, request: Request, worker: str, reason: str) -> None:
        """An attempt that had not begun was replaced by one on another worker."""

    def on_end(self, end: RequestEnd) -> None:
        """A request has ended; once per request."""

    def on_rejected(self, class_name: str, cause: str) -> None:
        """The frontend refused a request, for one of `cluster.policy.slo_attainment.REASONS`."""


class SLOObserver(RequestObserver):
    """Scores each finished request."""

    def __init__(self, scores: SLOScores) -> None:
        self._scores = scores

    def on_end(self, end: RequestEnd) -> None:
        self._scores.ended(end.score)

    def on_rejected(self, class_name: str, cause: str) -> None:
        self._scores.ended(Ended("refused", class_name, cause))


class RequestObservers(RequestObserver):
    """Calls several observers, in order: of each event those that override its method."""

    def __init__(self, observers: Iterable[RequestObserver]) -> None:
        self._all = tuple(observers)
        for name, ignored in vars(RequestObserver).items():
            if name.startswith("on_"):
                overriding = [each for each in self._all if getattr(type(each), name) is not ignored]
                setattr(self, name, partial(_call_each, [getattr(each, name) for each in overriding]))

    def token_observers(self, request: Request, worker: str) -> tuple[OnTokens, ...]:
        return tuple(chain.from_iterable(each.token_observers(request, worker) for each in self._all))


def _call_each(functions: Sequence[Callable[..., None]], *args: object) -> None:
    for function in functions:
        function(*args)


class RequestLog(RequestObserver):
    """Logs each request: its workers, and its end."""

    def __init__(self, gateway: str) -> None:
        self._gateway = gateway

    def on_placed(self, request: Request, accepted: Accepted) -> None:
        if not logger.isEnabledFor(logging.INFO):
            return
        prefill, decode = accepted.prefill_worker, accepted.decode_worker
        extra = log_fields(
            self._gateway, request.id, attempt=request.attempt, prefill_worker=prefill, decode_worker=decode
        )
        logger.info("request %s goes to %s and %s: %s", request.id, prefill, decode, accepted.reason, extra=extra)

    def on_end(self, end: RequestEnd) -> None:
        if not logger.isEnabledFor(logging.INFO):
            return
        request, tokens, trace = end.request, end.num_tokens, end.trace()
        ledger = trace.ledger
        extra = log_fields(
            self._gateway,
            request.id,
            outcome=end.score.outcome,
            prompt_tokens=len(request.prompt),
            cached_tokens=trace.cached_tokens,
            **{f"cached_{source}_tokens": count for source, count in trace.cached_from},
            output_tokens=tokens,
            class_name=request.slo.class_name,
            ttft_ms=ledger.ttft_ns / 1e6 if tokens else None,
            total_ms=ledger.total_ns / 1e6,
        )
        reason = f": {end.error}" if isinstance(end.error, Exception) else ""
        logger.info("request %s %s after %d tokens%s", request.id, end.score.outcome, tokens, reason, extra=extra)
