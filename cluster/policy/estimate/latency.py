"""Predicts TTFT and TPOT of a placement. Pure.

Costs are `PoolSpec.cost`, or defaults for a pool without one. Those of a pool are corrected for each worker by the
measured times of prompts and answers, defaults by what the worker's engine has learned of its steps.
"""

from msgspec import Struct

from cluster.policy.active_requests import ActiveRequest, ActiveRequests, WorkerLoad
from cluster.policy.estimate.correction import Corrections
from cluster.policy.routing.picking import num_sequences
from cluster.policy.routing.prefix_index import Match
from cluster.policy.routing.router import PlacementQuery
from cluster.spec import ClusterSpec
from diptych.view import WorkerView
from workers.config import ADAPTIVE_MARGIN, MISSED_SLO_SLOWDOWN, RESTORED_SHARE, EngineConfig
from workers.costs import CostModel, LinearCost

_MOSTLY_WAITED = 2.0  # times the compute time: a prompt that took longer mostly waited
_MAX_PROMPT_SHARE = 0.3  # of an answer's time: with more of it spent on prompts, it is no sample of decode steps
_MAX_STEPS = 32  # of one answer that count as samples
WHOLE_PROMPTS = ("static", "orca", "prefill-first")  # batching policies that do not cut prompts
APART = ("static", "prefill-first", "prefill-only")  # batching policies whose steps with prompts have no decodes
MIN_CHUNK = 16  # prompt tokens; a smaller chunk beside decodes does not pay
ADAPTER_BYTES_S = 1e9  # at which workers load adapters, as assumed: a file in memory takes less, one on a disk more
_YARDSTICK = 1024  # prompt tokens by which the speeds of pools are compared
_MAX_SCALED = 1024  # scaled cost models in memory


class Decodes(Struct, frozen=True, gc=False):
    """The decodes of a worker: sequences, the tokens they attend to, and their tightest SLO."""

    batch: int
    context_tokens: int
    tpot_slo_s: float | None


_NONE = Decodes(0, 0, None)


class _Pool(Struct, frozen=True):
    """Configuration and step costs of a pool's workers."""

    engine: EngineConfig
    cost: CostModel
    is_given: bool  # the pool has a `cost`
    is_apart: bool
    is_cutting: bool
    margin: float  # of a TPOT SLO that a step with prompts may take
    host_bytes: int  # of a worker's host cache

    @classmethod
    def of(cls, engine: EngineConfig, cost: CostModel | None, host_bytes: int = 0) -> "_Pool":
        batching = engine.batching
        margin = ADAPTIVE_MARGIN if batching == "adaptive" else 1.0
        is_cutting, is_apart = batching not in WHOLE_PROMPTS, batching in APART
        return cls(engine, cost or LinearCost(), cost is not None, is_apart, is_cutting, margin, host_bytes)


class _Pools(dict[str, _Pool]):
    """Pools by name; defaults for an unknown one."""

    _DEFAULT = _Pool.of(EngineConfig(), None)

    def __missing__(self, name: str) -> _Pool:
        return self._DEFAULT


class LatencyPredictor:
    """Owned by a Policy. `spec`: the pools' costs and engines, and the gateway's SLO."""

    def __init__(self, spec: ClusterSpec, active: ActiveRequests) -> None:
        self._active = active
        self._pools = _Pools((each.name, _Pool.of(each.engine, each.cost, each.cache.host or 0)) for each in spec.pools)
        self._speeds = _speeds(spec)
        self._tpot_slo_s = spec.gateway.slo.tpot_s
        self._prompts = Corrections()
        self._steps = Corrections()
        self._scaled: dict[tuple[str, float], CostModel] = {}  # pool, ratio -> its costs times that
        self._now_s = 0.0  # the latest time seen

    def has_costs(self, worker: WorkerView) -> bool:
        """Whether the worker's pool has a `cost`."""
        return self._pools[worker.pool].is_given

    def prompt_speed(self, worker: WorkerView) -> float:
        """Prefill speed as a share of the fastest pool's; 1 where costs are not known."""
        return self._speeds.get(worker.pool, 1.0)

    def knows(self, prefill: WorkerView, decode: WorkerView) -> bool:
        """Whether predictions for these two workers rest on more than default costs."""
        return all(self.has_costs(worker) or worker.stats.steps > 0 for worker in (prefill, decode))

    def kv_tokens(self, worker: WorkerView) -> int:
        """Tokens that fit into the worker's KV pool."""
        return worker.stats.total_blocks * self.engine(worker).block_size

    def free_tokens(self, worker: WorkerView) -> int:
        return worker.stats.free_blocks * self.engine(worker).block_size

    def prefill_seconds(self, worker: WorkerView, num_tokens: int, cached_tokens: int) -> float:
        """Seconds to compute `num_tokens` after `cached_tokens` beside the worker's decodes, without the queue."""
        return self.prefill_beside(worker, num_tokens, cached_tokens, self._decodes(worker))[0]

    def prefill_beside(
        self, worker: WorkerView, num_tokens: int, cached_tokens: int, decodes: Decodes
    ) -> tuple[float, int]:
        """Seconds and steps of a prefill beside these decodes; 0 steps: the decodes would miss their SLO.

        Chunks are those of `workers.engine.batching`, and each step has all decodes.
        """
        pool = self._pools[worker.pool]
        cost = self._corrected(pool, worker)
        if pool.is_apart:
            decodes = _NONE
        batch, context_tokens = decodes.batch, decodes.context_tokens
        chunk, is_able = max(1, num_tokens), True
        if pool.is_cutting:
            within, is_able = _chunk(pool, cost, num_tokens, cached_tokens, decodes)
            chunk = min(chunk, within)
        whole, rest = divmod(num_tokens, chunk)
        seconds = 0.0
        if whole:
            first = cached_tokens + (whole - 1) * chunk // 2
            seconds = whole * cost.mixed_seconds(((chunk, first),), batch, context_tokens)
        if rest:
            seconds += cost.mixed_seconds(((rest, cached_tokens + num_tokens - rest),), batch, context_tokens)
        return seconds, whole + bool(rest) if is_able else 0

    def _decodes(self, worker: WorkerView) -> Decodes:
        """Decodes that run or have a slot there: ours, and those of other gateways by the worker's statistics.

        Those of other gateways are assumed to have this gateway's SLO.
        """
        worker_load = self._active.worker_load(worker.name)
        (batch, prompts, answers), tightest_s = worker_load.assigned, worker_load.tightest_s
        context_tokens = prompts + answers // 2
        foreign = worker.stats.running + worker.stats.reserved - batch - worker_load.num_prompts
        if foreign > 0:
            batch, context_tokens = batch + foreign, context_tokens + max(0, self._used_tokens(worker) - prompts)
            if self._tpot_slo_s is not None and (tightest_s is None or self._tpot_slo_s < tightest_s):
                tightest_s = self._tpot_slo_s
        return Decodes(batch, context_tokens, tightest_s)

    def prompt_correction(self, worker: WorkerView) -> float:
        """Measured seconds of prompts there per second predicted by the cost model."""
        if self.has_costs(worker):
            return self._prompts.ratio(worker.name, self._now_s)
        return worker.stats.prompt_ratio

    def queue_seconds(self, query: PlacementQuery, worker: WorkerView) -> float:
        """Seconds of the prompts ahead: ours by their predictions, those of other gateways by their tokens."""
        self._now_s = max(self._now_s, query.now_s)
        ours = self._active.worker_load(worker.name)
        foreign = _foreign_tokens(query, worker, ours)
        foreign_s = self.prefill_seconds(worker, foreign, 0) if foreign else 0.0
        return ours.ahead_s(query.now_s) + foreign_s

    def adapter_seconds(self, query: PlacementQuery, worker: WorkerView) -> float:
        """Seconds to load the request's adapter there first; 0 if it needs none, or the worker has it."""
        adapter = query.request.adapter
        if adapter is None or adapter.id in worker.stats.adapters:
            return 0.0
        return adapter.num_bytes / ADAPTER_BYTES_S

    def ttft_seconds(self, query: PlacementQuery, worker: WorkerView, cached_tokens: int) -> float:
        """Seconds from now to the first token, if the prompt is computed there."""
        new_tokens = max(1, query.request.num_tokens - cached_tokens)
        waiting_s = self.queue_seconds(query, worker) + self.adapter_seconds(query, worker)
        return waiting_s + self.prefill_seconds(worker, new_tokens, cached_tokens)

    def transfer_seconds(self, worker: WorkerView, num_tokens: int) -> float:
        """Seconds to transfer the KV of this many tokens to the worker over an idle link."""
        return self.plain_cost(worker).transfer_seconds(num_tokens * worker.kv_token_bytes)

    def found(self, worker: WorkerView, match: Match, num_tokens: int) -> tuple[int, float]:
        """Tokens of a prompt that its worker need not compute, and the seconds to copy them to the device.

        The worker restores what it has in host memory only where that is faster than computing it. It reads at most
        half of its host cache from its disk and its remote server, and computes from the front meanwhile until the two
        meet (`workers.engine.race`), so reading takes no time of its own. It reads one store after the other, since a
        prompt is read from its end.
        """
        most = num_tokens - 1
        tokens, copied = min(match.ready_tokens, most), 0
        if tokens == min(match.tokens, most):
            return tokens, 0.0
        cost, (copy_s, disk_s, remote_s) = self.cost(worker), self.restore_token_seconds(worker)
        in_stores = match.disk_tokens + match.remote_tokens
        readable = min(in_stores, self._pools[worker.pool].host_bytes // 2 // max(1, worker.kv_token_bytes))
        read_s = (match.disk_tokens * disk_s + match.remote_tokens * remote_s) * readable / max(1, in_stores)
        for found, load_s in ((match.host_tokens, 0.0), (readable, read_s)):
            if (count := min(found, most - tokens)) <= 0:
                continue
            compute_s = cost.prefill_seconds(num_tokens - tokens, tokens)
            compute_s -= cost.prefill_seconds(num_tokens - tokens - count, tokens + count)
            if count * copy_s >= compute_s:
                break
            restored = int(count * compute_s / (compute_s + load_s))
            tokens, copied = tokens + restored, copied + restored
        return tokens, copied * copy_s

    def restore_token_seconds(self, worker: WorkerView) -> tuple[float, float, float]:
        """Seconds to copy a token's KV from the worker's host memory to its device, and to read it from its disk and
        from its remote server.
        """
        copy_s = self.plain_cost(worker).swap_seconds(worker.kv_token_bytes) / 2
        return copy_s, worker.disk_byte_s * worker.kv_token_bytes, worker.remote_byte_s * worker.kv_token_bytes

    def loaded_token_seconds(self, worker: WorkerView) -> tuple[float, float, float]:
        """About how many seconds a prompt takes for each token that is in host memory, on the disk or on the server."""
        compute_s = self.plain_cost(worker).prefill_seconds(_YARDSTICK) / _YARDSTICK
        copy_s, *reads_s = self.restore_token_seconds(worker)
        disk_s, remote_s = (read_s and copy_s + compute_s * read_s / (compute_s + read_s) for read_s in reads_s)
        return copy_s, disk_s, remote_s

    def lent_seconds(self, owner: WorkerView, has: Match, reader: Match, num_tokens: int) -> float:
        """Seconds in which the owner restores what a reader lacks of these tokens."""
        restored = max(0, num_tokens - max(has.ready_tokens, reader.ready_tokens))
        return restored * self.restore_token_seconds(owner)[0]

    def lendable(self, worker: WorkerView, match: Match) -> int:
        """Tokens that the worker can lend: what its free blocks take of those in host memory, none on a disk."""
        return match.ready_tokens + min(match.host_tokens, int(RESTORED_SHARE * self.free_tokens(worker)))

    def tpot_seconds(self, query: PlacementQuery, worker: WorkerView) -> float:
        """Seconds of a decode step once this request and all with a reserved slot decode there."""
        self._now_s = max(self._now_s, query.now_s)
        return self.step_seconds(worker, *self._batch_with(query, worker))

    def plain_tpot_seconds(self, query: PlacementQuery, worker: WorkerView) -> float:
        """The same without corrections."""
        return self._plain_step_seconds(worker, *self._batch_with(query, worker))

    def _batch_with(self, query: PlacementQuery, worker: WorkerView) -> tuple[int, int]:
        return num_sequences(query, worker) + 1, self._used_tokens(worker) + query.request.num_tokens

    def step_seconds(self, worker: WorkerView, batch: float, context_tokens: float) -> float:
        """Seconds of a decode step there with this many sequences and tokens."""
        return self._plain_step_seconds(worker, batch, context_tokens) * self.step_correction(worker)

    def step_correction(self, worker: WorkerView) -> float:
        """Measured seconds of decode steps there per second predicted by the cost model."""
        if self.has_costs(worker):
            return self._steps.ratio(worker.name, self._now_s)
        return worker.stats.decode_ratio

    def _plain_step_seconds(self, worker: WorkerView, batch: float, context_tokens: float) -> float:
        return self._pools[worker.pool].cost.decode_seconds(round(batch), round(context_tokens))

    def _used_tokens(self, worker: WorkerView) -> int:
        return worker.stats.used_blocks * self.engine(worker).block_size

    def learn_prompt(self, work: ActiveRequest, compute_s: float | None = None) -> None:
        """Learn from a computed prompt. Of prompts that end together, the first one counts with all the time.

        Its worker spent `compute_s` from the first step on. A prompt that took far longer waited for something, such as
        memory, which says nothing about the worker's speed.
        """
        assert work.prefilled_s is not None, "its first token has arrived"
        self._now_s = max(self._now_s, work.prefilled_s)
        if work.prefill_s <= 0.0 or work.prefilled_s <= max(work.began_s, work.reserved_s):
            return
        measured_s, predicted_s = max(0.0, work.prefilled_s - work.turn_s), work.prefill_s / work.correction
        if compute_s is not None and measured_s > _MOSTLY_WAITED * compute_s:
            measured_s = compute_s
        self._prompts.learn(work.prefill, measured_s, predicted_s, work.prefilled_s)

    def learn_steps(self, work: ActiveRequest, num_tokens: int, now_s: float) -> None:
        """Learn from an answer of this many tokens, the first one included."""
        self._now_s = max(self._now_s, now_s)
        if work.prefilled_s is None or num_tokens < 2 or work.plain_tpot_s <= 0.0 or now_s <= work.prefilled_s:
            return
        if self._active.prompt_seconds_beside(work) > _MAX_PROMPT_SHARE * (now_s - work.prefilled_s):
            return  # many of its steps had prompts
        steps = min(num_tokens - 1, _MAX_STEPS)
        measured_s = (now_s - work.prefilled_s) / (num_tokens - 1)
        self._steps.learn(work.decode, measured_s * steps, work.plain_tpot_s * steps, now_s)

    def cost(self, worker: WorkerView) -> CostModel:
        """The worker's step costs, corrected by its prompts' times."""
        return self._corrected(self._pools[worker.pool], worker)

    def _corrected(self, pool: _Pool, worker: WorkerView) -> CostModel:
        ratio = worker.stats.prompt_ratio
        if pool.is_given:
            ratio = self._prompts.rounded(worker.name, self._now_s) or 0.01
        if ratio == 1.0:
            return pool.cost
        cost = self._scaled.get((worker.pool, ratio))
        if cost is None:
            if len(self._scaled) >= _MAX_SCALED:
                self._scaled.clear()
            cost = self._scaled[worker.pool, ratio] = pool.cost.scaled(ratio)
        return cost

    def plain_cost(self, worker: WorkerView) -> CostModel:
        """The pool's step costs, without corrections."""
        return self._pools[worker.pool].cost

    def engine(self, worker: WorkerView) -> EngineConfig:
        """The engine configuration of the worker's pool."""
        return self._pools[worker.pool].engine


def _chunk(pool: _Pool, cost: CostModel, num_tokens: int, cached_tokens: int, decodes: Decodes) -> tuple[int, bool]:
    """About how many prompt tokens fit into a step, and whether the decodes still meet their SLO.

    If corrected costs leave no time, uncorrected ones decide, because the engine chunks prompts by them.
    """
    batch, bound_s, own_s = decodes.batch, decodes.tpot_slo_s, pool.engine.tpot_slo_s
    budget = max(1, pool.engine.max_batch_tokens - batch)
    if own_s is not None and (bound_s is None or own_s < bound_s):
        bound_s = own_s
    if not batch or bound_s is None:
        return budget, True
    context_tokens, midway = decodes.context_tokens, cached_tokens + num_tokens // 2
    for each in (cost,) if cost is pool.cost else (cost, pool.cost):
        within = each.prompt_tokens_within(bound_s * pool.margin, midway, (), batch, context_tokens)
        if within >= min(MIN_CHUNK, num_tokens):
            return min(budget, max(1, within)), True
    loose_s = MISSED_SLO_SLOWDOWN * cost.decode_seconds(batch, context_tokens)
    within = cost.prompt_tokens_within(loose_s, midway, (), batch, context_tokens)
    return min(budget, max(MIN_CHUNK, within)), False


def _foreign_tokens(query: PlacementQuery, worker: WorkerView, ours: WorkerLoad) -> int:
    """Queued prompt tokens of other gateways; each decode accounts for one queued token."""
    stats, sent = worker.stats, query.sent_to(worker.name)
    queued, sequences = stats.queued_tokens + sent.prompt_tokens, stats.running + stats.reserved + sent.sequences
    return max(0, queued - ours.prompt_tokens - sequences)


def _speeds(spec: ClusterSpec) -> dict[str, float]:
    """Prefill speeds by pool; empty where any pool has no `cost`."""
    alone_s = {pool.name: pool.cost.prefill_seconds(_YARDSTICK) for pool in spec.pools if pool.cost is not None}
    if len(alone_s) < len(spec.pools) or min(alone_s.values()) <= 0.0:
        return {}
    return {name: min(alone_s.values()) / each_s for name, each_s in alone_s.items()}
