"""Predicts how long a decode worker takes to reserve blocks and a slot, before which the prompt is not sent.

    waiting ──(slot, blocks, credits)──> staged ──first token──> decoding ──last token──> gone
              in order of arrival           holds credits           holds blocks, and grows

Simulates `workers.engine.reservations` and `reservation_queue`: earlier requests first, answers end at the
predicted times. Of other gateways' requests only the worker's statistics are known. Pure.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from cluster.policy.active_requests import ActiveRequest, ActiveRequests
from cluster.policy.estimate.latency import LatencyPredictor
from cluster.policy.routing.router import PlacementQuery
from diptych.view import WorkerView

MIN_STEP_S = 1e-6
MAX_EXACT = 64  # waiting requests ahead; more are extrapolated
_MAX_EVENTS = 512


@dataclass(slots=True)
class _Room:
    """Blocks and sequences of a worker. `staged` blocks and sequences have a reservation but no KV yet."""

    free_blocks: int
    staged_blocks: int
    num_staged: int
    num_running: int

    def reserve(self, blocks: int) -> None:
        self.free_blocks -= blocks
        self.staged_blocks += blocks
        self.num_staged += 1

    def apply(self, event: "_Event") -> None:
        self.free_blocks += event.freed_blocks
        self.staged_blocks -= event.staged_blocks
        self.num_staged -= bool(event.staged_blocks)
        self.num_running += bool(event.staged_blocks) - bool(event.freed_blocks)


@dataclass(frozen=True, slots=True, order=True)
class _Event:
    """A first token, whose `staged_blocks` are credits again, or a last token, which frees blocks."""

    at_s: float
    staged_blocks: int
    freed_blocks: int


class ReservationWait:
    """Owned by a Policy."""

    def __init__(self, latency: LatencyPredictor, active: ActiveRequests) -> None:
        self._latency = latency
        self._active = active

    def seconds(self, query: PlacementQuery, worker: WorkerView) -> float:
        """Seconds until the worker has reserved this request's blocks and slot; 0: it has both free."""
        engine, stats, num_tokens = self._latency.engine(worker), worker.stats, query.request.num_tokens
        assigned = self._active.assigned(worker.name)
        tokens = num_tokens + assigned.prompt_tokens + engine.block_size * (2 * assigned.sequences + 2)
        has_credits = tokens <= engine.block_size * self._credits(worker)
        has_blocks = tokens + assigned.output_tokens <= engine.block_size * min(stats.total_blocks, stats.free_blocks)
        has_slot = max(assigned.sequences, stats.running + stats.reserved) < engine.max_running
        if has_credits and has_blocks and has_slot:
            return 0.0
        return self._simulate(query, worker)

    def _credits(self, worker: WorkerView) -> int:
        """Most blocks that may be reserved for KV that has not arrived."""
        return self._latency.engine(worker).staging_blocks or max(1, worker.stats.total_blocks // 2)

    def _simulate(self, query: PlacementQuery, worker: WorkerView) -> float:
        size, step_s = self._latency.engine(worker).block_size, self._step_s(worker)
        works = self._active.decoding(worker.name)
        waiting = [work for work in works if _waits(work, worker)]
        events, room = self._present(query, worker, [work for work in works if not _waits(work, worker)], step_s)
        heapq.heapify(events)
        sent_s = {name: self._sent_s(name) for name in {work.prefill for work in waiting}}
        at_s = query.now_s
        for work in waiting[:MAX_EXACT]:
            blocks = -(-work.prompt_tokens // size)
            at_s = self._until(at_s, room, events, blocks, worker)
            first_s = max(at_s, query.now_s + sent_s[work.prefill]) + work.prefill_s
            room.reserve(blocks)
            heapq.heappush(events, _Event(first_s, blocks, 0))
            heapq.heappush(events, _Event(first_s + work.output_tokens * step_s, 0, blocks))
        if len(waiting) > MAX_EXACT:
            return (at_s - query.now_s) * len(waiting) / MAX_EXACT
        return self._until(at_s, room, events, -(-query.request.num_tokens // size), worker) - query.now_s

    def _present(
        self, query: PlacementQuery, worker: WorkerView, works: Iterable[ActiveRequest], step_s: float
    ) -> tuple[list[_Event], _Room]:
        """The future events of requests that have a reservation, and the room that they leave."""
        size, stats = self._latency.engine(worker).block_size, worker.stats
        events: list[_Event] = []
        staged = held = num_staged = running = 0
        for work in works:
            blocks = -(-work.prompt_tokens // size)
            first_s = max(query.now_s, work.first_token_s)
            if work.prefilled_s is not None:
                first_s, running = work.prefilled_s, running + 1
                blocks += min(work.output_tokens, int((query.now_s - first_s) / step_s)) // size
            elif work.prefill != worker.name:
                staged, num_staged = staged + blocks, num_staged + 1
                events.append(_Event(first_s, blocks, 0))
            held += blocks
            events.append(_Event(first_s + work.output_tokens * step_s, 0, blocks))
        free = min(stats.free_blocks, stats.total_blocks - held)
        return events, _Room(free, staged, max(num_staged, stats.reserved), max(running, stats.running))

    def _until(self, at_s: float, room: _Room, events: list[_Event], blocks: int, worker: WorkerView) -> float:
        """The first time from `at_s` on with this many blocks and a slot free. Applies the events until then."""
        for _ in range(_MAX_EVENTS):
            while events and events[0].at_s <= at_s:
                room.apply(heapq.heappop(events))
            if not events or self._fits(room, blocks, worker):
                break
            at_s = events[0].at_s
        return at_s

    def _fits(self, room: _Room, blocks: int, worker: WorkerView) -> bool:
        """As `Engine.reserve` decides, without the SLOs of running decodes, which admission checks."""
        engine = self._latency.engine(worker)
        if room.num_running + room.num_staged >= engine.max_running or blocks + room.num_running > room.free_blocks:
            return False
        return room.staged_blocks <= 0 or room.staged_blocks + blocks <= self._credits(worker)

    def _sent_s(self, worker: str) -> float:
        """Seconds of the prompts that were sent to this prefill worker; those that wait for a reservation were not."""
        return sum(work.prefill_s for work in self._active.prefilling(worker) if work.reserved_s)

    def _step_s(self, worker: WorkerView) -> float:
        """Seconds of a step with as many of its requests as fit at once."""
        assigned, engine = self._active.assigned(worker.name), self._latency.engine(worker)
        if not assigned.sequences:
            return self._latency.step_seconds(worker, 1, 0)
        mean = (assigned.prompt_tokens + assigned.output_tokens / 2) / assigned.sequences
        fit = min(engine.max_running, max(1.0, worker.stats.total_blocks * engine.block_size / mean))
        batch = min(assigned.sequences, fit)
        return max(MIN_STEP_S, self._latency.step_seconds(worker, batch, batch * mean))


def _waits(work: ActiveRequest, worker: WorkerView) -> bool:
    """Whether it waits for a reservation on this decode worker."""
    return work.prefill != worker.name and work.prefilled_s is None and not work.reserved_s
