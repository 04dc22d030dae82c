"""One prompt whose prefix another worker sends, in virtual time: never much slower than fetching it or computing it.
And any order of arrivals, on a memory that records every token.
"""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.driving import Device, Pipeline, engine, next_token, request, tokens_of
from tests.engine.test_race import ANY_RACE, BLOCK_BYTES, CHANGES, COSTS, SIZE, Race, Speed, end_reads
from tests.examples import examples
from workers.config import BATCHING
from workers.costs import LinearCost
from workers.engine.engine import Engine, EngineOutput
from workers.engine.prefix_fetch import PrefixFetch


class Wire:
    """Brings what a fetch asks for, one read after the other."""

    def __init__(self, subject: Engine, fetch: PrefixFetch, speed: Speed, now_s: float) -> None:
        self.now_s = now_s
        self.num_blocks = 0
        self._fetches, self._fetch = subject.prefix_fetches, fetch
        self._speed = speed
        self._read: tuple[float, int] | None = None  # when it ends, and its first token
        self._is_over = False
        self._go_on()

    @property
    def next_s(self) -> float:
        return float("inf") if self._read is None else self._read[0]

    def run(self, until_s: float) -> None:
        """Up to this time."""
        while self._read is not None and self._read[0] <= until_s:
            self.now_s, first = self._read
            self._fetches.completed(self._fetch, first, self.now_s)
            self._go_on()
        self.now_s = until_s

    def _go_on(self) -> None:
        taken = self._fetches.take(self._fetch, self._fetch.num_tokens, self.now_s)
        self._read = None
        if taken is not None:
            self.num_blocks += taken[1] // SIZE
            self._read = self._speed.read_s(self.now_s, taken[1] // SIZE), taken[0]
        elif not self._is_over:
            self._is_over = True
            self._fetches.end(self._fetch)


class FetchRace(Race):
    """As `Race`, with a prefix that is fetched from the moment at which the prompt arrives."""

    def run(self, believed: float = 1.0, before: float = 0.0) -> float:
        subject = engine(
            block_size=SIZE,
            kv_blocks=2000,
            max_batch_tokens=self.budget,
            context_length=4096,
            cost=self.cost,
            block_bytes=BLOCK_BYTES,
        )
        begun_s = 0.0
        if before:
            speed = Speed(before * self.speed.block_s)
            self._begin_fetch(subject, self.other, speed, believed, begun_s)
            self._ask(subject, self.wire, "before", self.other)
            end_reads(self.wire)
            begun_s = self.wire.now_s
        plan = self._begin_others(subject, begun_s)
        self._begin_fetch(subject, self.prompt, self.speed.begun(begun_s), believed, begun_s)
        return self._ask(subject, self.wire, "r", self.prompt, plan) - begun_s

    def _begin_fetch(
        self, subject: Engine, prompt: tuple[int, ...], speed: Speed, believed: float, now_s: float
    ) -> None:
        bytes_per_s = BLOCK_BYTES / (believed * self.speed.block_s)
        fetch = subject.prefix_fetches.begin(prompt[: self.cached], now_s=now_s, bytes_per_s=bytes_per_s)
        self.wire = Wire(subject, fetch, speed, now_s)


@given(
    blocks=st.integers(1, 100),
    rest=st.integers(1, 200),
    slow=st.floats(0.01, 20.0),
    cost=COSTS,
    budget=st.sampled_from([64, 512, 4096]),
    others=st.sampled_from([0, 0, 7, 64, 600]),
)
@examples(150)
def test_it_takes_no_longer_than_the_better_of_fetching_and_computing(
    blocks: int, rest: int, slow: float, cost: LinearCost, budget: int, others: int
) -> None:
    race = FetchRace(blocks, rest, slow, cost, budget, others)
    assert race.run() <= 1.05 * race.better_s + 1e-9


@given(before=CHANGES, race=st.builds(FetchRace, **ANY_RACE))
@examples(150)
def test_a_link_that_becomes_faster_or_slower_between_prompts_costs_at_most_a_chunk(
    before: float, race: FetchRace
) -> None:
    assert race.run(before, before) <= 1.05 * (race.better_s + race.chunk_s) + 1e-9


@given(race=st.builds(FetchRace, **ANY_RACE, changes=st.floats(0.01, 2.0), slower=CHANGES))
@examples(150)
def test_a_link_that_becomes_faster_or_slower_within_a_prompt_costs_at_most_two_chunks(race: FetchRace) -> None:
    assert race.run() <= 1.05 * race.better_s + 2 * race.chunk_s + 1e-9


@pytest.mark.parametrize("blocks", [31, 95])
@pytest.mark.parametrize("slow", [0.01, 0.02, 0.04])
def test_a_link_that_is_fast_again_is_used_at_once(blocks: int, slow: float) -> None:
    """The first prompt after it took 50 times as long."""
    race = FetchRace(blocks, 16, slow, LinearCost(step_s=0.005, swap_byte_s=0.0), 512)
    assert race.run(50.0, before=50.0) <= 1.01 * race.better_s


@pytest.mark.parametrize("believed", [0.5, 2.0])
@pytest.mark.parametrize("slow", [0.05, 0.25, 0.5, 1.0, 2.0, 4.0])
def test_a_wrong_belief_in_the_speed_of_the_link_costs_little(believed: float, slow: float) -> None:
    race = FetchRace(90, 60, slow, LinearCost(step_s=0.005, swap_byte_s=0.0), 512)
    assert race.run(believed) <= 1.1 * race.better_s


@pytest.mark.parametrize(("blocks", "most"), [(8, 0.8), (32, 0.7), (96, 0.65)])
def test_both_at_once_are_faster_than_either(blocks: int, most: float) -> None:
    race = FetchRace(blocks, 16, 1.0, LinearCost(step_s=0.005, swap_byte_s=0.0), 512)
    assert race.run() <= most * race.better_s
    assert race.wire.num_blocks <= 0.75 * blocks, "what computing has passed is not read"


@given(
    length=st.integers(20, 60),
    fetched=st.integers(8, 60),
    owner_size=st.sampled_from([1, 8]),
    hold=st.booleans(),
    other=st.booleans(),
    budget=st.integers(5, 16),
    depth=st.integers(1, 2),
    batching=st.sampled_from(BATCHING),
    host=st.sampled_from([0, 8]),
    byte_s=st.sampled_from([1e-5, 3e-4, 1e-3]),
    arrivals=st.lists(st.integers(0, 3), min_size=10, max_size=30),
    draw=st.randoms(use_true_random=False),
    lost_after=st.integers(0, 40),
)
@examples(300)
def test_whatever_arrives_when_every_token_attends_to_the_right_ones(
    length: int,
    fetched: int,
    owner_size: int,
    hold: bool,
    other: bool,
    budget: int,
    depth: int,
    batching: str,
    host: int,
    byte_s: float,
    arrivals: list[int],
    draw: Random,
    lost_after: int,
) -> None:
    """Reads end in any order between steps, and the owner may be lost: then bytes of reads in flight land late."""
    device = Device()
    subject = engine(
        kv_blocks=50,
        max_running=3,
        host_cache_blocks=host,
        max_batch_tokens=budget,
        batching=batching,
        depth=depth,
        cost=LinearCost(step_s=0.01, swap_byte_s=0.0, transfer_latency_s=0.0, transfer_byte_s=byte_s),
        block_bytes=10,
    )
    flow, fetches = Pipeline(subject, depth, device), subject.prefix_fetches
    tokens = tuple(range(1, 61))
    fetch: PrefixFetch | None = fetches.begin(tokens[: fetched - fetched % owner_size], owner_size=owner_size)
    subject.add(device.know(request("r", tokens[:length], max_tokens=3)), 0.0, hold=hold)
    if other:
        subject.add(device.know(request("other", tokens[: length - 5], max_tokens=3)), 0.0, hold=False)
    reads: list[tuple[int, int]] = []
    settling: list[tuple[int, ...]] = []
    emitted: list[EngineOutput] = []
    num_landed, now_s = 0, 0.0
    for count in (*arrivals, *[0] * 60):
        for _ in range(count if fetch else 0):
            assert fetch is not None
            while len(reads) < 2 and (taken := fetches.take(fetch, fetch.num_tokens, now_s)) is not None:
                reads.append(taken)
            if not reads or num_landed == lost_after:
                for first, size in reads:
                    settling.append(fetch.blocks[first // 4 : -(-(first + size) // 4)])
                    subject.pool.begin_transfer(settling[-1])
                fetches.end(fetch)
                fetch = None
                break
            first, size = reads.pop(draw.randrange(len(reads)))
            device.fill(fetch.blocks[first // 4 :], tokens[first : first + size])
            fetches.completed(fetch, first, now_s)
            num_landed += 1
        for blocks in settling:
            device.fill(blocks, (-1,) * 4 * len(blocks))
        flow.fill(now_s)
        now_s += 0.01
        flow.end(now_s)
        emitted += subject.drain()
        subject.check()
    for blocks in settling:
        subject.pool.end_transfer(blocks)
    if fetch is not None:
        fetches.end(fetch)
    while flow.end(now_s) or flow.fill(now_s):
        emitted += subject.drain()
    for key, count, first in (("r/0", 1 if hold else 3, length), ("other/0", 3 if other else 0, length - 5)):
        assert tokens_of(emitted, key) == [next_token(key, first + n) for n in range(count)]
    subject.expire(1e9)
    subject.check()
    assert subject.stats().free_blocks == subject.stats().total_blocks
