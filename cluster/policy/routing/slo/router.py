"""Routing by SLO: requests go where both SLOs are met, and roles are respected while that works.

Any worker can do both phases. The controller sets roles (`scaling.elastic`); this router deviates from them if an SLO
would be missed otherwise:

- **Prefill** on the worker with the earliest predicted first token: after the prompts that wait there, without the
  cached part of the prompt, at the speed that the worker's decodes leave. Workers without decodes come first if they
  are early enough. A decode worker computes the prompt if it would be late everywhere else and is in time there.
- **Decode** on the worker with the shortest step once this prompt is done, with room for the answer. A prefill worker
  decodes if the SLO would be missed everywhere else and prompts can spare that worker.
- **A prefix is fetched** from another worker's cache if that takes less time than computing it.
- **A prompt is cut** while others wait: the decode worker computes its end, in the time that its decodes leave.
- **No KV handoff** if the decode worker itself has the first token as soon as the KV could arrive: a short or cached
  prompt, a slow link, an idle worker.

Ideas: TTFT from queue and length, workers without fixed roles: Arrow (arXiv 2505.11916); short prompts on decode
workers: TaiChi (arXiv 2508.01989); later turns where their KV is: PPD (arXiv 2603.13358); the link's cost in the
choice: NetKV (arXiv 2606.03910); prompts cut between workers: DynaServe (arXiv 2504.09285).
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import ClassVar

from msgspec import structs

from cluster.policy.active_requests import ActiveRequests
from cluster.policy.estimate.latency import LatencyPredictor
from cluster.policy.routing.cache_aware import CacheAware, prompt_of
from cluster.policy.routing.prefix_index import Depth, PrefixIndex
from cluster.policy.routing.router import Placement, PlacementQuery
from cluster.policy.routing.slo.exhaustive import AllWorkers
from cluster.policy.routing.slo.shortlist import Shortlist, shortlist
from cluster.policy.routing.slo.worker_estimate import (
    DECODE,
    MIXED,
    PREFILL,
    DecodeEstimate,
    PrefillEstimate,
    WorkerEstimate,
)
from cluster.policy.routing.slo.worker_table import WorkerTable
from diptych.view import WorkerView
from workers.request import SLO, Request

MAX_EXHAUSTIVE = 12  # workers; with more, only a shortlist is evaluated exactly
FEW_DECODES = 4  # a prefill worker with at most this many computes prompts even if these miss their SLO
RECENT_S = 10.0  # window of the prefill load
MAX_PREFILL_LOAD = 0.6  # share of the prefill workers' time up to which prompts wait little
MIN_PART = 128  # tokens of a cut prompt; a shorter part costs more than it saves
EARLY = 0.8  # share of the TTFT SLO

Candidates = AllWorkers | Shortlist


class SLORouter(CacheAware):
    """`default`: the SLO of requests without one. Any two workers may be paired.

    If more than `few` workers can hold a request, only a shortlist is evaluated exactly.
    """

    links_all: ClassVar[bool] = True

    def __init__(
        self,
        latency: LatencyPredictor,
        index: PrefixIndex,
        active: ActiveRequests,
        default: SLO,
        expected: Callable[[Request], int],
        few: int = MAX_EXHAUSTIVE,
    ) -> None:
        super().__init__(latency, index)
        self._estimate = WorkerEstimate(latency, active)
        self._expected = expected
        self._table = WorkerTable(latency, active, index, default.tpot_s)
        self._few = few
        self._default = default
        self._recent: deque[tuple[float, float]] = deque()  # (time, seconds without decodes) of sent prompts
        self._recent_s = 0.0
        self._first_s = 0.0

    def choose(self, query: PlacementQuery) -> Placement | None:
        slo, answer = self._slo_of(query), self._expected(query.request)
        candidates: Candidates | None = shortlist(self._table, query, partial(self._depths, query), answer, self._few)
        candidates = candidates or AllWorkers(query, partial(self.match, query), self.latency)
        estimates, first = self._prefill_estimates(query, candidates, slo)
        if first is None:
            return None
        if query.tokens_left == 1:
            return _placed(first, None, "one token is requested: no KV handoff")
        begin_s = query.now_s + first.ttft_s
        is_free = _is_free(first, slo)
        mixed = [] if is_free else candidates.mixed(slo, EARLY)
        for worker in mixed:
            if worker.name not in estimates:
                estimates[worker.name] = self._prefill_estimate(query, candidates, worker, slo)
                first = _best_prefill([first, estimates[worker.name]], slo)
        decodes = self._decode_estimates(query, candidates, slo, answer, begin_s, mixed)
        if not decodes:
            return None
        if not is_free and (both := _best_mixed(estimates, decodes, slo)) is not None:
            return _placed(*both, "one worker meets both SLOs")
        decode = _best_decode(
            decodes, slo, can_spare=self._can_spare_prefill(query, candidates, slo, estimates, decodes)
        )
        return self._paired(query, candidates, slo, estimates, first, decode)

    def _paired(
        self,
        query: PlacementQuery,
        candidates: Candidates,
        slo: SLO,
        estimates: Mapping[str, PrefillEstimate],
        first: PrefillEstimate,
        decode: DecodeEstimate,
    ) -> Placement | None:
        """The prefill worker for this decode worker. `first`: the best of `estimates`."""
        worker = candidates.worker(decode.name)
        local = estimates.get(worker.name) or self._prefill_estimate(query, candidates, worker, slo)
        is_local_able = query.may_colocate or worker.role is MIXED
        prefill: PrefillEstimate | None = first
        if not all(
            query.view.linked(name, worker.name) or (is_local_able and name == worker.name) for name in estimates
        ):
            prefill = self._prefill_estimates(query, candidates, slo, worker.name)[1]
        if is_local_able:
            prefill = _best_prefill([prefill, local] if prefill else [local], slo)
        if prefill is None:
            return None
        if prefill is local:
            placement = _placed(local, decode, "first token soonest where it decodes")
            return self._with_prefix_fetch(query, candidates, placement)
        if self._is_local(query, worker, prefill, local, slo):
            return _placed(local, decode, "computed where it decodes as soon as its KV could arrive")
        placement = self._with_prefix_fetch(query, candidates, _placed(prefill, decode, self.reason))
        return placement if placement.prefix_owner else self._cut(query, placement, prefill, local, slo)

    def began(self, query: PlacementQuery, placement: Placement) -> None:
        super().began(query, placement)
        worker = self._find(query.view, placement.prefill)
        assert worker is not None, "it was chosen from this view"
        cached = placement.cached_tokens
        alone_s = self.latency.cost(worker).prefill_seconds(max(1, query.request.num_tokens - cached), cached)
        alone_s *= self.latency.prompt_speed(worker)
        self._first_s = self._first_s or query.now_s
        self._recent.append((query.now_s, alone_s))
        self._recent_s += alone_s
        self._forget(query.now_s)

    def _prefill_estimates(
        self, query: PlacementQuery, candidates: Candidates, slo: SLO, reader: str = ""
    ) -> tuple[dict[str, PrefillEstimate], PrefillEstimate | None]:
        """Candidates for prefill, tier by tier until no later tier can be better; and the best."""
        estimates: dict[str, PrefillEstimate] = {}
        best: PrefillEstimate | None = None
        for number, tier in enumerate(candidates.prompts(slo, reader)):
            for worker in tier:
                if worker.name not in estimates:
                    estimates[worker.name] = self._prefill_estimate(query, candidates, worker, slo)
            if estimates:
                best = _best_prefill(list(estimates.values()), slo)
                if _is_able(best) and not any(_drawbacks(best, slo)[: 3 - number]):
                    break
        return estimates, best

    def _decode_estimates(
        self,
        query: PlacementQuery,
        candidates: Candidates,
        slo: SLO,
        answer: int,
        begin_s: float,
        others: Sequence[WorkerView],
    ) -> list[DecodeEstimate]:
        """Candidates for decode: `others`, and tier by tier until one meets the SLO."""
        estimates: dict[str, DecodeEstimate] = {}
        for number, tier in enumerate(chain([others], candidates.decodes(may_colocate=query.may_colocate))):
            for worker in tier:
                if worker.name not in estimates:
                    estimates[worker.name] = self._estimate.decode_estimate(query, worker, answer, begin_s, slo.tpot_s)
            meets_slo = (
                estimate.has_room and not _is_late(estimate, slo) and estimate.role is not PREFILL
                for estimate in estimates.values()
            )
            if number and any(meets_slo):
                break
        return list(estimates.values())

    def _can_spare_prefill(
        self,
        query: PlacementQuery,
        candidates: Candidates,
        slo: SLO,
        estimates: Mapping[str, PrefillEstimate],
        decodes: Sequence[DecodeEstimate],
    ) -> bool:
        """Whether recent prompts leave the other prefill workers enough time if the fastest candidate decodes.

        Speeds are relative to the fastest pool.
        """
        speed_of = self.latency.prompt_speed
        asked = [speed_of(candidates.worker(estimate.name)) for estimate in decodes if estimate.role is PREFILL]
        if not asked:
            return False
        self._forget(query.now_s)
        span_s = min(RECENT_S, max(1.0, query.now_s - self._first_s))
        others = candidates.available_speed(slo, list(estimates.values()), speed_of) - max(asked)
        return others > 1e-9 and self._recent_s / span_s <= MAX_PREFILL_LOAD * others

    def _forget(self, now_s: float) -> None:
        while self._recent and self._recent[0][0] < now_s - RECENT_S:
            self._recent_s -= self._recent.popleft()[1]

    def _prefill_estimate(
        self, query: PlacementQuery, candidates: Candidates, worker: WorkerView, slo: SLO
    ) -> PrefillEstimate:
        return self._estimate.prefill_estimate(query, worker, candidates.match(worker), slo.tpot_s)

    def _depths(self, query: PlacementQuery) -> Sequence[Depth]:
        if query.request.fresh:
            return ()
        return self._index.depths(self.hashes(query), query.now_s, prompt_of(query.request))

    def _slo_of(self, query: PlacementQuery) -> SLO:
        asked, default = query.request.slo, self._default
        if not asked.ttft_s and not asked.tpot_s:
            return default
        return SLO(asked.ttft_s or default.ttft_s, asked.tpot_s or default.tpot_s, asked.class_name)

    def _is_local(
        self, query: PlacementQuery, worker: WorkerView, prefill: PrefillEstimate, local: PrefillEstimate, slo: SLO
    ) -> bool:
        """Whether prefill on the decode worker is as fast as a KV handoff.

        A decode worker computes only prompts that its decodes hardly notice, or that take longer to move; so does a
        mixed worker with decodes, while a prefill worker has time.
        """
        if not local.steps or (slo.ttft_s is not None and local.ttft_s > slo.ttft_s):
            return False
        moved = query.request.num_tokens - local.ready_tokens
        moving_s = self._estimate.transfer_seconds(query, prefill.name, worker, moved)
        is_short = slo.tpot_s is not None and local.prefill_s <= slo.tpot_s
        has_time = _is_free(prefill, slo) and prefill.queue_s <= prefill.prefill_s
        protects_decodes = local.role is DECODE or (local.batch > 0 and has_time)
        if protects_decodes and not is_short and local.prefill_s > moving_s:
            return False
        return local.ttft_s <= prefill.ttft_s + moving_s

    def _with_prefix_fetch(self, query: PlacementQuery, candidates: Candidates, placement: Placement) -> Placement:
        """With a prefix fetched from another worker, if that takes less time than computing it."""
        own, num_tokens = placement.cached_tokens, query.request.num_tokens
        prefix_owner = candidates.prefix_owner(own, placement.prefill)
        if prefix_owner is None:
            return placement
        tokens, owner = prefix_owner
        worker, lender = candidates.worker(placement.prefill), candidates.worker(owner)
        here = candidates.match(worker)
        rest_s = self.latency.prefill_seconds(worker, num_tokens - tokens, tokens)
        restore_s = self.latency.found(worker, here, num_tokens)[1]
        saved_s = self.latency.prefill_seconds(worker, num_tokens - own, own) + restore_s - rest_s
        saved_s -= self._estimate.transfer_seconds(query, owner, worker, tokens - here.ready_tokens)
        saved_s -= self.latency.lent_seconds(lender, candidates.match(lender), here, tokens)
        if saved_s <= 0.0 or placement.predicted_ttft_s is None:
            return placement
        return structs.replace(
            placement,
            reason="first token soonest with a prefix fetched",
            prefix_owner=owner,
            cached_tokens=tokens,
            predicted_ttft_s=placement.predicted_ttft_s - saved_s,
            prefill_s=rest_s,
        )

    def _cut(
        self, query: PlacementQuery, placement: Placement, prefill: PrefillEstimate, local: PrefillEstimate, slo: SLO
    ) -> Placement:
        """While prompts wait, the decode worker computes the end of this one, in the time that its decodes leave.

        This one's first token comes no sooner, but those behind it do. Both parts take equally long, as far as the TTFT
        SLO allows.
        """
        new_tokens = query.request.num_tokens - prefill.cached_tokens
        waits = prefill.queue_s > prefill.prefill_s
        if not waits or not local.steps or local.queue_s > 0.0 or slo.ttft_s is None or new_tokens < 2 * MIN_PART:
            return placement
        spare_s = EARLY * slo.ttft_s - prefill.ttft_s
        slower_s = local.prefill_s - prefill.prefill_s  # of the whole prompt
        share = prefill.prefill_s / (prefill.prefill_s + local.prefill_s)
        if slower_s > 0.0:
            share = min(share, spare_s / slower_s)
        tail = int(new_tokens * share)
        if tail < MIN_PART:
            return placement
        head_s, tail_s = prefill.prefill_s * (1.0 - share), local.prefill_s * share
        return structs.replace(
            placement,
            reason="prompts wait: its end is computed where it decodes",
            cut_tokens=query.request.num_tokens - tail,
            prefill_s=head_s,
            predicted_ttft_s=prefill.queue_s + head_s + tail_s,
        )

    @property
    def reason(self) -> str:
        return "first token soonest, then the shortest step"


def _best_prefill(estimates: Sequence[PrefillEstimate], slo: SLO) -> PrefillEstimate:
    """The best prefill worker: in time, not a decode worker, early without decodes; then the earliest first token."""
    able = [estimate for estimate in estimates if _is_able(estimate)] or estimates
    if len(able) == 1:
        return able[0]
    return min(able, key=lambda estimate: (_drawbacks(estimate, slo), round(estimate.ttft_s, 6), estimate.name))


def _is_able(estimate: PrefillEstimate) -> bool:
    """Whether decodes there leave time for prompts. A prefill worker does not stop for a few decodes."""
    return estimate.steps > 0 or (estimate.role is PREFILL and estimate.batch <= FEW_DECODES)


def _drawbacks(estimate: PrefillEstimate, slo: SLO) -> tuple[bool, bool, bool]:
    """Late; a decode worker; beside decodes, or not early. The first counts most."""
    share = 0.0 if slo.ttft_s is None else estimate.ttft_s / slo.ttft_s
    is_alone_early = not estimate.batch and share <= EARLY
    return share > 1.0, estimate.role is DECODE, not is_alone_early


def _is_free(estimate: PrefillEstimate, slo: SLO) -> bool:
    """Whether it is a prefill worker without decodes whose first token is early."""
    early = slo.ttft_s is None or estimate.ttft_s <= EARLY * slo.ttft_s
    return estimate.role is PREFILL and not estimate.batch and early


def _best_mixed(
    prompts: Mapping[str, PrefillEstimate], decodes: Sequence[DecodeEstimate], slo: SLO
) -> tuple[PrefillEstimate, DecodeEstimate] | None:
    """The mixed worker that meets both SLOs on its own, with the earliest first token; None: there is none."""
    able = [
        (prompts[estimate.name], estimate)
        for estimate in decodes
        if estimate.role is MIXED
        and estimate.name in prompts
        and estimate.has_room
        and (slo.tpot_s is None or estimate.tpot_s <= slo.tpot_s)
        and prompts[estimate.name].steps
        and (slo.ttft_s is None or prompts[estimate.name].ttft_s <= EARLY * slo.ttft_s)
    ]
    return min(able, key=lambda both: (round(both[0].ttft_s, 6), both[1].tpot_s, both[0].name), default=None)


def _best_decode(estimates: Sequence[DecodeEstimate], slo: SLO, *, can_spare: bool) -> DecodeEstimate:
    """The best decode worker: meets the SLO, not a prefill worker; then the shortest step.

    A prefill worker only if it could still compute prompts, or prompts can spare one.
    """
    allowed = [
        estimate for estimate in estimates if estimate.role is not PREFILL or estimate.leaves_time or can_spare
    ] or estimates
    room = [estimate for estimate in allowed if estimate.has_room] or allowed

    def order(estimate: DecodeEstimate) -> tuple[bool, bool, float, int, str]:
        return (
            _is_late(estimate, slo),
            estimate.role is PREFILL,
            round(estimate.tpot_s + estimate.load_s, 6),
            -estimate.free_tokens,
            estimate.name,
        )

    return min(room, key=order)


def _is_late(estimate: DecodeEstimate, slo: SLO) -> bool:
    return slo.tpot_s is not None and estimate.tpot_s > slo.tpot_s


def _placed(prefill: PrefillEstimate, decode: DecodeEstimate | None, reason: str) -> Placement:
    return Placement(
        prefill.name,
        decode.name if decode else prefill.name,
        reason,
        cached_tokens=prefill.cached_tokens,
        predicted_ttft_s=prefill.ttft_s,
        predicted_tpot_s=decode.tpot_s if decode else None,
        prefill_s=prefill.prefill_s,
    )
