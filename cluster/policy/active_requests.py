"""This gateway's active requests by worker, and how long requests decode. Knows no other gateway."""

import math
from collections.abc import Iterator, ValuesView
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from msgspec import Struct

_MEMORY = 1000  # finished answers that the mean covers


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """One active attempt. `new_tokens` of its prompt are not cached; computing them is predicted to take `prefill_s`.

    `first_token_s` is the predicted time of the first token, and the actual one once `prefilled_s` is set. `turn_s` is
    when its prefill started, as far as this gateway can tell.
    """

    key: str
    prefill: str
    decode: str
    prompt_tokens: int
    new_tokens: int
    output_tokens: int  # expected
    prefill_s: float
    began_s: float
    first_token_s: float
    prefilled_s: float | None = None
    turn_s: float = 0.0
    reserved_s: float = 0.0  # when the decode worker reserved its blocks and the prompt was sent; 0: not yet
    correction: float = 1.0  # factor contained in `prefill_s`
    plain_tpot_s: float = 0.0  # predicted by the cost model, without corrections; 0: unknown
    borrows: bool = False  # memory of lenders, too
    is_cut: bool = False  # `prefill` computes the first `new_tokens` only, `decode` the rest
    tpot_slo_s: float | None = None
    computed_s: float = 0.0  # `_computed_s` of its decode worker when it started to decode

    @property
    def decodes(self) -> bool:
        """Whether it has more tokens than the first one, which comes from prefill."""
        return self.output_tokens > 1

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


class DecodeLoad(NamedTuple):
    """Sums over requests that decode on a worker, or will."""

    sequences: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0


_NOTHING = DecodeLoad()


class WorkerLoad(Struct, frozen=True, gc=False):
    """Sums over our requests on one worker; the same object until something changes.

    `assigned`: all requests that decode there, or will. `begun`: those that decode, or whose prompt it computes.
    `tightest_s`: the tightest TPOT SLO of `assigned`. Prompts that wait or run there: their number, tokens, uncached
    tokens and seconds; the first one takes `head_s` and started at `turn_s`.
    """

    assigned: DecodeLoad = _NOTHING
    begun: DecodeLoad = _NOTHING
    tightest_s: float | None = None
    num_prompts: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    prompts_s: float = 0.0
    head_s: float = 0.0
    turn_s: float = 0.0

    def ahead_s(self, now_s: float) -> float:
        """Seconds until our prompts there are computed, one after the other."""
        return self.prompts_s - min(self.head_s, now_s - self.turn_s) if self.num_prompts else 0.0

    def ahead(self) -> tuple[float, float]:
        """`ahead_s` for any time: (when they end; the least that `ahead_s` may be)."""
        return self.turn_s + self.prompts_s, self.prompts_s - self.head_s


_IDLE = WorkerLoad()


class ActiveRequests:
    """Owned by a Policy, read by its router. Every `began` needs an `ended`."""

    def __init__(self) -> None:
        self._works: dict[str, ActiveRequest] = {}
        self._prefilling: dict[str, dict[str, ActiveRequest]] = {}  # worker -> key -> work, oldest first
        self._decoding: dict[str, dict[str, ActiveRequest]] = {}  # from the reservation of a slot to the last token
        self._assigned: dict[str, DecodeLoad] = {}  # sums of `_decoding`
        self._changed: set[str] = set()  # workers changed since the last `changed` call
        self._worker_loads: dict[str, WorkerLoad] = {}  # cache, dropped on change
        self._prefilled_s: dict[str, float] = {}  # worker -> when it last finished a prompt of ours
        self._computed_s: dict[str, float] = {}  # worker -> seconds of our prompts it has computed
        self._ended_s: dict[str, float] = {}  # worker -> when a decode of ours last ended there
        self._num_decoded = 0
        self._mean_decode_s = 0.0

    def __len__(self) -> int:
        return len(self._works)

    def __iter__(self) -> Iterator[ActiveRequest]:
        return iter(self._works.values())

    def find(self, key: str) -> ActiveRequest | None:
        return self._works.get(key)

    def prefilling(self, worker: str) -> ValuesView[ActiveRequest]:
        """Our prompts that wait or run on the worker, oldest first."""
        return self._prefilling.get(worker, {}).values()

    def decoding(self, worker: str) -> ValuesView[ActiveRequest]:
        """Our requests that decode there, or will."""
        return self._decoding.get(worker, {}).values()

    def assigned(self, worker: str) -> DecodeLoad:
        """Sums over `decoding`."""
        return self._assigned.get(worker, _NOTHING)

    def borrowing(self) -> list[ActiveRequest]:
        """Our requests with lenders."""
        return [work for work in self if work.borrows]

    def changed(self) -> set[str]:
        """Workers with changed requests since the last call; for one reader that has a copy."""
        changed, self._changed = self._changed, set()
        return changed

    def worker_load(self, worker: str) -> WorkerLoad:
        """Sums over all our active requests there."""
        known = self._worker_loads.get(worker)
        return self._sum_up(worker) if known is None else known

    def _sum_up(self, worker: str) -> WorkerLoad:
        waiting, decoding = self._prefilling.get(worker), self._decoding.get(worker)
        if not waiting and not decoding:
            self._worker_loads[worker] = _IDLE
            return _IDLE
        sequences = prompts = answers = 0
        tightest_s: float | None = None
        for work in decoding.values() if decoding else ():
            slo_s = work.tpot_slo_s
            if slo_s is not None and (tightest_s is None or slo_s < tightest_s):
                tightest_s = slo_s
            if work.prefilled_s is not None or work.prefill == worker:
                sequences, prompts, answers = sequences + 1, prompts + work.prompt_tokens, answers + work.output_tokens
        begun = DecodeLoad(sequences, prompts, answers) if sequences else _NOTHING
        waiting_tokens = new_tokens = 0
        prompts_s = head_s = turn_s = 0.0
        if waiting:
            head = next(iter(waiting.values()))
            head_s, turn_s = head.prefill_s, self._turn_s(head)
            for work in waiting.values():
                waiting_tokens, new_tokens = waiting_tokens + work.prompt_tokens, new_tokens + work.new_tokens
                prompts_s += work.prefill_s
        found = self._worker_loads[worker] = WorkerLoad(
            assigned=self.assigned(worker),
            begun=begun,
            tightest_s=tightest_s,
            num_prompts=len(waiting or ()),
            prompt_tokens=waiting_tokens,
            new_tokens=new_tokens,
            prompts_s=prompts_s,
            head_s=head_s,
            turn_s=turn_s,
        )
        return found

    def decode_seconds(self, now_s: float) -> float:
        """Mean decode time of a request; infinite until one has ended.

        The total decode time, of running requests too, over the number of finished ones: the maximum likelihood for
        exponential lifetimes with censoring. A mean over finished requests alone would favor short ones at first.
        """
        if not self._num_decoded:
            return math.inf
        running_s = sum(now_s - work.prefilled_s for work in self if work.decodes and work.prefilled_s is not None)
        return self._mean_decode_s + running_s / self._num_decoded

    def ended_s(self, worker: str) -> float:
        """When a decode of ours last ended there."""
        return self._ended_s.get(worker, -math.inf)

    def began(self, work: ActiveRequest) -> None:
        """The request was sent to its workers."""
        assert work.key not in self._works, f"{work.key} is active already"
        self._works[work.key] = work
        self._prefilling.setdefault(work.prefill, {})[work.key] = work
        self._mark_changed(work.prefill)
        if work.decodes:
            self._add_decode(work, work.decode)
            self._mark_changed(work.decode)

    def prompt_seconds_beside(self, work: ActiveRequest) -> float:
        """Predicted seconds that its worker has spent on our prompts since it started to decode."""
        return self._computed_s.get(work.decode, 0.0) - work.computed_s

    def reserved(self, key: str, now_s: float) -> None:
        """Its decode worker reserved blocks, and its prompt is sent now. Unknown keys are ignored."""
        if work := self._works.get(key):
            work.reserved_s = now_s
            self._mark_changed(work.prefill)

    def scale_prompts(self, worker: str, factor: float) -> None:
        """Multiply the predicted times of our prompts that wait or run there."""
        later_s = 0.0
        for work in self.prefilling(worker):
            later_s += (factor - 1.0) * work.prefill_s
            work.first_token_s += later_s
            work.prefill_s *= factor
            self._mark_changed(work.decode)
        self._mark_changed(worker)

    def prefilled(self, key: str, now_s: float) -> ActiveRequest | None:
        """Its first token arrived. Returns the work; None for an unknown key or a repeated call."""
        work = self._works.get(key)
        if work is None or work.prefilled_s is not None:
            return None
        work.turn_s = self._turn_s(work)
        work.prefilled_s = work.first_token_s = now_s
        self._computed_s[work.prefill] = self._computed_s.get(work.prefill, 0.0) + work.prefill_s
        work.computed_s = self._computed_s.get(work.decode, 0.0)
        self._drop(self._prefilling, work.prefill, key)
        self._prefilled_s[work.prefill] = now_s
        self._mark_changed(work.prefill, work.decode)
        return work

    def moved(self, key: str, worker: str) -> None:
        """It now decodes on another worker. Unknown keys are ignored."""
        work = self._works.get(key)
        if work is None:
            return
        if work.decodes:
            self._remove_decode(work)
            self._add_decode(work, worker)
            self._mark_changed(work.decode, worker)
        work.decode = worker
        work.plain_tpot_s = 0.0  # its steps are from two workers, so they are no sample of either

    def ended(self, key: str, now_s: float) -> ActiveRequest | None:
        """It finished, failed or was cancelled. Returns the removed work; None for an unknown key."""
        work = self._works.pop(key, None)
        if work is None:
            return None
        if work.prefilled_s is None:
            self._drop(self._prefilling, work.prefill, key)
            self._mark_changed(work.prefill)
        if work.decodes:
            self._remove_decode(work)
            self._mark_changed(work.decode)
            self._ended_s[work.decode] = now_s
            if work.prefilled_s is not None:
                self._learn(now_s - work.prefilled_s)
        return work

    @contextmanager
    def without(self, key: str) -> Iterator[None]:
        """Hide this waiting prompt, to find out where it would be placed now. Nothing may begin or end meanwhile."""
        work = self._works[key]
        queue = self._prefilling[work.prefill]
        self._prefilling[work.prefill] = {each: other for each, other in queue.items() if each != key}
        decoding, assigned = self._decoding.get(work.decode), self._assigned.get(work.decode)
        if work.decodes:
            self._decoding[work.decode] = dict(decoding or {})
            self._remove_decode(work)
        self._mark_changed(work.prefill, work.decode)
        try:
            yield
        finally:
            self._prefilling[work.prefill] = queue
            if work.decodes and decoding is not None and assigned is not None:
                self._decoding[work.decode], self._assigned[work.decode] = decoding, assigned
            self._mark_changed(work.prefill, work.decode)

    def _mark_changed(self, *workers: str) -> None:
        """Drop the cached sums of these workers and report them in `changed`."""
        self._changed.update(workers)
        for worker in workers:
            self._worker_loads.pop(worker, None)

    def _add_decode(self, work: ActiveRequest, worker: str) -> None:
        self._decoding.setdefault(worker, {})[work.key] = work
        known = self.assigned(worker)
        prompts, answers = known.prompt_tokens + work.prompt_tokens, known.output_tokens + work.output_tokens
        self._assigned[worker] = DecodeLoad(known.sequences + 1, prompts, answers)

    def _remove_decode(self, work: ActiveRequest) -> None:
        self._drop(self._decoding, work.decode, work.key)
        known = self._assigned.pop(work.decode)
        if known.sequences > 1:
            prompts, answers = known.prompt_tokens - work.prompt_tokens, known.output_tokens - work.output_tokens
            self._assigned[work.decode] = DecodeLoad(known.sequences - 1, prompts, answers)

    def _turn_s(self, work: ActiveRequest) -> float:
        return max(work.began_s, work.reserved_s, self._prefilled_s.get(work.prefill, 0.0))

    def _learn(self, decode_s: float) -> None:
        self._num_decoded = min(self._num_decoded + 1, _MEMORY)
        self._mean_decode_s += (decode_s - self._mean_decode_s) / self._num_decoded

    @staticmethod
    def _drop(index: dict[str, dict[str, ActiveRequest]], worker: str, key: str) -> None:
        works = index[worker]
        del works[key]
        if not works:
            del index[worker]

    def check(self) -> None:
        """Prove that both indexes hold exactly the active attempts, each once. Raises AssertionError."""
        waiting = {key for works in self._prefilling.values() for key in works}
        assert waiting == {key for key, work in self._works.items() if work.prefilled_s is None}
        decoding = {key for works in self._decoding.values() for key in works}
        assert decoding == {key for key, work in self._works.items() if work.decodes}
        for worker, works in self._decoding.items():
            prompts = sum(work.prompt_tokens for work in works.values())
            answers = sum(work.output_tokens for work in works.values())
            assert self._assigned[worker] == DecodeLoad(len(works), prompts, answers), worker
        assert self._assigned.keys() == self._decoding.keys()
        for worker, known in list(self._worker_loads.items()):
            assert self._sum_up(worker) == known, worker
        assert all(self._prefilling.values()) and all(self._decoding.values()), "an empty worker was kept"
