"""One prompt whose prefix is in a store, in virtual time: never much slower than reading it or computing it."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.driving import engine, request, result
from workers.costs import LinearCost
from workers.engine.blocks import prefix_hashes
from workers.engine.cache_log import Tier
from workers.engine.engine import Engine
from workers.engine.estimate import plan_seconds
from workers.engine.step import StepPlan
from workers.request import TokensOut
from workers.stats import TierStats

SIZE = 16
BLOCK_BYTES = 1000


class TimedStore:
    """Reads one block after the other, `block_s` each."""

    tier = Tier.DISK
    shared_as = ""

    def __init__(self, names: Iterable[bytes], block_s: float, believed: float = 1.0) -> None:
        self.read_byte_s = believed * block_s / BLOCK_BYTES
        self.now_s = 0.0
        self.num_reads = 0
        self._names = set(names)
        self._block_s = block_s
        self._reads: deque[tuple[float, float, Callable[[bool, float], None]]] = deque()
        self._free_s = 0.0

    def watch(self, added: Callable[[bytes, int], None], gone: Callable[[bytes], None]) -> dict[bytes, int]:
        return {}

    def find(self, names: Sequence[bytes], timeout_s: float, found: Callable[[int], None]) -> None:
        found(next((place for place, name in enumerate(names) if name not in self._names), len(names)))

    def write(self, name: bytes, prefix: int | None, block: int, done: Callable[[bool], None]) -> None:
        raise AssertionError("nothing is evicted")

    def read(self, name: bytes, block: int, timeout_s: float, done: Callable[[bool, float], None]) -> None:
        self.num_reads += 1
        self._free_s = max(self._free_s, self.now_s) + self._block_s
        self._reads.append((self._free_s, self.now_s, done))

    @property
    def next_s(self) -> float:
        return self._reads[0][0] if self._reads else float("inf")

    def run(self, until_s: float) -> None:
        """Up to this time."""
        while self.next_s <= until_s:
            self.now_s, begun_s, done = self._reads.popleft()
            done(True, self.now_s - begun_s)
        self.now_s = until_s

    def forget(self, names: Iterable[bytes]) -> None:
        pass

    def stats(self) -> TierStats:
        return TierStats("disk")


class Race:
    """A prompt of `blocks` full blocks that can be read, and `rest` tokens behind. It may arrive while others compute.

    `slow`: how long reading takes beside computing. `others`: tokens of the prompt before it.
    """

    def __init__(self, blocks: int, rest: int, slow: float, cost: LinearCost, budget: int, others: int = 0) -> None:
        self.prompt = tuple(1 + 7 * place % 900 for place in range(blocks * SIZE + rest))
        self.cost, self.budget, self.others = cost, budget, others
        self.cached = blocks * SIZE
        self.block_s = slow * self._seconds(self.cached, 0) / blocks

    def _seconds(self, count: int, first: int) -> float:
        parts = [(min(self.budget, count - done), first + done) for done in range(0, count, self.budget)]
        return sum(self.cost.prefill_seconds(*part) for part in parts)

    @property
    def better_s(self) -> float:
        """Of reading all blocks, also while others compute, and of computing all."""
        before_s = self._seconds(self.others, 0)
        read_s = max(before_s, self.cached // SIZE * self.block_s)
        return min(
            read_s + self._seconds(len(self.prompt) - self.cached, self.cached),
            before_s + self._seconds(len(self.prompt), 0),
        )

    def run(self, believed: float = 1.0) -> float:
        """Seconds until its first token, if reads are believed to take `believed` times as long as they do."""
        store = TimedStore(prefix_hashes(self.prompt[: self.cached], SIZE), self.block_s, believed)
        subject = engine(
            block_size=SIZE,
            kv_blocks=2000,
            host_cache_blocks=400,
            max_batch_tokens=self.budget,
            context_length=4096,
            cost=self.cost,
            block_bytes=BLOCK_BYTES,
            stores=[store],
        )
        plan: StepPlan | None = None
        if self.others:
            subject.add(request("others", (1000 - 1,) * self.others, max_tokens=1), 0.0, hold=False)
            plan = subject.schedule(0.0)
        subject.add(request("r", self.prompt, max_tokens=1), 0.0, hold=False)
        while True:
            plan = plan or self._next(subject, store)
            took_s = plan_seconds(self.cost, plan)
            store.run(store.now_s + took_s)
            subject.commit(plan, result(plan, took_s), store.now_s)
            if any(isinstance(each, TokensOut) and each.key == "r/0" for each in subject.drain()):
                subject.check()
                return store.now_s
            plan = None

    def _next(self, subject: Engine, store: TimedStore) -> StepPlan:
        while (plan := subject.schedule(store.now_s)) is None:
            store.run(min(store.next_s, subject.wakes_at_s))
        return plan


COSTS = st.builds(
    LinearCost,
    step_s=st.floats(0.0001, 0.1),
    prefill_token_s=st.floats(1e-6, 0.01),
    prefill_pair_s=st.floats(0.0, 1e-5),
    decode_row_s=st.just(0.0),  # a chunk of one token counts as a decode
    decode_context_s=st.just(0.0),
    swap_byte_s=st.just(0.0),
)


@given(
    blocks=st.integers(1, 100),
    rest=st.integers(1, 200),
    slow=st.floats(0.01, 20.0),
    cost=COSTS,
    budget=st.sampled_from([64, 512, 4096]),
    others=st.sampled_from([0, 0, 7, 64, 600]),
)
@settings(max_examples=150, deadline=None)
def test_it_takes_no_longer_than_the_better_of_reading_and_computing(
    blocks: int, rest: int, slow: float, cost: LinearCost, budget: int, others: int
) -> None:
    race = Race(blocks, rest, slow, cost, budget, others)
    assert race.run() <= 1.05 * race.better_s + 1e-9


@pytest.mark.parametrize("believed", [0.5, 2.0])
@pytest.mark.parametrize("slow", [0.05, 0.25, 0.5, 1.0, 2.0, 4.0])
def test_a_wrong_belief_in_the_speed_of_reads_costs_little(believed: float, slow: float) -> None:
    race = Race(90, 60, slow, LinearCost(step_s=0.005, swap_byte_s=0.0), 512)
    assert race.run(believed) <= 1.1 * race.better_s


@pytest.mark.parametrize(("blocks", "most"), [(8, 0.8), (32, 0.7), (96, 0.6)])
def test_both_at_once_are_faster_than_either(blocks: int, most: float) -> None:
    race = Race(blocks, 16, 1.0, LinearCost(step_s=0.005, swap_byte_s=0.0), 512)
    assert race.run() <= most * race.better_s
