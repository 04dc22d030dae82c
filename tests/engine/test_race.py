"""One prompt whose prefix is in a store, in virtual time: never much slower than reading it or computing it."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.driving import engine, request, result
from tests.examples import examples
from workers.costs import LinearCost
from workers.engine.blocks import block_hashes
from workers.engine.engine import Engine
from workers.engine.estimate import plan_seconds
from workers.engine.kv_event_log import Tier
from workers.engine.step import StepPlan
from workers.request import TokensOut
from workers.stats import TierStats

SIZE = 16
BLOCK_BYTES = 1000


class Speed:
    """Seconds to read a block, `slower` times as many from `changes_s` on."""

    def __init__(self, block_s: float, changes_s: float = math.inf, slower: float = 1.0) -> None:
        self.block_s = block_s
        self._changes_s = changes_s
        self._slower = slower

    def begun(self, at_s: float) -> "Speed":
        """The same, that much later."""
        return Speed(self.block_s, at_s + self._changes_s, self._slower)

    def read_s(self, begun_s: float, num_blocks: float) -> float:
        """When so many blocks are here, read one after the other."""
        before = min(num_blocks, max(0.0, self._changes_s - begun_s) / self.block_s)
        return begun_s + (before + (num_blocks - before) * self._slower) * self.block_s


class Reads(Protocol):
    """What reads in virtual time."""

    now_s: float

    @property
    def next_s(self) -> float:
        """When the next read ends."""
        ...

    def run(self, until_s: float) -> None:
        """Up to this time."""
        ...


def end_reads(reads: Reads) -> None:
    """Let those in flight end."""
    while reads.next_s < math.inf:
        reads.run(reads.next_s)


class TimedStore:
    """Reads one block after the other."""

    tier = Tier.DISK
    shared_as = ""

    def __init__(self, hashes: Iterable[bytes], speed: Speed, believed: float = 1.0) -> None:
        self.read_byte_s = believed * speed.block_s / BLOCK_BYTES
        self.now_s = 0.0
        self.num_reads = 0
        self.speed = speed
        self._hashes = set(hashes)
        self._reads: deque[tuple[float, float, Callable[[bool, float], None]]] = deque()
        self._free_s = 0.0

    def watch(self, added: Callable[[bytes, int], None], gone: Callable[[bytes], None]) -> dict[bytes, int]:
        return {}

    def find(self, hashes: Sequence[bytes], timeout_s: float, found: Callable[[int], None]) -> None:
        found(next((place for place, block_hash in enumerate(hashes) if block_hash not in self._hashes), len(hashes)))

    def write(self, block_hash: bytes, prefix: int | None, block: int, done: Callable[[bool], None]) -> None:
        raise AssertionError("nothing is evicted")

    def read(self, block_hash: bytes, block: int, timeout_s: float, done: Callable[[bool, float], None]) -> None:
        self.num_reads += 1
        self._free_s = self.speed.read_s(max(self._free_s, self.now_s), 1)
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

    def forget(self, hashes: Iterable[bytes]) -> None:
        pass

    def stats(self) -> TierStats:
        return TierStats("disk")


class Race:
    """A prompt of `blocks` full blocks that can be read, and `rest` tokens behind. It may arrive while others compute.

    `slow`: how long reading takes beside computing; from `changes` of the time to compute on, `slower` times as long.
    `others`: tokens of the prompt before it.
    """

    def __init__(
        self,
        blocks: int,
        rest: int,
        slow: float,
        cost: LinearCost,
        budget: int,
        others: int = 0,
        changes: float = math.inf,
        slower: float = 1.0,
    ) -> None:
        self.prompt = tuple(1 + 7 * place % 900 for place in range(blocks * SIZE + rest))
        self.cost, self.budget, self.others = cost, budget, others
        self.other = tuple(1000 - each for each in self.prompt)
        self.cached = blocks * SIZE
        compute_s = self._seconds(self.cached, 0)
        self.speed = Speed(slow * compute_s / blocks, changes * compute_s, slower)
        self.chunk_s = 0.0  # the longest step that computes what can be read

    def _seconds(self, count: int, first: int) -> float:
        parts = [(min(self.budget, count - done), first + done) for done in range(0, count, self.budget)]
        return sum(self.cost.prefill_seconds(*part) for part in parts)

    @property
    def better_s(self) -> float:
        """Of reading all blocks, also while others compute, and of computing all."""
        before_s = self._seconds(self.others, 0)
        read_s = max(before_s, self.speed.read_s(0.0, self.cached // SIZE))
        return min(
            read_s + self._seconds(len(self.prompt) - self.cached, self.cached),
            before_s + self._seconds(len(self.prompt), 0),
        )

    def run(self, believed: float = 1.0, before: float = 0.0) -> float:
        """Seconds until its first token, if reads are believed to take `believed` times as long as they do.

        `before`: and if those of another prompt, as long, took so many times as long just before.
        """
        hashes = [block_hashes(each[: self.cached], SIZE) for each in (self.prompt, self.other)]
        store = TimedStore((*hashes[0], *hashes[1]), self.speed, believed)
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
        if before:
            store.speed = Speed(before * self.speed.block_s)
            self._ask(subject, store, "before", self.other)
            end_reads(store)
            store.speed, begun_s = self.speed.begun(store.now_s), store.now_s
        plan = self._begin_others(subject, store.now_s)
        return self._ask(subject, store, "r", self.prompt, plan) - (begun_s if before else 0.0)

    def _begin_others(self, subject: Engine, now_s: float) -> StepPlan | None:
        if not self.others:
            return None
        subject.add(request("others", (1000 - 1,) * self.others, max_tokens=1), now_s, hold=False)
        return subject.schedule(now_s)

    def _ask(
        self, subject: Engine, reads: Reads, name: str, prompt: tuple[int, ...], plan: StepPlan | None = None
    ) -> float:
        """When its first token is here. `plan`: is in flight."""
        subject.add(request(name, prompt, max_tokens=1), reads.now_s, hold=False)
        while True:
            while plan is None and (plan := subject.schedule(reads.now_s)) is None:
                reads.run(min(reads.next_s, subject.wakes_at_s))
            took_s = plan_seconds(self.cost, plan)
            if any(chunk.key == "r/0" and chunk.first_position < self.cached for chunk in plan.chunks):
                self.chunk_s = max(self.chunk_s, took_s)
            reads.run(reads.now_s + took_s)
            subject.commit(plan, result(plan, took_s), reads.now_s)
            subject.check()
            if any(isinstance(each, TokensOut) and each.key == f"{name}/0" for each in subject.drain()):
                return reads.now_s
            plan = None


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
@examples(150)
def test_it_takes_no_longer_than_the_better_of_reading_and_computing(
    blocks: int, rest: int, slow: float, cost: LinearCost, budget: int, others: int
) -> None:
    race = Race(blocks, rest, slow, cost, budget, others)
    assert race.run() <= 1.05 * race.better_s + 1e-9


CHANGES = st.sampled_from([1 / 50, 50.0])
ANY_RACE = {
    "blocks": st.integers(1, 100),
    "rest": st.integers(1, 200),
    "slow": st.floats(-2.5, 1.3).map(lambda power: 10**power),
    "cost": COSTS,
    "budget": st.sampled_from([64, 512, 4096]),
    "others": st.sampled_from([0, 0, 7, 64, 600]),
}


@given(before=CHANGES, race=st.builds(Race, **ANY_RACE))
@examples(150)
def test_a_store_that_becomes_faster_or_slower_between_prompts_costs_at_most_a_chunk(before: float, race: Race) -> None:
    assert race.run(before, before) <= 1.05 * (race.better_s + race.chunk_s) + 1e-9


@given(race=st.builds(Race, **ANY_RACE, changes=st.floats(0.01, 2.0), slower=CHANGES))
@examples(150)
def test_a_store_that_becomes_faster_or_slower_within_a_prompt_costs_at_most_two_chunks(race: Race) -> None:
    assert race.run() <= 1.05 * race.better_s + 2 * race.chunk_s + 1e-9


@pytest.mark.parametrize("blocks", [31, 95])
@pytest.mark.parametrize("slow", [0.01, 0.02, 0.04])
def test_a_store_that_is_fast_again_is_read_at_once(blocks: int, slow: float) -> None:
    """The first prompt after it took 50 times as long."""
    race = Race(blocks, 16, slow, LinearCost(step_s=0.005, swap_byte_s=0.0), 512)
    assert race.run(50.0, before=50.0) <= 1.01 * race.better_s


@pytest.mark.parametrize("believed", [0.5, 2.0])
@pytest.mark.parametrize("slow", [0.05, 0.25, 0.5, 1.0, 2.0, 4.0])
def test_a_wrong_belief_in_the_speed_of_reads_costs_little(believed: float, slow: float) -> None:
    race = Race(90, 60, slow, LinearCost(step_s=0.005, swap_byte_s=0.0), 512)
    assert race.run(believed) <= 1.1 * race.better_s


@pytest.mark.parametrize(("blocks", "most"), [(8, 0.8), (32, 0.7), (96, 0.6)])
def test_both_at_once_are_faster_than_either(blocks: int, most: float) -> None:
    race = Race(blocks, 16, 1.0, LinearCost(step_s=0.005, swap_byte_s=0.0), 512)
    assert race.run() <= most * race.better_s
