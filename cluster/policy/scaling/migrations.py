"""Which decodes should migrate: away from a worker that drains, that turns to prefill, or that misses its SLOs.

    drain     every decode of a worker that leaves, to where there is room
    role      while prompts wait anywhere, decodes of a prefill worker, which was another one before: beside them a
              prompt is cut to what their promise leaves of each step, beside the last one as beside many
    relief    of a worker that runs out of blocks, or whose steps take longer than promised: the longest answers first,
              a few at a time, when another has room, keeps its own promises too, and the move saves more than it costs

Nobody moves where no link was proven. What passes by itself moves nothing; a decode that was relieved rests, and so
does the way back of every move. Pure.

Sources: Sun et al., Llumnix (OSDI'24: moving decodes for balance, for room and to empty an instance), TaiChi (arXiv
2508.01989: at the brim of memory the longest answer moves).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from cluster.policy.active_requests import ActiveRequests
from cluster.policy.estimate.latency import Decodes, LatencyPredictor
from cluster.spec import Role
from diptych.view import ClusterView, WorkerState, WorkerView

AT_ONCE = 4  # under way from one worker
AT_ONCE_ROLE = 8  # the same, off a prefill worker: it is of use when they are all gone
A_LOOK = 2  # begun for relief of one worker at a time: what they change is seen before others follow
PRESSED_S = 0.9  # for so long, before anything is done about it
REST_S = 30.0  # of a decode that moved, and of the way back
RETRY_S = 2.0  # after a move that came to nothing
HORIZON_S = 10.0  # blocks must last for so long
ROOM = 0.9  # of a target's blocks and of the SLOs there
ROLE_ROOM = 0.97  # of the SLOs at the target of decodes from a prefill worker, as batching uses them
USUAL_PROMPT = 1024  # tokens, to see how much slower prompts are beside decodes
LEAST_LEFT = 16  # tokens of an answer that are still expected, however long it is already

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Move:
    """The decode of the attempt `key` goes from one worker to another."""

    key: str
    source: str
    target: str
    reason: str
    kind: str = "relief"  # or "drain", "role"


@dataclass(frozen=True, slots=True)
class _Decode:
    key: str
    context_tokens: int
    left_tokens: int  # expected
    promise_s: float | None


@dataclass(slots=True)
class _Side:
    """A worker as it will be when what is under way has moved. `decodes` are those of ours that may be moved.

    `batch`: those that decode there, or were sent to, even if the worker has not told of them yet.
    """

    worker: WorkerView
    batch: int
    used_tokens: int
    total_tokens: int
    decodes: list[_Decode] = field(default_factory=list)
    promise_s: float | None = None  # the tightest
    num_leaving: int = 0

    @property
    def name(self) -> str:
        return self.worker.name

    def take(self, decode: _Decode) -> None:
        self.batch += 1
        self.used_tokens += decode.context_tokens
        self.promise_s = _tightest((self.promise_s, decode.promise_s))

    def give(self, decode: _Decode) -> None:
        self.num_leaving += 1
        self.batch -= 1
        self.used_tokens -= decode.context_tokens
        self.decodes.remove(decode)
        self.promise_s = _tightest(each.promise_s for each in self.decodes)


class MigrationPlanner:
    """Owned by a Policy. `tpot_s`: the SLO of requests without one. Every `Move` planned has its `ended`."""

    def __init__(
        self, forecast: LatencyPredictor, book: ActiveRequests, *, rebalances: bool, tpot_s: float | None
    ) -> None:
        self._latency = forecast
        self._active = book
        self._rebalances = rebalances
        self._tpot_s = tpot_s
        self._under_way: dict[str, Move] = {}
        self._pressed_s: dict[str, float] = {}  # worker -> since when
        self._failed_s: dict[str, float] = {}  # key -> not again before
        self._moved_s: dict[str, float] = {}
        self._closed_s: dict[tuple[str, str], float] = {}  # (source, target) -> no relief before

    def plan(self, view: ClusterView, contexts: Mapping[str, int], now_s: float) -> tuple[Move, ...]:
        """The moves to begin now. `contexts`: of each attempt that may be moved, its tokens so far."""
        _expire(self._failed_s, now_s)
        _expire(self._moved_s, now_s)
        _expire(self._closed_s, now_s)
        draining = [worker.name for worker in view.workers if worker.state is WorkerState.DRAINING]
        if not draining and not self._rebalances:
            return ()
        sides = self._sides(view, contexts)
        moves: list[Move] = []
        for name in draining:
            moves += self._drain(sides[name], sides.values(), view)
        if self._rebalances:
            moves += self._clear(sides.values(), view)
            for side in sides.values():
                moves += self._relieve(side, sides.values(), view, now_s)
        self._under_way.update((move.key, move) for move in moves)
        return tuple(moves)

    def ended(self, move: Move, now_s: float, *, moved: bool) -> None:
        """It decodes at its target now, or stayed where it was."""
        self._under_way.pop(move.key, None)
        if moved:
            self._moved_s[move.key] = self._closed_s[move.target, move.source] = now_s + REST_S
        else:
            self._failed_s[move.key] = now_s + RETRY_S

    def _sides(self, view: ClusterView, contexts: Mapping[str, int]) -> dict[str, _Side]:
        sides: dict[str, _Side] = {}
        for worker in view.workers:
            if worker.state in (WorkerState.READY, WorkerState.DRAINING):
                total = self._latency.kv_tokens(worker)
                stats, used = worker.stats, total - self._latency.free_tokens(worker)
                seen, ours = stats.running + stats.reserved, self._active.assigned(worker.name).sequences
                side = sides[worker.name] = _Side(worker, max(seen, ours), used, total)
                side.decodes = list(self._decodes(worker.name, contexts))
                side.promise_s = _tightest(each.promise_s for each in side.decodes)
        for move in self._under_way.values():
            source, target = sides.get(move.source), sides.get(move.target)
            decode = next((each for each in source.decodes if each.key == move.key), None) if source else None
            if source is not None and decode is not None:
                source.give(decode)
                if target is not None:
                    target.take(decode)
        return sides

    def _decodes(self, worker: str, contexts: Mapping[str, int]) -> Iterable[_Decode]:
        for work in self._active.decoding(worker):
            context = contexts.get(work.key)
            if context is not None:
                left = max(LEAST_LEFT, work.num_tokens - context)
                yield _Decode(work.key, context, left, work.tpot_slo_s or self._tpot_s)

    # ---- off a worker that leaves --------------------------------------------------------------------------------

    def _drain(self, side: _Side, sides: Iterable[_Side], view: ClusterView) -> list[Move]:
        moves: list[Move] = []
        for decode in _longest_first(side.decodes):
            if side.num_leaving >= AT_ONCE:
                break
            if decode.key in self._failed_s:
                continue
            able = [
                each
                for each in sides
                if view.linked(side.name, each.name)
                and self._has_room(each, replace(decode, left_tokens=LEAST_LEFT), None)
            ]
            takers = [each for each in able if self._has_room(each, decode, 1.0)] or able
            if not takers:
                continue
            target = min(takers, key=lambda each: self._roomiest(each, decode))
            moves.append(_moved(decode, side, target, "its worker drains", "drain"))
        return moves

    def _roomiest(self, side: _Side, decode: _Decode) -> tuple[bool, bool, int, int, str]:
        promise_s = _tightest((side.promise_s, decode.promise_s))
        late = promise_s is not None and self._step_with(side, decode) > promise_s
        return late, side.worker.role is Role.PREFILL, side.batch, side.used_tokens - side.total_tokens, side.name

    # ---- off a worker that is to prefill -------------------------------------------------------------------------

    def _clear(self, sides: Iterable[_Side], view: ClusterView) -> list[Move]:
        """Prefill workers with few decodes come first: what others have room for shall make one of them free."""
        kept = [each for each in sides if each.worker.state is WorkerState.READY]
        to_clear = [each for each in kept if each.worker.role is Role.PREFILL and each.decodes]
        if not to_clear or not any(_prompts_wait(each.worker) for each in kept):
            return []
        moves: list[Move] = []
        for side in sorted(to_clear, key=lambda each: (each.batch, each.name)):
            slowed = self._slowed(side)
            for decode in _longest_first(side.decodes):
                if side.num_leaving >= AT_ONCE_ROLE:
                    break
                if decode.key in self._failed_s:
                    continue
                takers = [each for each in kept if self._takes_over(side, each, decode, slowed, view)]
                if takers:
                    target = min(takers, key=lambda each: self._to_clear(each, decode))
                    moves.append(_moved(decode, side, target, "its worker is to prefill, and prompts wait", "role"))
        return moves

    def _to_clear(self, side: _Side, decode: _Decode) -> tuple[bool, float, str]:
        return side.worker.role is Role.PREFILL, self._step_with(side, decode), side.name

    def _slowed(self, side: _Side) -> float:
        """The share of its speed that prompts lose beside these decodes."""
        decodes = Decodes(side.batch, side.used_tokens, side.promise_s)
        alone_s, _ = self._latency.prefill_beside(side.worker, USUAL_PROMPT, 0, Decodes(0, 0, None))
        beside_s, _ = self._latency.prefill_beside(side.worker, USUAL_PROMPT, 0, decodes)
        return max(0.0, 1.0 - alone_s / beside_s) if beside_s > 0.0 else 0.0

    def _takes_over(self, side: _Side, taker: _Side, decode: _Decode, slowed: float, view: ClusterView) -> bool:
        """Whether the target meets all SLOs, delays none of its own prompts, and prompts gain more than it costs.

        Where nobody decodes yet prompts would be slowed as much as here, beside more decodes hardly more than they are;
        and where prompts wait for blocks they come before a reservation.
        """
        if taker is side or (side.name, taker.name) in self._closed_s or not view.linked(side.name, taker.name):
            return False
        fewest = {Role.DECODE: 0, Role.MIXED: 1, Role.PREFILL: side.batch + 1}[taker.worker.role]
        if taker.batch < fewest or taker.worker.stats.waiting:
            return False
        promise_s = _tightest((taker.promise_s, decode.promise_s))
        if promise_s is not None and self._step_with(taker, decode) > ROLE_ROOM * promise_s:
            return False
        gained_s = slowed * decode.left_tokens * self._step_s(side)
        return self._has_room(taker, decode, ROOM) and self._cost_s(side, taker, decode, view) < gained_s

    # ---- off a worker that is pressed ----------------------------------------------------------------------------

    def _relieve(self, side: _Side, sides: Iterable[_Side], view: ClusterView, now_s: float) -> list[Move]:
        reason = self._pressure(side) if side.worker.state is WorkerState.READY else None
        if reason is None:
            self._pressed_s.pop(side.name, None)
            return []
        moves: list[Move] = []
        if now_s - self._pressed_s.setdefault(side.name, now_s) < PRESSED_S:
            return moves
        for decode in _longest_first(side.decodes):
            if reason is None or len(moves) == A_LOOK or side.num_leaving >= AT_ONCE:
                break
            if decode.key in self._failed_s or decode.key in self._moved_s:
                continue
            takers = [each for each in sides if self._relieves(side, each, decode, view)]
            if takers:
                target = min(takers, key=lambda each: (self._step_with(each, decode), each.name))
                moves.append(_moved(decode, side, target, reason, "relief"))
                reason = self._pressure(side)
        return moves

    def _pressure(self, side: _Side) -> str | None:
        """What the worker cannot keep, if anything."""
        if not side.batch:
            return None
        step_s = self._step_s(side)
        growth = self._growth(side, step_s)
        if side.used_tokens + growth > side.total_tokens:
            return (
                f"its worker has {side.total_tokens - side.used_tokens} tokens of room, and needs {growth} within "
                f"{HORIZON_S:.0f} s"
            )
        if side.promise_s is not None and step_s > side.promise_s:
            return f"a step of its worker takes {1e3 * step_s:.0f} ms, {1e3 * side.promise_s:.0f} ms are promised"
        return None

    def _growth(self, side: _Side, step_s: float) -> int:
        """Tokens that its decodes will have added at the horizon; those of other gateways as many as they can."""
        steps = int(HORIZON_S / step_s) if step_s > 0 else LEAST_LEFT
        ours = sum(min(steps, each.left_tokens) for each in side.decodes)
        return ours + max(0, side.batch - len(side.decodes)) * (ours // max(1, len(side.decodes)))

    def _relieves(self, side: _Side, taker: _Side, decode: _Decode, view: ClusterView) -> bool:
        """Whether the target meets all SLOs with this decode, and the migration saves more than it costs."""
        if taker is side or taker.worker.role is Role.PREFILL or (side.name, taker.name) in self._closed_s:
            return False
        if not view.linked(side.name, taker.name):
            return False
        step_s = self._step_with(taker, decode)
        promise_s = _tightest((taker.promise_s, decode.promise_s))
        if not self._has_room(taker, decode, ROOM) or (promise_s is not None and step_s > ROOM * promise_s):
            return False
        saved_s = decode.left_tokens * max(0.0, self._step_s(side) - step_s)
        if side.used_tokens + self._growth(side, self._step_s(side)) > side.total_tokens:  # somebody is preempted else
            saved_s += self._latency.prefill_seconds(side.worker, decode.context_tokens, 0)
        return self._cost_s(side, taker, decode, view) < saved_s

    def _cost_s(self, side: _Side, taker: _Side, decode: _Decode, view: ClusterView) -> float:
        """The transfer, and computing there what is decoded here meanwhile."""
        link = next((each for each in view.links if (each.owner, each.reader) == (side.name, taker.name)), None)
        num_bytes = decode.context_tokens * side.worker.kv_token_bytes
        if link is not None and link.bytes_per_s > 0:
            transfer_s = link.latency_s + num_bytes / link.bytes_per_s
        else:
            transfer_s = self._latency.transfer_seconds(taker.worker, decode.context_tokens)
        tail = LEAST_LEFT + int(transfer_s / max(self._step_s(side), 1e-6))
        return transfer_s + self._latency.prefill_seconds(taker.worker, tail, decode.context_tokens)

    # ---- a worker with one more or less --------------------------------------------------------------------------

    def _has_room(self, side: _Side, decode: _Decode, share: float | None) -> bool:
        """For the whole answer, and what others there will need, within a share of its blocks; None: for it, now."""
        needed = decode.context_tokens + decode.left_tokens
        if side.worker.state is not WorkerState.READY or needed >= side.worker.capacity_tokens:
            return False
        if share is None:
            return side.used_tokens + needed <= side.total_tokens
        return side.used_tokens + self._growth(side, self._step_s(side)) + needed <= share * side.total_tokens

    def _step_s(self, side: _Side) -> float:
        return self._latency.step_seconds(side.worker, side.batch, side.used_tokens)

    def _step_with(self, side: _Side, decode: _Decode) -> float:
        tokens = side.used_tokens + decode.context_tokens
        return self._latency.step_seconds(side.worker, side.batch + 1, tokens)


def _moved(decode: _Decode, source: _Side, target: _Side, reason: str, kind: str) -> Move:
    source.give(decode)
    target.take(decode)
    return Move(decode.key, source.name, target.name, reason, kind)


def _prompts_wait(worker: WorkerView) -> bool:
    """Whether there is more to compute than a token for each that decodes."""
    return worker.stats.queued_tokens > worker.stats.running


def _longest_first(decodes: Iterable[_Decode]) -> list[_Decode]:
    return sorted(decodes, key=lambda each: (-each.left_tokens, each.key))


def _tightest(promises: Iterable[float | None]) -> float | None:
    return min((each for each in promises if each is not None), default=None)


def _expire(resting: dict[Key, float], now_s: float) -> None:
    for key in [key for key, until_s in resting.items() if until_s <= now_s]:
        del resting[key]
