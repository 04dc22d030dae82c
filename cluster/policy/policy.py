"""The policy of one gateway: a router, an admission policy, and the active requests.

    choose ──> Placement ──> began ──> prefilled ──> ended
       ├─────> Refusal
       └─────> Enqueue (admission "slo" only): call it again when a request has ended

Pure. The only module that knows routers by name.
"""

from collections.abc import Callable, Sequence
from functools import partial

from msgspec import structs

from cluster.policy.active_requests import ActiveRequest, ActiveRequests
from cluster.policy.admission.early_rejection import Admission, Predictive
from cluster.policy.admission.slo import SLOAdmission
from cluster.policy.estimate.latency import LatencyPredictor
from cluster.policy.estimate.lengths import LearnedLengths, LengthPredictor, expected_tokens, longest_answer
from cluster.policy.estimate.reservation_wait import ReservationWait
from cluster.policy.routing.baselines import (
    DistServe,
    LeastLoaded,
    Random,
    RoundRobin,
    SplitMix64,
    Splitwise,
)
from cluster.policy.routing.cache_aware import Mooncake, MooncakeLocal
from cluster.policy.routing.lending import Lending
from cluster.policy.routing.picking import WorkerLookup
from cluster.policy.routing.prefix_index import EXPECT_S, PrefixIndex
from cluster.policy.routing.router import Enqueue, Placement, PlacementQuery, Refusal, Router
from cluster.policy.routing.slo.router import SLORouter
from cluster.policy.scaling.migrations import MigrationPlanner
from cluster.policy.scaling.requeue import Requeue
from cluster.spec import ClusterSpec
from diptych.view import WorkerView
from workers.request import FinishReason, Request


class Policy:
    """Owned by one dispatcher. Every placement that `began` has its `ended`."""

    def __init__(
        self,
        router: Router,
        admission: Admission,
        latency: LatencyPredictor,
        active: ActiveRequests,
        index: PrefixIndex,
        lengths: LengthPredictor,
        migrations: MigrationPlanner,
        requeue: Requeue,
        lending: Lending,
    ) -> None:
        self.active = active
        self.index = index
        self.lengths = lengths
        self.migrations = migrations
        self.requeue = requeue
        self.lending = lending
        self._find = WorkerLookup()
        self._reservation_wait = ReservationWait(latency, active)
        self._router = router
        self._admission = admission
        self._latency = latency

    @property
    def links_all(self) -> bool:
        """Whether any two workers may be paired, whatever their roles, so that all must be linked."""
        return self._router.links_all

    @property
    def uses_prefix_index(self) -> bool:
        """Whether the router reads the prefix index, so that the dispatcher must feed it workers' cache events."""
        return self._router.uses_prefix_index

    @property
    def queues(self) -> bool:
        """Whether `choose` may answer `Enqueue`."""
        return self._admission.queues

    def choose(self, query: PlacementQuery) -> Placement | Refusal | Enqueue | None:
        """A placement for the request; None: no worker is ready for it. Changes nothing.

        Only first attempts are refused or queued, and no parallel sample if another one of its prompt is running.
        """
        placement = self._router.choose(query) or self.lending.choose(query, self.active.borrowing())
        if placement is None:
            return None
        if placement.predicted_ttft_s is None:
            placement = self._predicted(query, placement)
        predicted = self._reserved(query, placement)
        if query.request.attempt or query.sibling_worker or not self._admission.needs_predictions:
            return predicted
        judged = predicted if self._admission.queues else placement  # Mooncake's admission has no reservations
        return self._admission.at_arrival(query, judged, self._worker(query, placement.decode)) or predicted

    def _predicted(self, query: PlacementQuery, placement: Placement) -> Placement:
        """Add predictions, where costs are known or the admission policy needs them."""
        prefill, decode = self._worker(query, placement.prefill), self._worker(query, placement.decode)
        if not (self._latency.knows(prefill, decode) or self._admission.needs_predictions):
            return placement
        return structs.replace(
            placement,
            predicted_ttft_s=self._latency.ttft_seconds(query, prefill, _cached_tokens(query, placement)),
            predicted_tpot_s=self._latency.tpot_seconds(query, decode),
        )

    def _reserved(self, query: PlacementQuery, placement: Placement) -> Placement:
        """Add the wait for the decode worker's reservation, as far as it exceeds the wait in the prefill queue."""
        if placement.colocated or placement.predicted_ttft_s is None:
            return placement
        wait_s = self._reservation_wait.seconds(query, self._worker(query, placement.decode))
        if wait_s <= 0.0:
            return placement
        additional_s = max(0.0, wait_s - self._latency.queue_seconds(query, self._worker(query, placement.prefill)))
        predicted_s = placement.predicted_ttft_s + additional_s
        return structs.replace(placement, predicted_ttft_s=predicted_s)

    def began(self, query: PlacementQuery, placement: Placement) -> None:
        """The attempt was sent to the chosen workers."""
        request = query.request
        prefill, decode = self._worker(query, placement.prefill), self._worker(query, placement.decode)
        cached_tokens = _cached_tokens(query, placement)
        cut_tokens = placement.cut(request)
        new_tokens = max(1, (cut_tokens or request.num_tokens) - cached_tokens)
        prefill_s = placement.prefill_s
        if prefill_s is None or query.sibling_worker == placement.prefill:
            prefill_s = self._latency.prefill_seconds(prefill, new_tokens, cached_tokens)
        queue_s = self._latency.queue_seconds(query, prefill)
        work = ActiveRequest(
            key=request.key,
            prefill=placement.prefill,
            decode=placement.decode,
            prompt_tokens=request.num_tokens,
            new_tokens=new_tokens,
            output_tokens=self.expected_tokens(request),
            prefill_s=prefill_s,
            began_s=query.now_s,
            first_token_s=query.now_s + queue_s + prefill_s,
            correction=self._latency.prompt_correction(prefill),
            plain_tpot_s=self._latency.plain_tpot_seconds(query, decode),
            tpot_slo_s=request.slo.tpot_s,
            borrows=bool(placement.lenders),
            is_cut=cut_tokens > 0,
        )
        self._router.began(query, placement)
        self.active.began(work)

    def _worker(self, query: PlacementQuery, name: str) -> WorkerView:
        worker = self._find(query.view, name)
        assert worker is not None, f"{name} was chosen from this view"
        return worker

    def for_client(self, query: PlacementQuery, placement: Placement) -> Placement:
        """Predictions as the client sees them: counted from the request's arrival; none where costs are guesses."""
        if self._latency.knows(self._worker(query, placement.prefill), self._worker(query, placement.decode)):
            return placement.after(query.waited_s)
        return structs.replace(placement, predicted_ttft_s=None, predicted_tpot_s=None)

    def expected_tokens(self, request: Request) -> int:
        """Predicted length of the answer; at least 2 where the request may decode at all."""
        return max(min(2, longest_answer(request)), expected_tokens(self.lengths, request))

    def prefilled(self, key: str, now_s: float, compute_s: float | None = None) -> None:
        """The attempt's first token arrived; computing its prompt took `compute_s`.

        Unknown keys and repeated calls are ignored.
        """
        self.index.settle(key, now_s)
        work = self.active.prefilled(key, now_s)
        if work is not None and not work.is_cut:
            self._latency.learn_prompt(work, compute_s)

    def replace(self, query: PlacementQuery, key: str, placement: Placement) -> Placement:
        """Replace the attempt `key`, which has not started, by one with this placement. Returns `for_client`."""
        self.index.withdraw(key)
        self.active.ended(key, query.now_s)
        self.began(query, placement)
        return self.for_client(query, placement)

    def ended(self, key: str, now_s: float, num_tokens: int = 0) -> None:
        """The attempt ended after `num_tokens` tokens (0: it did not finish). Unknown keys are ignored."""
        self.index.settle(key, now_s)
        work = self.active.ended(key, now_s)
        if work is not None and num_tokens:
            self._latency.learn_steps(work, num_tokens, now_s)

    def answered(self, request: Request, output: Sequence[int], finish: FinishReason | None, worker: str = "") -> None:
        """The request ended with this answer over all attempts; `finish` None: cancelled or failed.

        `worker`: decoded the answer's end.
        """
        self.lengths.ended(request, len(output), finish)
        if finish is not None and self.uses_prefix_index:
            self.index.answered(worker, (*request.prompt, *output), request.cache_salt)


def open_policy(spec: ClusterSpec, seed: int, lengths: LengthPredictor | None = None) -> Policy:
    """The policy that `spec.gateway` names. `lengths` predicts answer lengths; the default learns them."""
    active = ActiveRequests()
    latency = LatencyPredictor(spec, active)
    lengths = lengths or LearnedLengths()
    expected = partial(expected_tokens, lengths)
    index = PrefixIndex(expect_s=EXPECT_S + spec.gateway.cache_events_interval_s)
    routers: dict[str, Callable[[], Router]] = {
        "least-loaded": LeastLoaded,
        "random": lambda: Random(SplitMix64(seed)),
        "round-robin": RoundRobin,
        "distserve": DistServe,
        "splitwise": lambda: Splitwise(latency, active),
        "mooncake": lambda: Mooncake(latency, index),
        "mooncake-local": lambda: MooncakeLocal(latency, index),
        "slo": lambda: SLORouter(latency, index, active, spec.gateway.slo, expected),
    }
    admissions: dict[str, Callable[[], Admission]] = {
        "none": Admission,
        "predictive": lambda: Predictive(spec.gateway.slo, latency, active),
        "slo": lambda: SLOAdmission(spec.gateway, latency, active, expected, spec.health.heartbeat_s),
    }
    migrations = MigrationPlanner(latency, active, rebalances=spec.gateway.rebalance, tpot_s=spec.gateway.slo.tpot_s)
    requeue = Requeue(latency, active, index, is_on=spec.gateway.rebalance, ttft_s=spec.gateway.slo.ttft_s)
    return Policy(
        router=routers[spec.gateway.routing](),
        admission=admissions[spec.gateway.admission](),
        latency=latency,
        active=active,
        index=index,
        lengths=lengths,
        migrations=migrations,
        requeue=requeue,
        lending=Lending(spec),
    )


def _cached_tokens(query: PlacementQuery, placement: Placement) -> int:
    """Prompt tokens that will be cached when it starts: all but one if the worker computes the same prompt already."""
    return query.request.num_tokens - 1 if query.sibling_worker == placement.prefill else placement.cached_tokens
