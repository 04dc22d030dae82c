"""Admission by SLO: a request is admitted if it meets its SLO and makes no other request miss its own, queued if it can
meet it later, and refused otherwise. Pure.

    predicted                                  answer
    TTFT and TPOT are met                      admitted
    TTFT is met, but not TPOT, or no slot      queued, if a decode ends in time for the first token; else refused
    TTFT is missed                             refused: waiting here does not speed up the prompts ahead
    the request has no SLO                     admitted, if room is left for requests with an SLO; else queued

With `on_miss: queue` a class has its requests queued instead of refused; these count as requests without an SLO from
then on. A request that has waited for its class's `patience_s` is admitted wherever the router places it; the worker
still grants no decode slot that would miss an SLO (`Engine.reserve`).

Source of the early refusal by prediction: Qin et al., Mooncake (arXiv 2407.00079), section 7.
"""

import math
from collections.abc import Callable

from cluster.policy.active_requests import ActiveRequests
from cluster.policy.admission.classes import Classes
from cluster.policy.admission.early_rejection import DECODE_RETRY_S, Admission
from cluster.policy.estimate.latency import LatencyPredictor
from cluster.policy.estimate.lengths import longest_answer
from cluster.policy.routing.picking import num_sequences
from cluster.policy.routing.router import Enqueue, Placement, PlacementQuery, Refusal
from cluster.spec import ClassSpec, GatewaySpec
from diptych.view import WorkerView
from workers.request import Request

TTFT_SHARE = 0.5  # of the tightest TTFT SLO that requests without an SLO may use
TPOT_SHARE = 0.75  # the same of the tightest TPOT SLO
MARGIN = 1.1  # the SLO must be met even if the first token takes this many times as long as predicted
TURNS = 2.0  # intervals of statistics after which another gateway has seen a free slot and sent a request
USUAL_TTFT_S = 2.0  # if no class has one, so that prompts wait in the gateway, in order, rather than on a worker
MIN_WAIT_S = 0.01


class SLOAdmission(Admission):
    needs_predictions = True
    queues = True

    def __init__(
        self,
        gateway: GatewaySpec,
        latency: LatencyPredictor,
        active: ActiveRequests,
        expected: Callable[[Request], int] = longest_answer,
        stats_s: float = 0.0,
    ) -> None:
        """`expected`: predicted tokens of an answer. `stats_s`: interval of workers' statistics."""
        self._turn_s = TURNS * stats_s
        self._expected = expected
        self._classes = Classes(gateway)
        self._latency = latency
        self._active = active
        classes = (*gateway.classes.values(), ClassSpec(gateway.slo.ttft_s, gateway.slo.tpot_s))
        tightest_s = min((each.ttft_s for each in classes if each.ttft_s is not None), default=USUAL_TTFT_S)
        self._room_s = TTFT_SHARE * tightest_s
        self._step_room_s = TPOT_SHARE * min((x.tpot_s for x in classes if x.tpot_s is not None), default=math.inf)

    def at_arrival(self, query: PlacementQuery, placement: Placement, decode: WorkerView) -> Refusal | Enqueue | None:
        assert placement.predicted_ttft_s is not None, "this policy needs predictions"
        known, slo = self._classes.of(query.request), query.request.slo
        ttft_s, need_s = placement.predicted_ttft_s, self._need_s(query, placement)
        is_claim = query.waited_s >= known.patience_s
        rejects = self._classes.rejects(query.request)
        late_s = 0.0 if slo.ttft_s is None else query.waited_s + MARGIN * ttft_s - slo.ttft_s
        if late_s > 0.0 and rejects:
            if not self._is_trial(query, placement):
                return Refusal(self._too_late(query, ttft_s, need_s), retry_after_s=late_s)
            late_s = 0.0
        if is_claim:
            return None
        if rejects and (reason := self._impossible(query, decode)):
            return Refusal(reason, DECODE_RETRY_S)
        is_best_effort = late_s > 0.0 or (slo.ttft_s is None and slo.tpot_s is None)
        most_s = self._step_room_s if is_best_effort else math.inf
        waits = self._no_slot(query, placement, decode, most_s) or self._others_turn(query, placement, decode, most_s)
        if waits is not None:
            reason, start_s, apart_s = waits
            first_s = query.waited_s + max(ttft_s, start_s + need_s)
            if rejects and not query.is_queued and slo.ttft_s is not None and first_s > slo.ttft_s:
                return Refusal(reason, retry_after_s=start_s)  # a queued request loses nothing by waiting longer
            return Enqueue(reason, start_s, need_s, apart_s)
        if is_best_effort:
            return self._behind_others(placement, need_s)
        return None

    @staticmethod
    def _too_late(query: PlacementQuery, ttft_s: float, need_s: float) -> str:
        took = f"after {query.waited_s:.3g} s of waiting " if query.waited_s >= MIN_WAIT_S else ""
        alone = ", even without prompts ahead" if need_s >= ttft_s else ""
        reason = f"{took}the first token would take {ttft_s:.3g} to {MARGIN * ttft_s:.3g} s{alone}"
        return f"{reason}, the SLO is {query.request.slo.ttft_s:.3g} s"

    def _need_s(self, query: PlacementQuery, placement: Placement) -> float:
        """Seconds from the start of the prompt to the first token."""
        if placement.prefill_s is not None:
            return placement.prefill_s
        new_tokens = max(1, query.request.num_tokens - placement.cached_tokens)
        return self._latency.prefill_seconds(_worker(query, placement.prefill), new_tokens, placement.cached_tokens)

    def _is_trial(self, query: PlacementQuery, placement: Placement) -> bool:
        """Whether the worker's costs are guesses, and it is idle or has run no step: only requests can improve them."""
        worker = _worker(query, placement.prefill)
        if self._latency.has_costs(worker):
            return False
        stats, sent = worker.stats, query.sent_to(worker.name)
        is_busy = stats.waiting or stats.running or stats.reserved or sent.sequences
        return not stats.steps or not (is_busy or self._active.prefilling(worker.name))

    def _no_slot(
        self, query: PlacementQuery, placement: Placement, decode: WorkerView, most_s: float, more: int = 0
    ) -> tuple[str, float, float] | None:
        """None if the worker can decode one more now. Else: why not, seconds until it can, and between further ends.

        `most_s`: longest step with it, whatever the SLOs there. `more`: as if so many more decoded there already.
        """
        if query.tokens_left == 1:
            return None
        ours = self._active.decoding(decode.name)
        batch = max(num_sequences(query, decode), len(ours)) + more
        if not batch:
            return None
        most = self._latency.engine(decode).max_running
        if batch >= most:
            return f"all {most} decode slots of {decode.name} are taken", *self._ends_s(query, decode, batch, 1)
        tpot_s = self._tpot_s(query, placement, decode, batch)
        alone_s = self._latency.step_seconds(decode, 1, query.request.num_tokens)
        slos = (query.request.slo.tpot_s, *(work.tpot_slo_s for work in ours))
        bound_s = min((each for each in slos if each is not None and each >= alone_s), default=math.inf)
        bound_s = min(bound_s, most_s)
        if tpot_s <= bound_s:
            return None
        too_many = math.ceil(batch * (tpot_s - bound_s) / max(tpot_s - alone_s, 1e-9))
        bound = "the limit for requests without an SLO is" if bound_s == most_s else "the SLO is"
        reason = f"each token on {decode.name} would take {tpot_s:.3g} s, {bound} {bound_s:.3g} s"
        return reason, *self._ends_s(query, decode, batch, min(batch, max(1, too_many)))

    def _others_turn(
        self, query: PlacementQuery, placement: Placement, decode: WorkerView, most_s: float
    ) -> tuple[str, float, float] | None:
        """As `_no_slot`, for the last free slot: a gateway with more than its share there leaves it to the others for a
        moment after a decode of its own has ended, because they see it in their next statistics.
        """
        ours, gateways = len(self._active.decoding(decode.name)), len(query.view.gateways)
        left_s = self._active.ended_s(decode.name) + self._turn_s - query.now_s
        if gateways < 2 or left_s <= 0.0 or (ours + 1) * gateways <= max(num_sequences(query, decode), ours) + 1:
            return None
        if self._no_slot(query, placement, decode, most_s, more=1) is None:
            return None
        return f"the last decode slot of {decode.name} is left to the other gateways", left_s, left_s

    def _impossible(self, query: PlacementQuery, decode: WorkerView) -> str:
        """Why waiting does not help: even an empty worker would miss the TPOT SLO. Empty: it helps."""
        slo_s = query.request.slo.tpot_s
        if slo_s is None or query.tokens_left == 1 or not self._latency.has_costs(decode):
            return ""
        alone_s = self._latency.step_seconds(decode, 1, query.request.num_tokens)
        if alone_s <= slo_s:
            return ""
        return f"each token would take {alone_s:.3g} s, even on an empty worker, the SLO is {slo_s:.3g} s"

    def _tpot_s(self, query: PlacementQuery, placement: Placement, decode: WorkerView, batch: int) -> float:
        """Seconds of a decode step with this request. Statistics lack the requests that were sent a moment ago."""
        predicted_s = placement.predicted_tpot_s or 0.0
        if batch <= num_sequences(query, decode):
            return predicted_s
        context = sum(work.num_tokens for work in self._active.decoding(decode.name))
        return max(predicted_s, self._latency.step_seconds(decode, batch + 1, context + query.request.num_tokens))

    def _ends_s(self, query: PlacementQuery, decode: WorkerView, batch: int, count: int) -> tuple[float, float]:
        """Seconds until `count` of the `batch` decodes there have ended, and between two ends.

        By the mean decode time, or by our answers' expected lengths if that is sooner: a wait in vain costs less than a
        needless refusal.
        """
        used_tokens = self._latency.kv_tokens(decode) - self._latency.free_tokens(decode)
        step_s = self._latency.step_seconds(decode, batch, used_tokens)
        mean_s = self._active.decode_seconds(query.now_s)
        if math.isinf(mean_s):  # none has ended yet
            mean_s = self._expected(query.request) * step_s
        apart_s = max(MIN_WAIT_S, mean_s / batch)
        ours = self._active.decoding(decode.name)
        ends_s = sorted(work.first_token_s + work.output_tokens * step_s - query.now_s for work in ours)
        expected_s = ends_s[count - 1] if count <= len(ends_s) else math.inf
        return max(MIN_WAIT_S, min(count * apart_s, expected_s)), apart_s

    def _behind_others(self, placement: Placement, need_s: float) -> Enqueue | None:
        """A request without an SLO must leave room on its prefill worker for prompts with one."""
        assert placement.predicted_ttft_s is not None
        queue_s = placement.predicted_ttft_s - need_s
        over_s = placement.predicted_ttft_s - self._room_s
        if queue_s <= 0.0 or over_s <= 0.0:
            return None
        reason = f"{placement.prefill} computes prompts for another {queue_s:.3g} s"
        return Enqueue(reason, max(MIN_WAIT_S, min(over_s, queue_s)), need_s)


def _worker(query: PlacementQuery, name: str) -> WorkerView:
    return next(worker for worker in query.view.workers if worker.name == name)
