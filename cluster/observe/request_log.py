"""Logs each request: its workers, and its end."""

import logging

from cluster.events import Accepted
from cluster.observe.request_observer import RequestEnd, RequestObserver
from workers.log_fields import log_fields
from workers.request import Request

logger = logging.getLogger(__name__)


class RequestLog(RequestObserver):
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
