"""Routing by SLO: requests go where both SLOs are met; roles are kept while that works.

Every worker can do both phases; a role says what it is there for, and the controller changes it (`elastic`). Between
two such changes the router bends it:

- **The prompt** goes where its first token is expected soonest: behind the prompts that wait there, without what the
  cache has, at the speed that the worker's decodes leave; to a worker without decodes, if it is early enough there. It
  goes to a decode worker when it would be late everywhere else and is not late there.
- **Decoding** goes where a step will be shortest once this prompt is done, with all that are on their way by then, and
  where memory has room for the answer. It goes to a prefill worker when the SLO is missed everywhere else, and
  prompts can spare that worker.
- **A beginning is fetched** from another worker's cache, when that is quicker than computing it.
- **A prompt is cut** while others wait: the decode worker computes its end, if its decodes leave the time.
- **Nothing is handed over** when the decode worker's own first token comes as soon as the KV would: a short or cached
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
from cluster.policy.routing.cache_aware import CacheAware
from cluster.policy.routing.prefix_index import Depth, PrefixIndex
from cluster.policy.routing.router import Ask, Placement
from cluster.policy.routing.slo.exhaustive import Everyone
from cluster.policy.routing.slo.shortlist import Glance, Shortlist
from cluster.policy.routing.slo.worker_estimate import DECODE, MIXED, PREFILL, DecodeSide, PromptSide, WorkerEstimate
from diptych.view import WorkerView
from workers.request import SLO, Request

FEW = 12  # workers: all of them are looked at
FEW_DECODES = 4  # whose SLO may be missed before a worker that is there for prompts computes none
LATELY_S = 10.0
SPARE = 0.6  # of their time: prompts that need no more of it wait little
LEAST_PART = 128  # tokens of a cut prompt: below, the hand-over costs more than it moves
EARLY = 0.8  # of the TTFT SLO: so late a prompt may be for the sake of decodes elsewhere

Look = Everyone | Glance


class SLORouter(CacheAware):
    """`default`: the SLO of requests without one. Any two workers may be paired.

    Where more than `few` workers can hold a request, only those on the shortlist are looked at.
    """

    links_all: ClassVar[bool] = True

    def __init__(
        self,
        latency: LatencyPredictor,
        index: PrefixIndex,
        active: ActiveRequests,
        default: SLO,
        expected: Callable[[Request], int],
        few: int = FEW,
    ) -> None:
        super().__init__(latency, index)
        self._estimate = WorkerEstimate(latency, active)
        self._expected = expected
        self._shortlist = Shortlist(latency, active, index, default.tpot_s, few)
        self._default = default
        self._came: deque[tuple[float, float]] = deque()  # when a prompt was sent, its seconds alone
        self._came_s = 0.0
        self._first_s = 0.0

    def choose(self, ask: Ask) -> Placement | None:
        slo, answer = self._slo_of(ask), self._expected(ask.request)
        look = self._shortlist.look(ask, partial(self._depths, ask), answer) or Everyone(
            ask, partial(self.cached_tokens, ask)
        )
        sides, first = self._prompt_sides(ask, look, slo)
        if first is None:
            return None
        if ask.tokens_left == 1:
            return _placed(first, None, "one token is wanted: nothing to hand over")
        begin_s = ask.now_s + first.ttft_s
        is_free = _is_free(first, slo)
        wholes = [] if is_free else look.wholes(slo, EARLY)
        for worker in wholes:
            if worker.name not in sides:
                sides[worker.name] = self._prompt_side(ask, look, worker, slo)
                first = _soonest([first, sides[worker.name]], slo)
        decodes = self._decode_sides(ask, look, slo, answer, begin_s, wholes)
        if not decodes:
            return None
        if not is_free and (both := _whole(sides, decodes, slo)) is not None:
            return _placed(*both, "one worker meets both SLOs")
        decode = _roomiest(decodes, slo, spares=self._spares(ask, look, slo, sides, decodes))
        return self._paired(ask, look, slo, sides, first, decode)

    def _paired(
        self, ask: Ask, look: Look, slo: SLO, sides: Mapping[str, PromptSide], first: PromptSide, decode: DecodeSide
    ) -> Placement | None:
        """Who computes the prompt for this decode worker, and how. `first`: the best of the sides."""
        worker = look.worker(decode.name)
        local = sides.get(worker.name) or self._prompt_side(ask, look, worker, slo)
        is_local_able = ask.alone or worker.role is MIXED
        prefill: PromptSide | None = first
        if not all(ask.view.linked(name, worker.name) or (is_local_able and name == worker.name) for name in sides):
            prefill = self._prompt_sides(ask, look, slo, worker.name)[1]
        if is_local_able:
            prefill = _soonest([prefill, local] if prefill else [local], slo)
        if prefill is None:
            return None
        if prefill is local:
            return self._lent(ask, look, _placed(local, decode, "first token soonest where it decodes"))
        if self._is_local(ask, worker, prefill, local, slo):
            return _placed(local, decode, "computed where it decodes as soon as it could be handed over")
        placement = self._lent(ask, look, _placed(prefill, decode, self.reason))
        return placement if placement.prefix_owner else self._cut(ask, placement, prefill, local, slo)

    def began(self, ask: Ask, placement: Placement) -> None:
        super().began(ask, placement)
        worker = self._find(ask.view, placement.prefill)
        assert worker is not None, "it was chosen from this view"
        cached = placement.cached_tokens
        alone_s = self.latency.cost(worker).prefill_seconds(max(1, ask.request.num_tokens - cached), cached)
        alone_s *= self.latency.prompt_speed(worker)
        self._first_s = self._first_s or ask.now_s
        self._came.append((ask.now_s, alone_s))
        self._came_s += alone_s
        self._forget(ask.now_s)

    def _prompt_sides(
        self, ask: Ask, look: Look, slo: SLO, reader: str = ""
    ) -> tuple[dict[str, PromptSide], PromptSide | None]:
        """The workers considered, tier by tier, until no later tier could be preferred; and the best."""
        sides: dict[str, PromptSide] = {}
        best: PromptSide | None = None
        for number, tier in enumerate(look.prompts(slo, reader)):
            for worker in tier:
                if worker.name not in sides:
                    sides[worker.name] = self._prompt_side(ask, look, worker, slo)
            if sides:
                best = _soonest(list(sides.values()), slo)
                if _is_able(best) and not any(_drawbacks(best, slo)[: 3 - number]):
                    break
        return sides, best

    def _decode_sides(
        self, ask: Ask, look: Look, slo: SLO, answer: int, begin_s: float, others: Sequence[WorkerView]
    ) -> list[DecodeSide]:
        """The same, to decode; and those of the others."""
        sides: dict[str, DecodeSide] = {}
        for number, tier in enumerate(chain([others], look.decodes(alone=ask.alone))):
            for worker in tier:
                if worker.name not in sides:
                    sides[worker.name] = self._estimate.decode_side(ask, worker, answer, begin_s, slo.tpot_s)
            kept = (side.has_room and not _is_late(side, slo) and side.role is not PREFILL for side in sides.values())
            if number and any(kept):
                break
        return list(sides.values())

    def _spares(
        self, ask: Ask, look: Look, slo: SLO, sides: Mapping[str, PromptSide], decodes: Sequence[DecodeSide]
    ) -> bool:
        """Whether prompts can do with one worker less: recent ones would not keep the others busy.

        The quickest one, of those that might decode: prompts are counted as its pool would compute them.
        """
        speed_of = self.latency.prompt_speed
        asked = [speed_of(look.worker(side.name)) for side in decodes if side.role is PREFILL]
        if not asked:
            return False
        self._forget(ask.now_s)
        span_s = min(LATELY_S, max(1.0, ask.now_s - self._first_s))
        others = look.able_speed(slo, list(sides.values()), speed_of) - max(asked)
        return others > 1e-9 and self._came_s / span_s <= SPARE * others

    def _forget(self, now_s: float) -> None:
        while self._came and self._came[0][0] < now_s - LATELY_S:
            self._came_s -= self._came.popleft()[1]

    def _prompt_side(self, ask: Ask, look: Look, worker: WorkerView, slo: SLO) -> PromptSide:
        return self._estimate.prompt_side(ask, worker, look.cached_tokens(worker), slo.tpot_s)

    def _depths(self, ask: Ask) -> Sequence[Depth]:
        return () if ask.request.fresh else self._index.depths(self.names(ask), ask.now_s)

    def _slo_of(self, ask: Ask) -> SLO:
        asked, default = ask.request.slo, self._default
        if not asked.ttft_s and not asked.tpot_s:
            return default
        return SLO(asked.ttft_s or default.ttft_s, asked.tpot_s or default.tpot_s, asked.class_name)

    def _is_local(self, ask: Ask, worker: WorkerView, prefill: PromptSide, local: PromptSide, slo: SLO) -> bool:
        """Whether the decode worker does as well without a hand-over.

        One that is there to decode is asked only for what its decodes hardly notice, or what takes longer to move; so
        is a mixed one with decodes, while a prefill worker has time.
        """
        if not local.steps or (slo.ttft_s is not None and local.ttft_s > slo.ttft_s):
            return False
        moved = ask.request.num_tokens - local.cached_tokens
        moving_s = self._estimate.transfer_seconds(ask, prefill.name, worker, moved)
        is_short = slo.tpot_s is not None and local.prefill_s <= slo.tpot_s
        has_time = _is_free(prefill, slo) and prefill.queue_s <= prefill.prefill_s
        spares_decodes = local.role is DECODE or (local.batch > 0 and has_time)
        if spares_decodes and not is_short and local.prefill_s > moving_s:
            return False
        return local.ttft_s <= prefill.ttft_s + moving_s

    def _lent(self, ask: Ask, look: Look, placement: Placement) -> Placement:
        """With a beginning fetched from who has more of it, where moving it is quicker than computing it.

        Only prefill workers lend: what is held for readers has digests.
        """
        own, num_tokens = placement.cached_tokens, ask.request.num_tokens
        prefix_owner = look.prefix_owner(own, placement.prefill)
        if prefix_owner is None:
            return placement
        tokens, owner = prefix_owner
        worker = look.worker(placement.prefill)
        rest_s = self.latency.prefill_seconds(worker, num_tokens - tokens, tokens)
        saved_s = self.latency.prefill_seconds(worker, num_tokens - own, own) - rest_s
        saved_s -= self._estimate.transfer_seconds(ask, owner, worker, tokens - own)
        if saved_s <= 0.0 or placement.predicted_ttft_s is None:
            return placement
        return structs.replace(
            placement,
            reason="first token soonest with a beginning fetched",
            prefix_owner=owner,
            cached_tokens=tokens,
            predicted_ttft_s=placement.predicted_ttft_s - saved_s,
            prefill_s=rest_s,
        )

    def _cut(self, ask: Ask, placement: Placement, prefill: PromptSide, local: PromptSide, slo: SLO) -> Placement:
        """While prompts wait, the decode worker computes the end of this one, in what its decodes leave.

        Not for this prompt's sake, whose first token comes no sooner: for those behind it. Both parts take equally
        long, as far as the first token is in time; so each worker does what it has time for.
        """
        new_tokens = ask.request.num_tokens - prefill.cached_tokens
        waits = prefill.queue_s > prefill.prefill_s
        if not waits or not local.steps or local.queue_s > 0.0 or slo.ttft_s is None or new_tokens < 2 * LEAST_PART:
            return placement
        spare_s = EARLY * slo.ttft_s - prefill.ttft_s
        slower_s = local.prefill_s - prefill.prefill_s  # of the whole prompt
        share = prefill.prefill_s / (prefill.prefill_s + local.prefill_s)
        if slower_s > 0.0:
            share = min(share, spare_s / slower_s)
        tail = int(new_tokens * share)
        if tail < LEAST_PART:
            return placement
        head_s, tail_s = prefill.prefill_s * (1.0 - share), local.prefill_s * share
        return structs.replace(
            placement,
            reason="prompts wait: its end is computed where it decodes",
            cut_tokens=ask.request.num_tokens - tail,
            prefill_s=head_s,
            predicted_ttft_s=prefill.queue_s + head_s + tail_s,
        )

    @property
    def reason(self) -> str:
        return "first token soonest, then the shortest step"


def _soonest(sides: Sequence[PromptSide], slo: SLO) -> PromptSide:
    """Who computes the prompt: in time before late, at home before elsewhere, beside no decodes if early; soonest."""
    able = [side for side in sides if _is_able(side)] or sides
    if len(able) == 1:
        return able[0]
    return min(able, key=lambda side: (_drawbacks(side, slo), round(side.ttft_s, 6), side.name))


def _is_able(side: PromptSide) -> bool:
    """Whether decodes there leave time for prompts. Who is there for prompts does not stop for a few decodes."""
    return side.steps > 0 or (side.role is PREFILL and side.batch <= FEW_DECODES)


def _drawbacks(side: PromptSide, slo: SLO) -> tuple[bool, bool, bool]:
    """Late; not at home; beside decodes, or not early. The first counts most."""
    share = 0.0 if slo.ttft_s is None else side.ttft_s / slo.ttft_s
    is_alone_early = not side.batch and share <= EARLY
    return share > 1.0, side.role is DECODE, not is_alone_early


def _is_free(side: PromptSide, slo: SLO) -> bool:
    """Whether a prefill worker takes this one early without disturbing others."""
    early = slo.ttft_s is None or side.ttft_s <= EARLY * slo.ttft_s
    return side.role is PREFILL and not side.batch and early


def _whole(
    prompts: Mapping[str, PromptSide], decodes: Sequence[DecodeSide], slo: SLO
) -> tuple[PromptSide, DecodeSide] | None:
    """The mixed worker that meets both SLOs on its own, if one does: the first token soonest."""
    kept = [
        (prompts[side.name], side)
        for side in decodes
        if side.role is MIXED
        and side.name in prompts
        and side.has_room
        and (slo.tpot_s is None or side.tpot_s <= slo.tpot_s)
        and prompts[side.name].steps
        and (slo.ttft_s is None or prompts[side.name].ttft_s <= EARLY * slo.ttft_s)
    ]
    return min(kept, key=lambda both: (round(both[0].ttft_s, 6), both[1].tpot_s, both[0].name), default=None)


def _roomiest(sides: Sequence[DecodeSide], slo: SLO, *, spares: bool) -> DecodeSide:
    """Who decodes: in time before late, at home before elsewhere; the shortest step.

    Not where it would end a prefill worker's time for prompts, unless they can spare one.
    """
    home = [side for side in sides if side.role is not PREFILL or side.leaves_time or spares] or sides
    room = [side for side in home if side.has_room] or home

    def order(side: DecodeSide) -> tuple[bool, bool, float, int, str]:
        return _is_late(side, slo), side.role is PREFILL, round(side.tpot_s, 6), -side.free_tokens, side.name

    return min(room, key=order)


def _is_late(side: DecodeSide, slo: SLO) -> bool:
    return slo.tpot_s is not None and side.tpot_s > slo.tpot_s


def _placed(prefill: PromptSide, decode: DecodeSide | None, reason: str) -> Placement:
    return Placement(
        prefill.name,
        decode.name if decode else prefill.name,
        reason,
        cached_tokens=prefill.cached_tokens,
        predicted_ttft_s=prefill.ttft_s,
        predicted_tpot_s=decode.tpot_s if decode else None,
        prefill_s=prefill.prefill_s,
    )
