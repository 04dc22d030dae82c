"""Predicts how a worker would serve a request: time to the first token, step time, room in memory.

Prompts are chunked to what the SLOs of decodes leave of each step (`workers.engine.batching`): a worker whose decodes
take most of a step computes prompts slowly, and one whose decodes take all of it should get none.
"""

from collections.abc import Iterator
from operator import itemgetter

from msgspec import Struct

from cluster.policy.active_requests import ActiveRequest, ActiveRequests, WorkerLoad
from cluster.policy.estimate.latency import MIN_CHUNK, Decodes, LatencyPredictor
from cluster.policy.estimate.links import MeasuredLinks
from cluster.policy.routing.prefix_index import Match
from cluster.policy.routing.router import PlacementQuery
from cluster.spec import Role
from diptych.view import WorkerView

MAX_FULL = 0.97  # share of the KV pool that may be assigned
NEAR_S = 0.25  # a time this close counts as now
_MAX_ENDS = 4096  # workers in the cache of ends
PREFILL, DECODE, MIXED = Role.PREFILL, Role.DECODE, Role.MIXED  # finding an Enum's members is slow in Python 3.11


class Decoding(Struct, frozen=True, gc=False):
    """Decodes of a worker at a time: sequences, the tokens they attend to, and the tokens they will have in the end."""

    batch: int
    context_tokens: int
    assigned_tokens: int


class PrefillEstimate(Struct, frozen=True, gc=False):
    """A worker as the prefill worker: it computes the prompt in `steps` (0: its decodes leave no time for it).

    `cached_tokens`: what it need not compute, of which `ready_tokens` are on the device. `batch`: sequences that decode
    there.
    """

    name: str
    role: Role
    cached_tokens: int
    ready_tokens: int
    batch: int
    queue_s: float
    prefill_s: float
    steps: int

    @property
    def ttft_s(self) -> float:
        return self.queue_s + self.prefill_s


class DecodeEstimate(Struct, frozen=True, gc=False):
    """A worker as the decode worker.

    `leaves_time`: it could still compute prompts within this request's SLO; known of prefill workers only. `load_s`:
    seconds to load its adapter, per expected token.
    """

    name: str
    role: Role
    free_tokens: int
    tpot_s: float
    has_room: bool
    leaves_time: bool
    load_s: float = 0.0


class _Ends(Struct, frozen=True, gc=False):
    """The earliest end of each request that decodes on a worker, or will; in order."""

    worker_load: WorkerLoad
    step_s: float
    works: list[tuple[float, ActiveRequest]]


class WorkerEstimate:
    """Owned by a router."""

    def __init__(self, latency: LatencyPredictor, active: ActiveRequests) -> None:
        self._latency = latency
        self._active = active
        self._links = MeasuredLinks()
        self._ends: dict[str, _Ends] = {}  # by worker

    def prefill_estimate(
        self, query: PlacementQuery, worker: WorkerView, match: Match, tpot_slo_s: float | None
    ) -> PrefillEstimate:
        """`tpot_slo_s`: the assumed SLO of the decodes there."""
        latency, worker_load = self._latency, self._active.worker_load(worker.name)
        load = self._with_foreign(query, worker, worker_load, worker_load.begun)  # the others may begin at any time
        cached_tokens, restore_s = latency.found(worker, match, query.request.num_tokens)
        new_tokens = max(1, query.request.num_tokens - cached_tokens)
        decodes = Decodes(load.batch, load.context_tokens, tpot_slo_s)
        prefill_s, steps = latency.prefill_beside(worker, new_tokens, cached_tokens, decodes)
        queue_s = latency.queue_seconds(query, worker) + latency.adapter_seconds(query, worker)
        cached = cached_tokens, min(match.ready_tokens, cached_tokens)
        return PrefillEstimate(worker.name, worker.role, *cached, load.batch, queue_s, restore_s + prefill_s, steps)

    def decode_estimate(
        self, query: PlacementQuery, worker: WorkerView, answer: int, begin_s: float, tpot_slo_s: float | None
    ) -> DecodeEstimate:
        """`answer`: its expected tokens. `begin_s`: when its prompt will be done, on the dispatcher's clock."""
        latency, num_tokens = self._latency, query.request.num_tokens
        load = self._load(query, worker, begin_s)
        capacity = latency.kv_tokens(worker)
        free_tokens, batch = capacity - load.assigned_tokens, load.batch + 1
        context = load.context_tokens + num_tokens + answer // 2
        has_room = num_tokens + answer <= free_tokens - (1 - MAX_FULL) * capacity
        leaves_time = True
        if tpot_slo_s is not None and worker.role is PREFILL:
            leaves_time = latency.cost(worker).mixed_seconds(((MIN_CHUNK, 0),), batch, context) <= tpot_slo_s
        tpot_s = latency.step_seconds(worker, batch, context)
        load_s = latency.adapter_seconds(query, worker) / max(1, answer)
        return DecodeEstimate(worker.name, worker.role, free_tokens, tpot_s, has_room, leaves_time, load_s)

    def _load(self, query: PlacementQuery, worker: WorkerView, at_s: float) -> Decoding:
        """The decodes that will not have ended at `at_s`, whether they have started yet or not.

        A request of ours decodes from its actual or predicted first token, for as many steps as its answer has tokens.
        """
        worker_load = self._active.worker_load(worker.name)
        ours: tuple[int, int, int] = worker_load.assigned
        if ours[0] and at_s - query.now_s > NEAR_S:
            batch, prompts, answers = ours
            for work in self._ended(worker, worker_load, query.now_s, at_s):
                batch, prompts, answers = batch - 1, prompts - work.prompt_tokens, answers - work.output_tokens
            ours = batch, prompts, answers
        return self._with_foreign(query, worker, worker_load, ours)

    def _with_foreign(
        self, query: PlacementQuery, worker: WorkerView, worker_load: WorkerLoad, ours: tuple[int, int, int]
    ) -> Decoding:
        """Our decodes, and those of other gateways: what the worker has beyond ours."""
        (batch, prompts, answers), stats = ours, worker.stats
        context, assigned = prompts + answers // 2, prompts + answers
        seen = stats.running + stats.reserved + query.sent_to(worker.name).sequences
        foreign = seen - worker_load.assigned.sequences - worker_load.num_prompts
        if foreign > 0:
            used = stats.used_blocks * self._latency.engine(worker).block_size
            theirs = max(0, used - worker_load.assigned.prompt_tokens)
            batch, context, assigned = batch + foreign, context + theirs, assigned + theirs
        return Decoding(batch, context, assigned)

    def _ended(self, worker: WorkerView, worker_load: WorkerLoad, now_s: float, at_s: float) -> Iterator[ActiveRequest]:
        """Our requests there that will have ended at `at_s`."""
        sequences, prompts, answers = worker_load.assigned
        step_s = self._latency.step_seconds(worker, sequences, prompts + answers)
        known = self._ends.get(worker.name)
        if known is None or known.worker_load is not worker_load or known.step_s != step_s:
            works = [
                (work.first_token_s + work.output_tokens * step_s, work) for work in self._active.decoding(worker.name)
            ]
            works.sort(key=itemgetter(0))
            if len(self._ends) >= _MAX_ENDS:
                self._ends.clear()
            known = self._ends[worker.name] = _Ends(worker_load, step_s, works)
        for end_s, work in known.works:
            if end_s >= at_s:
                return
            has_begun = work.prefilled_s is not None or work.first_token_s >= now_s
            if has_begun or now_s + work.output_tokens * step_s < at_s:
                yield work

    def transfer_seconds(self, query: PlacementQuery, owner: str, reader: WorkerView, num_tokens: int) -> float:
        """Seconds to move the KV of this many tokens over an idle link, by preflight or else by the cost model."""
        link = self._links.between(query.view, owner, reader.name)
        if link is None or not reader.kv_token_bytes:
            return self._latency.transfer_seconds(reader, num_tokens)
        return link.latency_s + num_tokens * reader.kv_token_bytes / link.bytes_per_s
