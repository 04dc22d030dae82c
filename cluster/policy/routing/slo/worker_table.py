"""The estimated load of many workers as columns of numbers, with a row for each worker of the view.

    view, active requests ──changes──> rows ──few: `CostColumns.row`; many: `WorkerTable._derive`──> columns

Sums and counts are exact. Step times are read from tables of each pool's `CostModel`, times the worker's correction.
Knows no request: `slo.shortlist` ranks the workers for one.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress
from operator import is_not

import numpy as np
import numpy.typing as npt

from cluster.policy.active_requests import ActiveRequests
from cluster.policy.estimate.latency import MIN_CHUNK, LatencyPredictor
from cluster.policy.routing.prefix_index import Depth, Match, PrefixIndex
from cluster.policy.routing.router import PlacementQuery, SentWork
from cluster.policy.routing.slo.cost_tables import TOP_BATCH, CostColumns, OwnLoad, PromptSettings, ReportedLoad
from cluster.policy.routing.slo.worker_estimate import MAX_FULL
from cluster.spec import Role
from diptych.view import WorkerState, WorkerView
from workers.config import MISSED_SLO_SLOWDOWN

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.intp]
Behind = dict[int, list[int]]  # row -> cached tokens in host memory only, on a disk only, on a remote server only

REFRESH_S = 5.0  # each row is updated at least this often: corrections fade with time
_MAX_GROUPS = 1 << 10
_ONE_BY_ONE = 24  # more changed rows are derived with numpy


class WorkerTable:
    """Owned by a router; the only reader of `ActiveRequests.changed`. `tpot_slo_s`: this gateway's."""

    def __init__(
        self, latency: LatencyPredictor, active: ActiveRequests, index: PrefixIndex, tpot_slo_s: float | None
    ) -> None:
        self._latency = latency
        self._tpot_slo_s = tpot_slo_s
        self._active = active
        self._index = index
        self._rates: dict[str, CostColumns] = {}
        self._groups: dict[int, Rows] = {}  # bits of slots -> their rows
        self._reaches: dict[str, Flags] = {}  # reader -> mask is linked to it
        self._unlinked: frozenset[tuple[str, str]] = frozenset()
        self.workers: tuple[WorkerView, ...] = ()
        self._clear()

    # ---- rows ------------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        """An empty row for each of `workers`."""
        count = len(self.workers)
        self.row = {worker.name: row for row, worker in enumerate(self.workers)}
        # Fields of `ReportedLoad` and `OwnLoad`, as plain tuples, which are faster to make.
        self._reported: list[tuple[float, ...]] = [()] * count
        self._own: list[tuple[float, ...]] = [()] * count
        self._own_columns = np.zeros((len(OwnLoad._fields), count))
        self._fresh: set[int] = set()  # rows of `_own` that are not in these columns yet
        self._sent: Mapping[str, SentWork] = {}
        self._membership_version = -1
        self._turn, self._turned_s = 0, 0.0
        self.rates: list[CostColumns] = []
        self.speed: Floats = np.zeros(0)  # of prompts, pool by pool
        self.is_prefill, self.is_decode, self.is_mixed = np.zeros((3, count), dtype=np.bool_)
        self.is_prompt_home, self.is_decode_home = np.zeros((2, count), dtype=np.bool_)  # mixed ones are both
        self._pools = [0] * count  # as `pool`
        self.capacity, self.pool, self._slot = np.zeros((3, count), dtype=np.intp)  # capacity 0: it is not ready
        self._settings = np.zeros((len(PromptSettings._fields), count))
        self.restore_token_s = np.zeros((3, count))  # of a token in host memory, on the disk, and on the remote server
        self.columns = np.zeros((9, count))
        columns: list[Floats] = list(self.columns)  # in the order of `Rates.row`
        self.until_s, self.rest_s, self.ratio, self.batch, self.room_tokens = columns[:5]
        self.step_s, self.tpot_s, self.tpot_token_s = columns[5:8]  # now; with one more; its tokens' share
        self.foreign_s = columns[8]
        self._reaches.clear()

    def update(self, query: PlacementQuery) -> None:
        """Update the rows that have changed."""
        is_new, reported = self._follow_workers(query.view.workers)
        reported |= self._follow_sent(query.sent)
        own = self._due(query.now_s) | {self.row[name] for name in self._active.changed() if name in self.row}
        if is_new:
            own = set(range(len(self.workers)))
        if self._membership_version != self._index.membership_version:
            self._follow_slots()
        changed = {*filter(self._update_own, own), *self._update_reported(reported | own)}
        if len(changed) > _ONE_BY_ONE:
            self._derive(list(changed))
            return
        for row in changed:
            pool = self._pools[row]
            self.columns[:, row] = self.rates[pool].row(self._reported[row], self._own[row], self._bounds[pool])

    def _follow_workers(self, workers: tuple[WorkerView, ...]) -> tuple[bool, set[int]]:
        """Take the workers of a view. Returns whether all rows are new, and the rows of workers that changed."""
        known = self.workers
        if workers is known:
            return False, set()
        self.workers = workers
        changed = set(compress(range(len(workers)), map(is_not, workers, known)))
        moved = [row for row in changed if not _same_place(workers[row], known[row])]
        is_new = len(workers) != len(known) or any(workers[row].name != known[row].name for row in moved)
        if is_new:
            self._clear()
            moved = list(range(len(workers)))
        for row in moved:
            self._set_worker(row, workers[row])
        return is_new, changed

    def _follow_sent(self, sent: Mapping[str, SentWork]) -> set[int]:
        """Take the work sent since the statistics. Returns the rows for which it changed."""
        if not sent and not self._sent:
            return set()
        before, self._sent = self._sent, dict(sent)
        names = [name for name in before.keys() | sent.keys() if before.get(name) is not sent.get(name)]
        return {self.row[name] for name in names if name in self.row}

    def _follow_slots(self) -> None:
        """Take the workers' slots in the prefix index."""
        self._membership_version = self._index.membership_version
        slots = [self._index.slot(each.name, each.incarnation) for each in self.workers]
        self._row_of_slot = {slot: row for row, slot in enumerate(slots)}
        self._slot = np.array(slots, dtype=np.intp)
        self._groups.clear()

    def _due(self, now_s: float) -> set[int]:
        """The rows to refresh now, in turn, so that each one is refreshed every `REFRESH_S`."""
        count = len(self.workers)
        due = min(count, int(count * (now_s - self._turned_s) / REFRESH_S)) if count else 0
        if due <= 0:
            return set()
        first, self._turn, self._turned_s = self._turn, (self._turn + due) % count, now_s
        return {row % count for row in range(first, first + due)}

    def _set_worker(self, row: int, worker: WorkerView) -> None:
        """Update what rarely changes of a worker."""
        rates = self._rates_of(worker)
        if rates not in self.rates:
            self.rates.append(rates)
            self._base_s = np.concatenate([each.decode_base_s for each in self.rates])  # [pools * batches]
            self._token_s = np.concatenate([each.decode_token_s for each in self.rates])
            self.speed = np.append(self.speed, self._latency.prompt_speed(worker))
            self._bounds: list[float] = self.bounds_s(self._tpot_slo_s)
        self.is_prefill[row] = worker.role is Role.PREFILL
        self.is_decode[row] = worker.role is Role.DECODE
        self.is_mixed[row] = worker.role is Role.MIXED
        self.is_prompt_home[row] = worker.role is not Role.DECODE
        self.is_decode_home[row] = worker.role is not Role.PREFILL
        self.capacity[row] = worker.capacity_tokens if worker.state is WorkerState.READY else 0
        self.pool[row] = self._pools[row] = pool = self.rates.index(rates)
        self.restore_token_s[:, row] = self._latency.loaded_token_seconds(worker)
        self._settings[:, row] = (*rates.settings, pool * (TOP_BATCH + 1))
        self._reported[row] = ()  # it has to be derived again
        self._membership_version = -1  # it may be another incarnation

    def _rates_of(self, worker: WorkerView) -> CostColumns:
        """The tables of its pool; equal pools share them."""
        known = self._rates.get(worker.pool)
        if known is None:
            cost, engine = self._latency.plain_cost(worker), self._latency.engine(worker)
            alike = (each for each in self._rates.values() if each.is_of(cost, engine))
            known = self._rates[worker.pool] = next(alike, None) or CostColumns(cost, engine)
        return known

    def _update_reported(self, rows: Iterable[int]) -> Iterator[int]:
        """Update the reported loads of these rows. Yields those that changed."""
        workers, sent, known, correction = self.workers, self._sent, self._reported, self._latency.step_correction
        for row in rows:
            worker = workers[row]
            stats = worker.stats
            seen, queued = stats.running + stats.reserved, stats.queued_tokens
            if since := sent.get(worker.name):
                seen, queued = seen + since.sequences, queued + since.prompt_tokens
            reported = (seen, queued, stats.total_blocks, stats.free_blocks, correction(worker))
            if reported != known[row]:
                known[row] = reported
                yield row

    def _update_own(self, row: int) -> bool:
        """Update our own load. Returns whether it changed."""
        worker = self.workers[row]
        load, ratio = self._active.worker_load(worker.name), self._latency.prompt_correction(worker)
        (ours, prompts, answers), (begun, begun_prompts, begun_answers) = load.assigned, load.begun
        own = (
            *(ours, prompts, prompts + answers, prompts + answers // 2, begun, begun_prompts + begun_answers // 2),
            *(ours + load.num_prompts, load.prompt_tokens, *load.ahead(), ratio),
        )
        if own == self._own[row]:
            return False
        self._own[row] = own
        self._fresh.add(row)
        return True

    def _derive(self, changed: list[int]) -> None:
        """The estimates of `WorkerEstimate` and `LatencyPredictor` for these rows at once."""
        if self._fresh:
            fresh = list(self._fresh)
            self._own_columns[:, fresh] = _columns([self._own[row] for row in fresh], len(OwnLoad._fields))
            self._fresh.clear()
        rows = np.array(changed, dtype=np.intp)
        seen, queued, total, free, step_ratio = _columns(
            [self._reported[row] for row in changed], len(ReportedLoad._fields)
        )
        own = OwnLoad(*self._own_columns.take(rows, axis=1))
        settings = PromptSettings(*self._settings.take(rows, axis=1))
        block, first, ratio = settings.block_size, settings.first, own.prompt_ratio
        kv_tokens = total * block
        foreign = np.maximum(seen - own.requests, 0.0)
        theirs = np.maximum(kv_tokens - free * block - own.prompt_tokens, 0.0) * (foreign > 0.0)
        batch = own.begun + foreign
        at = (np.minimum(batch, TOP_BATCH - 1) + first).astype(np.intp)
        step_s = ratio * (self._base_s.take(at) + self._token_s.take(at) * (own.begun_context_tokens + theirs))
        at = (np.minimum(own.sequences + foreign, TOP_BATCH - 1) + (first + 1.0)).astype(np.intp)
        token_s = step_ratio * self._token_s.take(at)
        self.until_s[rows], self.rest_s[rows], self.ratio[rows] = own.until_s, own.rest_s, ratio
        self.batch[rows], self.step_s[rows] = batch, step_s
        self.room_tokens[rows] = kv_tokens - own.num_tokens - theirs - (1 - MAX_FULL) * kv_tokens
        self.tpot_s[rows] = step_ratio * self._base_s.take(at) + token_s * (own.context_tokens + theirs)
        self.tpot_token_s[rows] = token_s
        self.foreign_s[rows] = 0.0
        tokens = np.maximum(queued - own.waiting_tokens, 0.0) - seen  # other gateways' prompts
        is_queued = tokens > 0.0
        if is_queued.any():
            tokens, pool = np.maximum(tokens, 1.0), self.pool.take(rows)
            work_s, bound_s = self._prompts_seconds(pool, tokens) - settings.empty_s, self.of_pools(self._bounds, pool)
            queue_s, _ = beside(settings, batch, step_s, ratio, work_s * ratio, tokens, bound_s)
            self.foreign_s[rows] = queue_s * is_queued

    def _prompts_seconds(self, pool: Rows, tokens: Floats) -> Floats:
        """Seconds to compute prompts of this many tokens, in one step each, in these pools."""
        if len(self.rates) == 1:
            return self.rates[0].prompts_seconds(tokens)
        seconds = np.empty(len(tokens))
        for number, rates in enumerate(self.rates):
            here = pool == number
            seconds[here] = rates.prompts_seconds(tokens[here])
        return seconds

    def bounds_s(self, tpot_slo_s: float | None) -> list[float]:
        """Longest step with prompts, by pool."""
        return [each.bound_s(tpot_slo_s) for each in self.rates]

    def beside(self, work_s: Floats, tokens: Floats | float, tpot_slo_s: float | None) -> tuple[Floats, Flags]:
        """As `beside`, for each row."""
        settings, bound_s = PromptSettings(*self._settings), self.of_pools(self.bounds_s(tpot_slo_s), self.pool)
        return beside(settings, self.batch, self.step_s, self.ratio, work_s, tokens, bound_s)

    # ---- columns of a request --------------------------------------------------------------------------------

    def fitting(self, query: PlacementQuery) -> Flags:
        """Ready workers that can hold the request."""
        fits: Flags = self.capacity > query.request.num_tokens
        for name in query.avoid:
            if name in self.row:
                fits[self.row[name]] = False
        return fits

    def cached(self, query: PlacementQuery, depths: Sequence[Depth]) -> tuple[Floats | None, int, Behind]:
        """Cached tokens of the prompt by row (None: no worker has any), their maximum, and those behind the device."""
        cached, deepest, most = None, 0, query.request.num_tokens - 1
        behind, known = Behind(), None
        for tokens, holders, slots in depths:
            if slots is not known:
                known = slots
                behind |= {row: slots[slot] for slot in slots if (row := self._row_of_slot.get(slot)) is not None}
            if len(rows := self._rows(holders)):
                cached = np.zeros(len(self.workers)) if cached is None else cached
                cached[rows] = held = min(tokens, most)
                deepest = max(deepest, held)
        return cached, deepest, behind

    def lendable(self, row: int, match: Match) -> int:
        """As `LatencyPredictor.lendable`."""
        return self._latency.lendable(self.workers[row], match)

    def of_pools(self, values: Sequence[float], pool: Rows) -> Floats | float:
        """The value of each of these pools; one number if there is one kind of pool."""
        return values[0] if len(values) == 1 else np.array(values)[pool]

    def _rows(self, holders: int) -> Rows:
        """The rows of these workers. Cached, because popular prefixes have the same holders again and again."""
        rows = self._groups.get(holders)
        if rows is None:
            if len(self._groups) >= _MAX_GROUPS:
                self._groups.clear()
            packed = np.frombuffer(holders.to_bytes(holders.bit_length() + 7 >> 3, "little"), np.uint8)
            flags = np.unpackbits(packed, bitorder="little")
            is_there = (self._slot >= 0) & (self._slot < len(flags))
            held = flags[np.where(is_there, self._slot, 0)].astype(np.bool_)
            rows = self._groups[holders] = np.flatnonzero(held & is_there)
        return rows

    def linked_to(self, query: PlacementQuery, reader: str) -> Flags:
        """The workers that are linked to this reader."""
        if self._unlinked is not query.view.unlinked:
            self._reaches.clear()
            self._unlinked = query.view.unlinked
        reach = self._reaches.get(reader)
        if reach is None:
            reach = self._reaches[reader] = np.ones(len(self.workers), np.bool_)
            owners = {reader} | {owner for owner, to in self._unlinked if to == reader}
            reach[[self.row[owner] for owner in owners if owner in self.row]] = False
        return reach


def beside(
    settings: PromptSettings,
    batch: Floats,
    step_s: Floats,
    ratio: Floats | float,
    work_s: Floats,
    tokens: Floats | float,
    bound_s: Floats | float,
) -> tuple[Floats, Flags]:
    """Seconds of prompts beside each row's decodes, and whether these still meet their SLO.

    A decode step of `batch` takes `step_s`, and one with prompts at most `bound_s`. Uncorrected costs are those of the
    row over `ratio`.
    """
    is_busy = batch * settings.has_mixed_steps > 0.0
    bound_s = np.where(is_busy, bound_s, np.inf)
    token_s, least = np.maximum(work_s, 1e-12) / tokens, np.minimum(float(MIN_CHUNK), tokens)
    chunk = (bound_s - step_s) / token_s
    is_able = chunk >= least
    if not is_able.all():
        chunk = np.where(is_able, chunk, (bound_s * ratio - step_s) / token_s)  # uncorrected costs
        is_able = chunk >= least
        chunk = np.where(is_able, chunk, np.maximum((MISSED_SLO_SLOWDOWN - 1) * step_s / token_s, MIN_CHUNK))
    chunk = np.minimum(np.minimum(chunk, np.maximum(settings.most_tokens - batch, 1.0)), tokens)
    each_s = np.where(is_busy, step_s, settings.empty_s * ratio)
    return work_s + np.ceil(tokens / chunk) * each_s, is_able


def _columns(rows: Sequence[tuple[float, ...]], width: int) -> Floats:
    return np.fromiter(chain.from_iterable(rows), np.float64, len(rows) * width).reshape(len(rows), width).T


def _same_place(worker: WorkerView, known: WorkerView) -> bool:
    return (
        worker.name == known.name
        and worker.state is known.state
        and worker.role is known.role
        and worker.incarnation == known.incarnation
        and worker.pool == known.pool
        and worker.capacity_tokens == known.capacity_tokens
    )
