"""The best workers for one request by estimate, out of many: a few operations on the columns of a `WorkerTable`.

`SLORouter` decides by the exact `WorkerEstimate` of the shortlisted workers.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from cluster.policy.routing.prefix_index import NO_MATCH, Depth, Match
from cluster.policy.routing.router import PlacementQuery
from cluster.policy.routing.slo.exhaustive import has_time
from cluster.policy.routing.slo.worker_estimate import PrefillEstimate
from cluster.policy.routing.slo.worker_table import Behind, Flags, Floats, WorkerTable
from diptych.view import WorkerView
from workers.request import SLO


def shortlist(
    table: WorkerTable,
    query: PlacementQuery,
    depths: Callable[[], Sequence[Depth]],
    expected_tokens: int,
    few: int,
) -> "Shortlist | None":
    """The shortlist for this request. `depths`: the cached prefixes of its prompt. None: at most `few` can hold it."""
    if len(query.view.workers) <= few:
        return None
    table.update(query)
    fits = table.fitting(query)
    if np.count_nonzero(fits) <= few:
        return None
    return Shortlist(table, query, fits, *table.cached(query, depths()), expected_tokens)


class Shortlist:
    """Valid until the table's next update. Candidates come in tiers, the preferred ones first."""

    def __init__(
        self,
        table: WorkerTable,
        query: PlacementQuery,
        fits: Flags,
        cached: Floats | None,
        most_cached: int,
        behind: Behind,
        expected_tokens: int,
    ) -> None:
        self._table = table
        self._query = query
        self._cached = cached
        self._most_cached = most_cached
        self._behind = behind
        self._need = query.request.num_tokens + expected_tokens
        self._context = query.request.num_tokens + expected_tokens // 2
        self._fits = fits
        self._alone_s = self._prompt_seconds()
        self._queue_s = np.maximum(table.until_s - query.now_s, table.rest_s) + table.foreign_s
        self._beside: tuple[Floats, Flags] | None = None

    def worker(self, name: str) -> WorkerView:
        return self._table.workers[self._table.row[name]]

    def match(self, worker: WorkerView) -> Match:
        if self._cached is None:
            return NO_MATCH
        row = self._table.row[worker.name]
        return Match(int(self._cached[row]), *self._behind.get(row, ()))

    def _sample_worker(self) -> WorkerView | None:
        """The worker that computes this prompt for another parallel sample."""
        row = self._table.row.get(self._query.sibling_worker)
        return self._table.workers[row] if row is not None and self._fits[row] else None

    def prompts(self, slo: SLO, reader: str = "") -> Iterator[list[WorkerView]]:
        """For prefill: no decode workers, first those without decodes; then decode workers. All linked to `reader`.

        If no worker has time for it, the one that would finish first.
        """
        if (sample_worker := self._sample_worker()) is not None and not reader:
            yield [sample_worker]
            return
        table, fits = self._table, self._fits
        if reader:
            fits = fits & self._table.linked_to(self._query, reader)
        home = fits & table.is_prompt_home
        yield self._best(self._queue_s + self._alone_s, home & (table.batch == 0.0), 2)
        ttft_s, is_able = self._with_decodes(slo)
        yield self._best(ttft_s, home & is_able, 2)
        yield self._best(ttft_s, fits & table.is_decode & is_able, 2)
        if not (fits & is_able).any():
            yield self._best(ttft_s, fits, 1)

    def available_speed(
        self, slo: SLO, estimates: Sequence[PrefillEstimate], speed_of: Callable[[WorkerView], float]
    ) -> float:
        """Speed of all prefill and mixed workers that have time for prompts, in units of the fastest pool's worker."""
        if self._sample_worker() is not None:
            return sum(speed_of(self.worker(estimate.name)) for estimate in estimates if has_time(estimate))
        able = self._fits & self._table.is_prompt_home & self._with_decodes(slo)[1]
        return float(self._table.speed[self._table.pool[able]].sum())

    def mixed(self, slo: SLO, early: float) -> list[WorkerView]:
        """Mixed workers for both phases, whose first token comes within this share of its SLO."""
        table = self._table
        able = self._with_room(self._fits & table.is_decode_home) & table.is_mixed
        if not np.count_nonzero(able):
            return []
        if (sample_worker := self._sample_worker()) is not None:
            return [sample_worker]
        ttft_s, is_able = self._with_decodes(slo)
        soon = able & is_able
        if slo.ttft_s is not None:
            soon &= ttft_s <= early * slo.ttft_s
        meets = soon & self._has_room()
        if slo.tpot_s is not None:
            meets &= self._tpot_s() <= slo.tpot_s
        return [*self._best(ttft_s, meets, 2), *self._best(ttft_s, soon & ~meets, 2)]  # decodes may end until then

    def decodes(self, *, may_colocate: bool) -> Iterator[list[WorkerView]]:
        """For decode: with room, first no prefill workers, then these if they may decode; then without room."""
        home = self._with_room(self._fits & self._table.is_decode_home)
        tpot_s, room = self._tpot_s(), self._has_room()
        yield self._best(tpot_s, home & room, 2)
        able = home | self._with_room(self._fits & self._table.is_prefill) if may_colocate else home
        yield self._best(tpot_s, able & self._table.is_prefill & room, 2) + self._best(tpot_s, home & ~room, 1)
        if not (able & room).any():
            yield self._best(tpot_s, able, 1)

    def _with_room(self, mask: Flags) -> Flags:
        """As `picking.with_room`."""
        capacity = self._table.capacity
        with_room: Flags = mask & (capacity >= self._query.needed_tokens(int(capacity[mask].max(initial=0))))
        return with_room

    def prefix_owner(self, own_tokens: int, reader: str) -> tuple[int, str] | None:
        """The worker that can lend the most tokens, above `own_tokens`, of the reader's dtype and linked to it.

        Of equals none for prefill: it may have the answer to an earlier prompt too, which hashes show only in part.
        Then the one with the fewest readers.
        """
        if self._cached is None or self._most_cached <= own_tokens:
            return None
        table, row = self._table, self._table.row[reader]
        lendable = self._cached.copy() if self._behind else self._cached
        for each in self._behind:
            lendable[each] = table.lendable(each, self.match(table.workers[each]))
        mask = self._fits & (lendable > own_tokens)
        if not np.count_nonzero(mask):
            return None
        mask &= table.linked_to(self._query, reader)
        mask[row] = False
        kv_dtype = table.rates[table.pool[row]].kv_dtype
        alike = [each.kv_dtype == kv_dtype for each in table.rates]
        if not all(alike):
            mask &= np.array(alike)[table.pool]
        rows = mask.nonzero()[0]
        if not len(rows):
            return None
        values = 0.5 * table.is_prefill[rows] - lendable[rows]
        best = rows[values == values.min()]
        row = min(best, key=lambda each: table.workers[each].stats.leases)
        return int(lendable[row]), table.workers[row].name

    def _best(self, values: Floats, mask: Flags, most: int) -> list[WorkerView]:
        """The rows of the mask with the lowest values."""
        rows, found = mask.nonzero()[0], []
        values = values.take(rows)
        for _ in range(min(most, len(rows))):
            least = values.argmin()
            if values[least] == np.inf:
                break
            found.append(self._table.workers[rows[least]])
            values[least] = np.inf
        return found

    def _prompt_seconds(self) -> Floats:
        """Seconds of the prompt alone: a parabola in the cached tokens through three points of each pool's costs."""
        table, num_tokens = self._table, self._query.request.num_tokens
        parabolas = (rates.prompt_parabola(num_tokens, self._most_cached) for rates in table.rates)
        alone, first, second = zip(*parabolas, strict=True)
        seconds = table.of_pools(alone, table.pool)
        if self._cached is not None:
            seconds = seconds + self._cached * (
                table.of_pools(first, table.pool) + self._cached * table.of_pools(second, table.pool)
            )
        seconds = seconds * table.ratio
        if self._behind:
            rows = list(self._behind)
            seconds[rows] += (table.restore_token_s[:, rows] * np.array(list(self._behind.values())).T).sum(axis=0)
        return seconds

    def _with_decodes(self, slo: SLO) -> tuple[Floats, Flags]:
        """Seconds to the first token beside decodes, and whether these leave time for the prompt."""
        if self._beside is None:
            table = self._table
            tokens: Floats | float = float(self._query.request.num_tokens)
            if self._cached is not None:
                tokens = tokens - self._cached
            work_s = self._alone_s - table.ratio * table.of_pools([each.empty_s for each in table.rates], table.pool)
            seconds, is_able = table.beside(work_s, tokens, slo.tpot_s)
            self._beside = self._queue_s + seconds, is_able
        return self._beside

    def _tpot_s(self) -> Floats:
        return self._table.tpot_s + self._table.tpot_token_s * self._context

    def _has_room(self) -> Flags:
        room: Flags = self._need <= self._table.room_tokens
        return room
