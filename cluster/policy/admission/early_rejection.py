"""Whom to turn away when SLOs could not be met. Qin et al., Mooncake (arXiv 2407.00079), section 7.

A pool's load is the predicted time over its SLO: to the first token for prefill, between tokens for decode. A request
whose load would pass 1 on either side is refused. The policies differ in when they look at the decode side: behind the
prefill, which wastes the prefills of those that are refused then; at arrival, which is too early by one prefill and
lets the two pools swing against each other; at arrival, but as it will be when this prefill ends.

A request without an SLO, where the gateway has none either, is never refused.
"""

from cluster.policy.active_requests import ActiveRequests
from cluster.policy.estimate.latency import LatencyPredictor
from cluster.policy.routing.router import Ask, Later, Placement, Refusal
from cluster.spec import Role
from diptych.view import WorkerView
from workers.request import SLO

DECODE_RETRY_S = 1.0


class Admission:
    """Refuses nothing; the base of the others."""

    looks = False  # whether it needs predictions
    looks_behind_prefill = False
    queues = False  # whether it may answer `Later`

    def at_arrival(self, ask: Ask, placement: Placement, decode: WorkerView) -> Refusal | Later | None:
        """Judge a request that would be placed so, with what is expected of it, and decode on `decode`."""
        return None

    def behind_prefill(self, ask: Ask, decode: WorkerView) -> Refusal | None:
        """Judge it again, its prompt being computed."""
        return None


class Late(Admission):
    """The prefill side at arrival, the decode side behind the prefill: what is refused then was computed in vain."""

    looks = True
    looks_behind_prefill = True

    def __init__(self, default: SLO, latency: LatencyPredictor, active: ActiveRequests) -> None:
        self._default = default
        self._latency = latency
        self._active = active

    def at_arrival(self, ask: Ask, placement: Placement, decode: WorkerView) -> Refusal | None:
        ttft_s = _ttft_s(placement)
        slo_s = ask.request.slo.ttft_s or self._default.ttft_s
        if slo_s is None or ttft_s <= slo_s:
            return None
        reason = f"the first token would take {ttft_s:.3g} s, the SLO is {slo_s:.3g} s"
        return Refusal(reason, retry_after_s=ttft_s - slo_s)

    def behind_prefill(self, ask: Ask, decode: WorkerView) -> Refusal | None:
        return self._judge_decode(ask, self._latency.tpot_now_seconds(ask, decode))

    def _judge_decode(self, ask: Ask, tpot_s: float) -> Refusal | None:
        slo_s = ask.request.slo.tpot_s or self._default.tpot_s
        if slo_s is None or ask.tokens_left == 1 or tpot_s <= slo_s:
            return None
        reason = f"each token would take {tpot_s:.3g} s, the SLO is {slo_s:.3g} s"
        return Refusal(reason, retry_after_s=DECODE_RETRY_S)


class Early(Late):
    """Both sides at arrival, as they are then."""

    looks_behind_prefill = False

    def at_arrival(self, ask: Ask, placement: Placement, decode: WorkerView) -> Refusal | None:
        late = super().at_arrival(ask, placement, decode)
        return late or self._judge_decode(ask, self._tpot_seconds(ask, _ttft_s(placement), decode))

    def _tpot_seconds(self, ask: Ask, ttft_s: float, decode: WorkerView) -> float:
        return self._latency.tpot_now_seconds(ask, decode)


class Predictive(Early):
    """Both sides at arrival, the decode side as it will be when this prompt is done.

    Every request is taken to decode equally long: as long as those before it, on average; none ends before one has.
    What other gateways have under way is taken to stay as it is. The load is the mean over the decode workers.
    """

    def _tpot_seconds(self, ask: Ask, ttft_s: float, decode: WorkerView) -> float:
        now_s, then_s = ask.now_s, ask.now_s + ttft_s
        decode_s = self._active.decode_seconds(now_s)
        batch, context_tokens, ours = 1, ask.request.num_tokens, 0
        for work in self._active:
            if not work.decodes:
                continue
            ours += 1
            begins_s = work.first_token_s if work.prefilled_s is not None else max(now_s, work.first_token_s)
            if begins_s <= then_s < begins_s + decode_s:
                batch += 1
                context_tokens += work.prompt_tokens + work.output_tokens // 2
        pool = ask.view.ready(Role.DECODE, Role.MIXED) or (decode,)
        seen = sum(w.stats.running + w.stats.reserved + ask.sent_to(w.name).sequences for w in pool)
        others = max(0, seen - ours) / batch  # for each of ours
        share = (1 + others) / len(pool)
        return self._latency.step_seconds(decode, max(1.0, batch * share), context_tokens * share)


def _ttft_s(placement: Placement) -> float:
    assert placement.predicted_ttft_s is not None, "an admission that looks has predictions"
    return placement.predicted_ttft_s
