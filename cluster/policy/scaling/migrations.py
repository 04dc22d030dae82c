"""Decides which decodes migrate: away from a worker that drains, or that became a prefill worker.

    drain     all decodes of a draining worker, to decode and mixed workers with room
    role      while prompts wait anywhere: decodes of a prefill worker, which had another role before. They limit each
              prompt chunk to the time that their SLO leaves of a step; one decode limits it as much as many

Only over proven links. For `REST_S` after a migration none takes the way back. Pure.

Source: Sun et al., Llumnix (OSDI'24: moving decodes to empty an instance).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from cluster.policy.active_requests import ActiveRequests
from cluster.policy.estimate.latency import Decodes, LatencyPredictor
from cluster.policy.estimate.links import MeasuredLinks
from cluster.spec import Role
from diptych.view import ClusterView, WorkerState, WorkerView

MAX_CONCURRENT = 4  # migrations from one worker
MAX_CONCURRENT_ROLE = 8  # the same, from a prefill worker: it gains only when all decodes are gone
REST_S = 30.0  # after a migration, before others take the way back
RETRY_S = 2.0  # after a failed migration
HORIZON_S = 10.0  # blocks must last this long
ROLE_REASON = "its worker is a prefill worker now, and prompts wait"
ROOM = 0.9  # share of the target's blocks and SLOs that may be used afterwards
ROLE_ROOM = 0.97  # the same of the SLOs, for decodes from a prefill worker: what batching uses
USUAL_PROMPT = 1024  # tokens; the prompt by which the slowdown beside decodes is measured
MIN_LEFT = 16  # expected remaining tokens of an answer, however long it is already

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Move:
    """Migrate the decode of the attempt `key` from one worker to another."""

    key: str
    source: str
    target: str
    reason: str
    kind: str  # "drain" or "role"


@dataclass(frozen=True, slots=True)
class _Decode:
    key: str
    context_tokens: int
    left_tokens: int  # expected remaining tokens
    tpot_slo_s: float | None


@dataclass(slots=True)
class _Load:
    """A worker's load once the running and planned migrations are done.

    `batch`: sequences that decode there or were sent there. `decodes`: those of this gateway that may migrate.
    """

    worker: WorkerView
    batch: int
    used_tokens: int
    total_tokens: int
    decodes: list[_Decode] = field(default_factory=list)
    tpot_slo_s: float | None = None  # the tightest of `decodes`
    num_leaving: int = 0

    @property
    def name(self) -> str:
        return self.worker.name

    def add(self, decode: _Decode) -> None:
        self.batch += 1
        self.used_tokens += decode.context_tokens
        self.tpot_slo_s = _tightest((self.tpot_slo_s, decode.tpot_slo_s))

    def remove(self, decode: _Decode) -> None:
        self.num_leaving += 1
        self.batch -= 1
        self.used_tokens -= decode.context_tokens
        self.decodes.remove(decode)
        self.tpot_slo_s = _tightest(each.tpot_slo_s for each in self.decodes)


class MigrationPlanner:
    """Owned by a Policy. Every planned `Move` needs an `ended`.

    `rebalances`: role migrations are on, too. `tpot_s`: the SLO of requests without one.
    """

    def __init__(
        self, latency: LatencyPredictor, active: ActiveRequests, *, rebalances: bool, tpot_s: float | None
    ) -> None:
        self._latency = latency
        self._links = MeasuredLinks()
        self._active = active
        self._rebalances = rebalances
        self._tpot_s = tpot_s
        self._under_way: dict[str, Move] = {}
        self._failed_until_s: dict[str, float] = {}  # key -> no other try before
        self._closed_until_s: dict[tuple[str, str], float] = {}  # (source, target) -> no such migration before

    def may_move(self, view: ClusterView) -> bool:
        """Whether `plan` may find migrations while the membership stays as it is."""
        return self._rebalances or bool(_draining(view))

    def plan(self, view: ClusterView, contexts: Callable[[], Mapping[str, int]], now_s: float) -> tuple[Move, ...]:
        """The migrations to start now. `contexts`: tokens so far of each attempt that may migrate; called if needed."""
        _expire(self._failed_until_s, now_s)
        _expire(self._closed_until_s, now_s)
        draining = _draining(view)
        if not ((draining or self._rebalances) and (known := contexts())):
            return ()
        loads = self._loads(view, known)
        moves: list[Move] = []
        for name in draining:
            moves += self._drain(loads[name], loads.values(), view)
        if self._rebalances:
            moves += self._clear(loads.values(), view)
        self._under_way.update((move.key, move) for move in moves)
        return tuple(moves)

    def ended(self, move: Move, now_s: float, *, moved: bool) -> None:
        """The migration is over; `moved`: it succeeded."""
        self._under_way.pop(move.key, None)
        if moved:
            self._closed_until_s[move.target, move.source] = now_s + REST_S
        else:
            self._failed_until_s[move.key] = now_s + RETRY_S

    def _loads(self, view: ClusterView, contexts: Mapping[str, int]) -> dict[str, _Load]:
        loads: dict[str, _Load] = {}
        for worker in view.workers:
            if worker.state in (WorkerState.READY, WorkerState.DRAINING):
                total = self._latency.kv_tokens(worker)
                stats, used = worker.stats, total - self._latency.free_tokens(worker)
                seen, ours = stats.running + stats.reserved, self._active.assigned(worker.name).sequences
                load = loads[worker.name] = _Load(worker, max(seen, ours), used, total)
                load.decodes = list(self._decodes(worker.name, contexts))
                load.tpot_slo_s = _tightest(each.tpot_slo_s for each in load.decodes)
        for move in self._under_way.values():
            source, target = loads.get(move.source), loads.get(move.target)
            decode = next((each for each in source.decodes if each.key == move.key), None) if source else None
            if source is not None and decode is not None:
                source.remove(decode)
                if target is not None:
                    target.add(decode)
        return loads

    def _decodes(self, worker: str, contexts: Mapping[str, int]) -> Iterable[_Decode]:
        for work in self._active.decoding(worker):
            context = contexts.get(work.key)
            if context is not None:
                left = max(MIN_LEFT, work.num_tokens - context)
                yield _Decode(work.key, context, left, work.tpot_slo_s or self._tpot_s)

    # ---- drain ---------------------------------------------------------------------------------------------------

    def _drain(self, load: _Load, loads: Iterable[_Load], view: ClusterView) -> list[Move]:
        moves: list[Move] = []
        for decode in _longest_first(load.decodes):
            if load.num_leaving >= MAX_CONCURRENT:
                break
            if decode.key in self._failed_until_s:
                continue
            able = [
                each
                for each in loads
                if each.worker.role is not Role.PREFILL
                and view.linked(load.name, each.name)
                and self._has_room(each, replace(decode, left_tokens=MIN_LEFT), None)
            ]
            targets = [each for each in able if self._has_room(each, decode, 1.0)] or able
            if not targets:
                continue
            target = min(targets, key=lambda each: self._drain_order(each, decode))
            moves.append(_move(decode, load, target, "its worker drains", "drain"))
        return moves

    def _drain_order(self, load: _Load, decode: _Decode) -> tuple[bool, int, int, str]:
        tpot_slo_s = _tightest((load.tpot_slo_s, decode.tpot_slo_s))
        late = tpot_slo_s is not None and self._step_with(load, decode) > tpot_slo_s
        return late, load.batch, load.used_tokens - load.total_tokens, load.name

    # ---- role ----------------------------------------------------------------------------------------------------

    def _clear(self, loads: Iterable[_Load], view: ClusterView) -> list[Move]:
        """Clear prefill workers, the one with the fewest decodes first: it gains only when all of them are gone."""
        ready = [each for each in loads if each.worker.state is WorkerState.READY]
        to_clear = [each for each in ready if each.worker.role is Role.PREFILL and each.decodes]
        if not to_clear or not any(_prompts_wait(each.worker) for each in ready):
            return []
        moves: list[Move] = []
        for load in sorted(to_clear, key=lambda each: (each.batch, each.name)):
            slowed = self._slowed(load)
            for decode in _longest_first(load.decodes):
                if load.num_leaving >= MAX_CONCURRENT_ROLE:
                    break
                if decode.key in self._failed_until_s:
                    continue
                targets = [each for each in ready if self._may_take_over(load, each, decode, slowed, view)]
                if targets:
                    target = min(targets, key=lambda each: self._clear_order(each, decode))
                    moves.append(_move(decode, load, target, ROLE_REASON, "role"))
        return moves

    def _clear_order(self, load: _Load, decode: _Decode) -> tuple[bool, float, str]:
        return load.worker.role is Role.PREFILL, self._step_with(load, decode), load.name

    def _slowed(self, load: _Load) -> float:
        """The share of prefill speed that these decodes cost."""
        decodes = Decodes(load.batch, load.used_tokens, load.tpot_slo_s)
        alone_s, _ = self._latency.prefill_beside(load.worker, USUAL_PROMPT, 0, Decodes(0, 0, None))
        beside_s, _ = self._latency.prefill_beside(load.worker, USUAL_PROMPT, 0, decodes)
        return max(0.0, 1.0 - alone_s / beside_s) if beside_s > 0.0 else 0.0

    def _may_take_over(self, load: _Load, target: _Load, decode: _Decode, slowed: float, view: ClusterView) -> bool:
        """Whether the target meets all SLOs, its own prompts are not slowed, and prompts gain more than it costs.

        A mixed worker without decodes would be slowed by the first one; with decodes, hardly by one more. A worker with
        prompts that wait for blocks grants no reservation before them.
        """
        if (
            target is load
            or (load.name, target.name) in self._closed_until_s
            or not view.linked(load.name, target.name)
        ):
            return False
        fewest = {Role.DECODE: 0, Role.MIXED: 1, Role.PREFILL: load.batch + 1}[target.worker.role]
        if target.batch < fewest or target.worker.stats.waiting:
            return False
        tpot_slo_s = _tightest((target.tpot_slo_s, decode.tpot_slo_s))
        if tpot_slo_s is not None and self._step_with(target, decode) > ROLE_ROOM * tpot_slo_s:
            return False
        gained_s = slowed * decode.left_tokens * self._step_s(load)
        return self._has_room(target, decode, ROOM) and self._cost_s(load, target, decode, view) < gained_s

    def _growth(self, load: _Load, step_s: float) -> int:
        """Tokens that its decodes will add until the horizon; those of other gateways as many as ours on average."""
        steps = int(HORIZON_S / step_s) if step_s > 0 else MIN_LEFT
        ours = sum(min(steps, each.left_tokens) for each in load.decodes)
        return ours + max(0, load.batch - len(load.decodes)) * (ours // max(1, len(load.decodes)))

    def _cost_s(self, load: _Load, target: _Load, decode: _Decode, view: ClusterView) -> float:
        """Seconds of the transfer, and of computing the tokens that are decoded meanwhile."""
        link = self._links.between(view, load.name, target.name)
        num_bytes = decode.context_tokens * load.worker.kv_token_bytes
        if link is not None:
            transfer_s = link.latency_s + num_bytes / link.bytes_per_s
        else:
            transfer_s = self._latency.transfer_seconds(target.worker, decode.context_tokens)
        tail = MIN_LEFT + int(transfer_s / max(self._step_s(load), 1e-6))
        return transfer_s + self._latency.prefill_seconds(target.worker, tail, decode.context_tokens)

    # ---- predictions ---------------------------------------------------------------------------------------------

    def _has_room(self, load: _Load, decode: _Decode, share: float | None) -> bool:
        """Whether the answer and the growth of the other decodes fit into this share of the blocks.

        `share` None: whether the answer alone fits now.
        """
        needed = decode.context_tokens + decode.left_tokens
        if load.worker.state is not WorkerState.READY or needed >= load.worker.capacity_tokens:
            return False
        if share is None:
            return load.used_tokens + needed <= load.total_tokens
        return load.used_tokens + self._growth(load, self._step_s(load)) + needed <= share * load.total_tokens

    def _step_s(self, load: _Load) -> float:
        return self._latency.step_seconds(load.worker, load.batch, load.used_tokens)

    def _step_with(self, load: _Load, decode: _Decode) -> float:
        tokens = load.used_tokens + decode.context_tokens
        return self._latency.step_seconds(load.worker, load.batch + 1, tokens)


def _move(decode: _Decode, source: _Load, target: _Load, reason: str, kind: str) -> Move:
    source.remove(decode)
    target.add(decode)
    return Move(decode.key, source.name, target.name, reason, kind)


def _prompts_wait(worker: WorkerView) -> bool:
    """Whether more tokens are queued than one for each decode."""
    return worker.stats.queued_tokens > worker.stats.running


def _longest_first(decodes: Iterable[_Decode]) -> list[_Decode]:
    return sorted(decodes, key=lambda each: (-each.left_tokens, each.key))


def _tightest(slos: Iterable[float | None]) -> float | None:
    return min((each for each in slos if each is not None), default=None)


def _draining(view: ClusterView) -> list[str]:
    return [worker.name for worker in view.workers if worker.state is WorkerState.DRAINING]


def _expire(resting: dict[Key, float], now_s: float) -> None:
    for key in [key for key, until_s in resting.items() if until_s <= now_s]:
        del resting[key]
