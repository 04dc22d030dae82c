"""Admission by SLO: a request gets in when it will meet its SLO and makes nobody miss theirs, waits when it would meet
it later, and is refused when it cannot. Pure.

    predicted                                   answer
    TTFT and TPOT are met                       in
    TTFT is met, TPOT or a slot  is missing     later, if a decode ends in time for the first token; else refused
    TTFT is missed                              refused: waiting here does not speed up the prompts ahead
    it has no SLO                               in, where room is left for those who come with one; else later

What a class says of `on_miss` turns a refusal into a place at the end of its queue; from then on it is one without an
SLO. A request that has waited for its class's patience gets in wherever the router puts it: the worker itself
still gives no decode slot away that would miss an SLO (`Engine.reserve`).

Source of the early refusal by prediction: Qin et al., Mooncake (arXiv 2407.00079), section 7.
"""

import math
from collections.abc import Callable

from cluster.policy.active_requests import ActiveRequests
from cluster.policy.admission.classes import Classes
from cluster.policy.admission.early_rejection import DECODE_RETRY_S, Admission
from cluster.policy.estimate.latency import LatencyPredictor
from cluster.policy.estimate.lengths import asked_length
from cluster.policy.routing.picking import num_sequences
from cluster.policy.routing.router import Ask, Later, Placement, Refusal
from cluster.spec import ClassSpec, GatewaySpec
from diptych.view import WorkerView
from workers.request import Request

TTFT_SHARE = 0.5  # of the tightest TTFT SLO may be taken by prompts without an SLO; the rest is for others
TPOT_SHARE = 0.75  # of the tightest TPOT SLO, likewise
DOUBT = 1.1  # what is predicted to take a second may take a tenth more, and the SLO must be met then, too
USUAL_TTFT_S = 2.0  # where no class has one: prompts wait in the gateway, in order, rather than on a worker
LEAST_WAIT_S = 0.01


class SLOAdmission(Admission):
    needs_predictions = True
    queues = True

    def __init__(
        self,
        gateway: GatewaySpec,
        latency: LatencyPredictor,
        active: ActiveRequests,
        expected: Callable[[Request], int] = asked_length,
    ) -> None:
        """`expected`: how many tokens an answer will have."""
        self._expected = expected
        self._classes = Classes(gateway)
        self._latency = latency
        self._active = active
        classes = (*gateway.classes.values(), ClassSpec(gateway.slo.ttft_s, gateway.slo.tpot_s))
        tightest_s = min((each.ttft_s for each in classes if each.ttft_s is not None), default=USUAL_TTFT_S)
        self._room_s = TTFT_SHARE * tightest_s
        self._step_room_s = TPOT_SHARE * min((x.tpot_s for x in classes if x.tpot_s is not None), default=math.inf)

    def at_arrival(self, ask: Ask, placement: Placement, decode: WorkerView) -> Refusal | Later | None:
        assert placement.predicted_ttft_s is not None, "this admission has predictions"
        known, slo = self._classes.of(ask.request), ask.request.slo
        ttft_s, need_s = placement.predicted_ttft_s, self._need_s(ask, placement)
        is_claim = ask.waited_s >= known.patience_s
        rejects = self._classes.rejects(ask.request)
        late_s = 0.0 if slo.ttft_s is None else ask.waited_s + DOUBT * ttft_s - slo.ttft_s
        if late_s > 0.0 and rejects and not self._is_trial(ask, placement):
            return Refusal(self._too_late(ask, ttft_s, need_s), retry_after_s=late_s)
        if is_claim:
            return None
        if rejects and (reason := self._impossible(ask, decode)):
            return Refusal(reason, DECODE_RETRY_S)
        is_guest = late_s > 0.0 or (slo.ttft_s is None and slo.tpot_s is None)
        waits = self._no_slot(ask, placement, decode, self._step_room_s if is_guest else math.inf)
        if waits is not None:
            reason, start_s, apart_s = waits
            first_s = ask.waited_s + max(ttft_s, start_s + need_s)
            if rejects and not ask.is_queued and slo.ttft_s is not None and first_s > slo.ttft_s:
                return Refusal(reason, retry_after_s=start_s)  # who waits already loses nothing by waiting on
            return Later(reason, start_s, need_s, apart_s)
        if is_guest:
            return self._behind_others(ask, placement, need_s)
        return None

    @staticmethod
    def _too_late(ask: Ask, ttft_s: float, need_s: float) -> str:
        took = f"after {ask.waited_s:.3g} s of waiting " if ask.waited_s >= LEAST_WAIT_S else ""
        alone = ", even with nobody ahead" if need_s >= ttft_s else ""
        reason = f"{took}the first token would take {ttft_s:.3g} to {DOUBT * ttft_s:.3g} s{alone}"
        return f"{reason}, the SLO is {ask.request.slo.ttft_s:.3g} s"

    def _need_s(self, ask: Ask, placement: Placement) -> float:
        """From the prompt's turn to the first token."""
        if placement.prefill_s is not None:
            return placement.prefill_s
        new_tokens = max(1, ask.request.num_tokens - placement.cached_tokens)
        return self._latency.prefill_seconds(_worker(ask, placement.prefill), new_tokens, placement.cached_tokens)

    def _is_trial(self, ask: Ask, placement: Placement) -> bool:
        """Whether the prediction is a guess and the worker idle: only trying can make the guess better."""
        worker = _worker(ask, placement.prefill)
        stats, sent = worker.stats, ask.sent_to(worker.name)
        idle = not (stats.waiting or stats.running or stats.reserved or sent.sequences)
        return idle and not self._latency.is_sure(worker) and not self._active.prefilling(worker.name)

    def _no_slot(
        self, ask: Ask, placement: Placement, decode: WorkerView, most_s: float
    ) -> tuple[str, float, float] | None:
        """Why the worker should not decode one more now, when it should, and how far apart others are; None: it should.

        `most_s`: how long its step may then take, whatever the SLOs of those that decode there.
        """
        if ask.tokens_left == 1:
            return None
        ours = self._active.decoding(decode.name)
        batch = max(num_sequences(ask, decode), len(ours))
        if not batch:
            return None
        most = self._latency.most_running(decode)
        if batch >= most:
            return f"all {most} decode slots of {decode.name} are taken", *self._ends_s(ask, decode, batch, 1)
        tpot_s = self._tpot_s(ask, placement, decode, batch)
        alone_s = self._latency.step_seconds(decode, 1, ask.request.num_tokens)
        slos = (ask.request.slo.tpot_s, *(work.tpot_slo_s for work in ours))
        bound_s = min((each for each in slos if each is not None and each >= alone_s), default=math.inf)
        bound_s = min(bound_s, most_s)
        if tpot_s <= bound_s:
            return None
        too_many = math.ceil(batch * (tpot_s - bound_s) / max(tpot_s - alone_s, 1e-9))
        bound = "its share is" if bound_s == most_s else "the SLO is"
        reason = f"each token on {decode.name} would take {tpot_s:.3g} s, {bound} {bound_s:.3g} s"
        return reason, *self._ends_s(ask, decode, batch, min(batch, max(1, too_many)))

    def _impossible(self, ask: Ask, decode: WorkerView) -> str:
        """Why no wait would help: an empty worker would miss the TPOT SLO."""
        slo_s = ask.request.slo.tpot_s
        if slo_s is None or ask.tokens_left == 1 or not self._latency.is_sure(decode):
            return ""
        alone_s = self._latency.step_seconds(decode, 1, ask.request.num_tokens)
        if alone_s <= slo_s:
            return ""
        return f"each token would take {alone_s:.3g} s, even with nobody beside it, the SLO is {slo_s:.3g} s"

    def _tpot_s(self, ask: Ask, placement: Placement, decode: WorkerView, batch: int) -> float:
        """A decode step with this request in it. Whom we sent a moment ago, no statistics and no line show yet."""
        predicted_s = placement.predicted_tpot_s or 0.0
        if batch <= num_sequences(ask, decode):
            return predicted_s
        context = sum(work.num_tokens for work in self._active.decoding(decode.name))
        return max(predicted_s, self._latency.step_seconds(decode, batch + 1, context + ask.request.num_tokens))

    def _ends_s(self, ask: Ask, decode: WorkerView, batch: int, count: int) -> tuple[float, float]:
        """When `count` of the `batch` that decode there will have ended, and how far apart ends are.

        By how long requests decode on average, or by how long our answers are expected to be if that is sooner: a wait
        that is in vain costs less than a refusal that was not needed.
        """
        used_tokens = self._latency.kv_tokens(decode) - self._latency.free_tokens(decode)
        step_s = self._latency.step_seconds(decode, batch, used_tokens)
        mean_s = self._active.decode_seconds(ask.now_s)
        if math.isinf(mean_s):  # none has ended yet
            mean_s = self._expected(ask.request) * step_s
        apart_s = max(LEAST_WAIT_S, mean_s / batch)
        ours = self._active.decoding(decode.name)
        ends_s = sorted(work.first_token_s + work.output_tokens * step_s - ask.now_s for work in ours)
        expected_s = ends_s[count - 1] if count <= len(ends_s) else math.inf
        return max(LEAST_WAIT_S, min(count * apart_s, expected_s)), apart_s

    def _behind_others(self, ask: Ask, placement: Placement, need_s: float) -> Later | None:
        """Its prompt must leave room on its worker for those that come with an SLO."""
        assert placement.predicted_ttft_s is not None
        queue_s = placement.predicted_ttft_s - need_s
        over_s = placement.predicted_ttft_s - self._room_s
        if queue_s <= 0.0 or over_s <= 0.0:
            return None
        reason = f"{placement.prefill} computes prompts for another {queue_s:.3g} s"
        return Later(reason, max(LEAST_WAIT_S, min(over_s, queue_s)), need_s)


def _worker(ask: Ask, name: str) -> WorkerView:
    return next(worker for worker in ask.view.workers if worker.name == name)
