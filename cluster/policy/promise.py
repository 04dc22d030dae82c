"""Our router: both phases where both promises hold, roles kept for as long as they do.

Every worker can do both phases; a role says what it is there for, and the controller changes it (`elastic`). Between
two such changes the router bends it:

- **The prompt** goes where its first token is expected soonest: behind the prompts that wait there, without what the
  cache has, at the speed that the worker's decodes leave; to a worker without decodes, if it is early enough there. It
  goes to a decode worker when it would be late everywhere else and is not late there.
- **Decoding** goes where a step will be shortest once this prompt is done, with all that are on their way by then, and
  where memory has room for the answer. It goes to a prefill worker when the promise breaks everywhere else.
- **Nothing is handed over** when the decode worker's own first token comes as soon as the KV would: a short or cached
  prompt, a slow link, an idle worker.

Ideas: TTFT from queue and length, workers without fixed roles: Arrow (arXiv 2505.11916); short prompts on decode
workers: TaiChi (arXiv 2508.01989); later turns where their KV is: PPD (arXiv 2603.13358); the link's cost in the
choice: NetKV (arXiv 2606.03910).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from cluster.policy.book import Book
from cluster.policy.caches import CacheAware
from cluster.policy.forecast import Forecast
from cluster.policy.outlook import DecodeSide, Outlook, PromptSide
from cluster.policy.picking import beside, fitting
from cluster.policy.placement import Ask, Placement
from cluster.policy.prefix_index import PrefixIndex
from cluster.spec import Role
from cluster.view import WorkerView
from workers.request import SLO, Request

EARLY = 0.8  # of the promised time to the first token: so late a prompt may be for the sake of decodes elsewhere


class Promise(CacheAware):
    """`default`: the promise to requests that ask for none. Any two workers may be paired."""

    links_all: ClassVar[bool] = True

    def __init__(
        self, forecast: Forecast, index: PrefixIndex, book: Book, default: SLO, expected: Callable[[Request], int]
    ) -> None:
        super().__init__(forecast, index)
        self._outlook = Outlook(forecast, book, expected)
        self._default = default

    def choose(self, ask: Ask) -> Placement | None:
        workers = fitting(ask)
        if not workers:
            return None
        slo = self._promised(ask)
        sides = {worker.name: self._prompt_side(ask, worker, slo) for worker in beside(ask, workers)}
        first = _soonest(list(sides.values()), slo)
        if ask.tokens_left == 1:
            return _placed(first, None, "one token is wanted: nothing to hand over")
        begin_s = ask.now_s + first.ttft_s
        able = [worker for worker in workers if ask.alone or worker.role is not Role.PREFILL]
        decodes = [self._outlook.decode_side(ask, worker, begin_s, slo.tpot_s) for worker in able]
        if not decodes:
            return None
        if (both := _whole(sides, decodes, slo)) is not None:
            return _placed(*both, "one worker keeps both promises")
        decode = _roomiest(decodes, slo)
        worker = next(worker for worker in workers if worker.name == decode.name)
        local = sides.get(worker.name) or self._prompt_side(ask, worker, slo)
        reach = [side for side in sides.values() if ask.view.linked(side.name, worker.name)]
        if ask.alone or worker.role is Role.MIXED:
            reach.append(local)
        if not reach:
            return None
        prefill = _soonest(reach, slo)
        if prefill is local:
            return _placed(local, decode, "first token soonest where it decodes")
        if self._is_local(ask, worker, prefill, local, slo):
            return _placed(local, decode, "computed where it decodes as soon as it could be handed over")
        return _placed(prefill, decode, self.reason)

    def _prompt_side(self, ask: Ask, worker: WorkerView, slo: SLO) -> PromptSide:
        return self._outlook.prompt_side(ask, worker, self.cached_tokens(ask, worker), slo.tpot_s)

    def _promised(self, ask: Ask) -> SLO:
        asked, default = ask.request.slo, self._default
        return SLO(asked.ttft_s or default.ttft_s, asked.tpot_s or default.tpot_s, asked.class_name)

    def _is_local(self, ask: Ask, worker: WorkerView, prefill: PromptSide, local: PromptSide, slo: SLO) -> bool:
        """Whether the decode worker does as well without a hand-over.

        One that is there to decode is asked only for what its decodes hardly notice, or what takes longer to move.
        """
        if not local.steps or (slo.ttft_s is not None and local.ttft_s > slo.ttft_s):
            return False
        moving_s = self._outlook.transfer_seconds(worker, ask.request.num_tokens - local.cached_tokens)
        is_short = slo.tpot_s is not None and local.prefill_s <= slo.tpot_s
        if local.role is Role.DECODE and not is_short and local.prefill_s > moving_s:
            return False
        return local.ttft_s <= prefill.ttft_s + moving_s

    @property
    def reason(self) -> str:
        return "first token soonest, then the shortest step"


def _soonest(sides: Sequence[PromptSide], slo: SLO) -> PromptSide:
    """Who computes the prompt: in time before late, at home before elsewhere, beside no decodes if early; soonest."""
    able = [side for side in sides if side.steps] or sides

    def order(side: PromptSide) -> tuple[bool, bool, bool, float, str]:
        share = 0.0 if slo.ttft_s is None else side.ttft_s / slo.ttft_s
        is_alone_early = not side.batch and share <= EARLY
        return share > 1.0, side.role is Role.DECODE, not is_alone_early, round(side.ttft_s, 6), side.name

    return min(able, key=order)


def _whole(
    prompts: Mapping[str, PromptSide], decodes: Sequence[DecodeSide], slo: SLO
) -> tuple[PromptSide, DecodeSide] | None:
    """The mixed worker that keeps both promises on its own, if one does: the first token soonest."""
    kept = [
        (prompts[side.name], side)
        for side in decodes
        if side.role is Role.MIXED
        and side.name in prompts
        and side.has_room
        and (slo.tpot_s is None or side.tpot_s <= slo.tpot_s)
        and prompts[side.name].steps
        and (slo.ttft_s is None or prompts[side.name].ttft_s <= EARLY * slo.ttft_s)
    ]
    return min(kept, key=lambda both: (round(both[0].ttft_s, 6), both[1].tpot_s, both[0].name), default=None)


def _roomiest(sides: Sequence[DecodeSide], slo: SLO) -> DecodeSide:
    """Who decodes: in time before late, at home before elsewhere; the shortest step. Not where prompts would end."""
    home = [side for side in sides if side.role is not Role.PREFILL or side.leaves_time] or sides
    room = [side for side in home if side.has_room] or home

    def order(side: DecodeSide) -> tuple[bool, bool, float, int, str]:
        is_late = slo.tpot_s is not None and side.tpot_s > slo.tpot_s
        return is_late, side.role is Role.PREFILL, round(side.tpot_s, 6), -side.free_tokens, side.name

    return min(room, key=order)


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
