"""Mooncake's predictive early rejection (Qin et al., arXiv 2407.00079, section 7), and the base of admission policies.

A request is refused at arrival when its predicted TTFT, or its predicted TPOT at the time its prefill ends, exceeds the
SLO. Requests without an SLO, where the gateway has none either, are never refused.
"""

from cluster.policy.active_requests import ActiveRequests
from cluster.policy.estimate.latency import LatencyPredictor
from cluster.policy.routing.router import Enqueue, Placement, PlacementQuery, Refusal
from cluster.spec import Role
from diptych.view import WorkerView
from workers.request import SLO

DECODE_RETRY_S = 1.0


class Admission:
    """Accepts every request; the base of the others."""

    needs_predictions = False
    queues = False  # whether it may answer `Enqueue`

    def at_arrival(self, query: PlacementQuery, placement: Placement, decode: WorkerView) -> Refusal | Enqueue | None:
        """Judge a request with its proposed placement and predictions; `decode` decodes it. None: admitted."""
        return None


class Predictive(Admission):
    """Refuses by the predicted TTFT, and by the TPOT predicted for the end of the prefill.

    Every request is assumed to decode for the mean time of earlier ones, and forever until one has ended. Running
    requests of other gateways are assumed to stay. The decode load is the mean over the decode workers.
    """

    needs_predictions = True

    def __init__(self, default: SLO, latency: LatencyPredictor, active: ActiveRequests) -> None:
        self._default = default
        self._latency = latency
        self._active = active

    def at_arrival(self, query: PlacementQuery, placement: Placement, decode: WorkerView) -> Refusal | None:
        assert placement.predicted_ttft_s is not None, "this admission has predictions"
        ttft_s, slo = placement.predicted_ttft_s, query.request.slo
        ttft_slo_s = slo.ttft_s or self._default.ttft_s
        if ttft_slo_s is not None and ttft_s > ttft_slo_s:
            reason = f"the first token would take {ttft_s:.3g} s, the SLO is {ttft_slo_s:.3g} s"
            return Refusal(reason, retry_after_s=ttft_s - ttft_slo_s)
        tpot_slo_s = slo.tpot_s or self._default.tpot_s
        if tpot_slo_s is None or query.tokens_left == 1:
            return None
        tpot_s = self._tpot_seconds(query, ttft_s, decode)
        if tpot_s <= tpot_slo_s:
            return None
        reason = f"each token would take {tpot_s:.3g} s, the SLO is {tpot_slo_s:.3g} s"
        return Refusal(reason, retry_after_s=DECODE_RETRY_S)

    def _tpot_seconds(self, query: PlacementQuery, ttft_s: float, decode: WorkerView) -> float:
        now_s, then_s = query.now_s, query.now_s + ttft_s
        decode_s = self._active.decode_seconds(now_s)
        batch, context_tokens, ours = 1, query.request.num_tokens, 0
        for work in self._active:
            if not work.decodes:
                continue
            ours += 1
            begins_s = work.first_token_s if work.prefilled_s is not None else max(now_s, work.first_token_s)
            if begins_s <= then_s < begins_s + decode_s:
                batch += 1
                context_tokens += work.prompt_tokens + work.output_tokens // 2
        pool = query.view.ready(Role.DECODE, Role.MIXED) or (decode,)
        running = sum(w.stats.running + w.stats.reserved + query.sent_to(w.name).sequences for w in pool)
        others = max(0, running - ours) / batch  # for each of ours
        share = (1 + others) / len(pool)
        return self._latency.step_seconds(decode, max(1.0, batch * share), context_tokens * share)
