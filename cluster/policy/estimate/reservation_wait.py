"""How long a reservation takes: blocks and a slot are reserved before the prompt is sent, or are waited for.

    asked ──(slot, blocks, credits)──> staged ──first token──> decodes ──its last token──> gone
            in order of arrival              holds credits           holds its blocks, and more

Plays forward what `workers.engine.Engine.reserve` and `workers.engine.reservations` would do: those who asked before go
first, answers end when they are expected to. Of other gateways only what the worker's statistics show is known. Pure.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from cluster.policy.active_requests import ActiveRequests, Work
from cluster.policy.estimate.latency import LatencyPredictor
from cluster.policy.routing.router import Ask
from diptych.view import WorkerView

LEAST_STEP_S = 1e-6
MOST_AHEAD = 64  # who asked before and is looked at, one by one
_MOST_EVENTS = 512


@dataclass(slots=True)
class _Room:
    """Blocks that a worker has left, those whose KV is still to come, and how many decode there, or will."""

    free: int
    staged: int
    coming: int
    running: int

    def take(self, blocks: int) -> None:
        self.free -= blocks
        self.staged += blocks
        self.coming += 1

    def happens(self, event: "_Event") -> None:
        self.free += event.freed
        self.staged -= event.staged
        self.coming -= bool(event.staged)
        self.running += bool(event.staged) - bool(event.freed)


@dataclass(frozen=True, slots=True, order=True)
class _Event:
    """A first token (`staged` blocks are credits again), or a last one."""

    at_s: float
    staged: int
    freed: int


class Reserving:
    """Owned by a Policy."""

    def __init__(self, latency: LatencyPredictor, active: ActiveRequests) -> None:
        self._latency = latency
        self._active = active

    def wait_s(self, ask: Ask, worker: WorkerView) -> float:
        """Until the worker has reserved this request's blocks and slot; 0 where it has both."""
        engine, stats, num_tokens = self._latency.engine(worker), worker.stats, ask.request.num_tokens
        assigned = self._active.assigned(worker.name)
        tokens = num_tokens + assigned.prompt_tokens + engine.block_size * (2 * assigned.sequences + 2)
        is_staged = tokens <= engine.block_size * self._credits(worker)
        is_roomy = tokens + assigned.output_tokens <= engine.block_size * min(stats.total_blocks, stats.free_blocks)
        is_few = max(assigned.sequences, stats.running + stats.reserved) < engine.max_running
        if is_staged and is_roomy and is_few:
            return 0.0
        return self._played(ask, worker)

    def _credits(self, worker: WorkerView) -> int:
        """Blocks that prompts may take whose KV is still to come."""
        return self._latency.engine(worker).staging_blocks or max(1, worker.stats.total_blocks // 2)

    def _played(self, ask: Ask, worker: WorkerView) -> float:
        size, step_s = self._latency.engine(worker).block_size, self._step_s(worker)
        works = self._active.decoding(worker.name)
        asked = [work for work in works if _asks(work, worker)]
        events, room = self._now(ask, worker, [work for work in works if not _asks(work, worker)], step_s)
        heapq.heapify(events)
        sent_s = {name: self._sent_s(name) for name in {work.prefill for work in asked}}
        at_s = ask.now_s
        for work in asked[:MOST_AHEAD]:
            blocks = -(-work.prompt_tokens // size)
            at_s = self._until(at_s, room, events, blocks, worker)
            first_s = max(at_s, ask.now_s + sent_s[work.prefill]) + work.prefill_s
            room.take(blocks)
            heapq.heappush(events, _Event(first_s, blocks, 0))
            heapq.heappush(events, _Event(first_s + work.output_tokens * step_s, 0, blocks))
        if len(asked) > MOST_AHEAD:  # the others take as long
            return (at_s - ask.now_s) * len(asked) / MOST_AHEAD
        return self._until(at_s, room, events, -(-ask.request.num_tokens // size), worker) - ask.now_s

    def _now(self, ask: Ask, worker: WorkerView, works: Iterable[Work], step_s: float) -> tuple[list[_Event], _Room]:
        """What will come of those that have a reservation, and the room beside them."""
        size, stats = self._latency.engine(worker).block_size, worker.stats
        events: list[_Event] = []
        staged = held = coming = running = 0
        for work in works:
            blocks = -(-work.prompt_tokens // size)
            first_s = max(ask.now_s, work.first_token_s)
            if work.prefilled_s is not None:
                first_s, running = work.prefilled_s, running + 1
                blocks += min(work.output_tokens, int((ask.now_s - first_s) / step_s)) // size
            elif work.prefill != worker.name:
                staged, coming = staged + blocks, coming + 1
                events.append(_Event(first_s, blocks, 0))
            held += blocks
            events.append(_Event(first_s + work.output_tokens * step_s, 0, blocks))
        free = min(stats.free_blocks, stats.total_blocks - held)
        return events, _Room(free, staged, max(coming, stats.reserved), max(running, stats.running))

    def _until(self, at_s: float, room: _Room, events: list[_Event], blocks: int, worker: WorkerView) -> float:
        """When this many blocks and a slot are free, if not at `at_s`; consumes the `events` until then."""
        for _ in range(_MOST_EVENTS):
            while events and events[0].at_s <= at_s:
                room.happens(heapq.heappop(events))
            if not events or self._fits(room, blocks, worker):
                break
            at_s = events[0].at_s
        return at_s

    def _fits(self, room: _Room, blocks: int, worker: WorkerView) -> bool:
        """As `Engine.reserve` decides, except for the SLOs of those that decode: an admission foresees these."""
        engine = self._latency.engine(worker)
        if room.running + room.coming >= engine.max_running or blocks + room.running > room.free:
            return False
        return room.staged <= 0 or room.staged + blocks <= self._credits(worker)

    def _sent_s(self, worker: str) -> float:
        """Of the prompts that wait or run there; those that wait for a decode worker's word are not there yet."""
        return sum(work.prefill_s for work in self._active.prefilling(worker) if work.reserved_s)

    def _step_s(self, worker: WorkerView) -> float:
        """A step with as many of them as fit at once."""
        assigned, engine = self._active.assigned(worker.name), self._latency.engine(worker)
        if not assigned.sequences:
            return self._latency.step_seconds(worker, 1, 0)
        mean = (assigned.prompt_tokens + assigned.output_tokens / 2) / assigned.sequences
        fit = min(engine.max_running, max(1.0, worker.stats.total_blocks * engine.block_size / mean))
        batch = min(assigned.sequences, fit)
        return max(LEAST_STEP_S, self._latency.step_seconds(worker, batch, batch * mean))


def _asks(work: Work, worker: WorkerView) -> bool:
    """Whether it waits for the worker's word."""
    return work.prefill != worker.name and work.prefilled_s is None and not work.reserved_s
