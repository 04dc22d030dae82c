"""Prefixes that go through host memory to a disk and back, on a memory that records every token."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from msgspec import structs

from tests.engine.driving import (
    Device,
    Pipeline,
    engine,
    next_token,
    planned,
    request,
    result,
    run_to_end,
    step,
    tokens_of,
)
from tests.engine.test_host_cache import HostMachine
from tests.examples import examples
from workers.config import BATCHING
from workers.costs import CostModel, LinearCost
from workers.engine.blocks import BlockPool, block_hashes
from workers.engine.engine import Engine
from workers.engine.host_cache import HostCache
from workers.engine.kv_event_log import KVEventLog, Tier
from workers.engine.prefetch import PATIENCE
from workers.engine.read_speed import ReadSpeed
from workers.engine.store_tiers import READS_AT_ONCE, StoreTier
from workers.request import FailedOut, TokensOut
from workers.stats import TierStats

CHEAP = LinearCost(swap_byte_s=0.0)
GARBAGE = -1  # in host memory while the disk writes there


class RecordedDisk(Device):
    """A device with a disk beside its host memory. Writes and reads end when `run` is called, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.stored: dict[bytes, list[int | None]] = {}
        self.waits_s: list[float] = []
        self.pending: list[Callable[[bool], None]] = []
        self.read_byte_s = 1e-9
        self.prefixes: dict[bytes, int] = {}  # of what is stored
        self.tier = Tier.DISK
        self.shared_as = ""
        self.read_s = 0.0001  # of a block, one after the other
        self.num_reading = 0

    def watch(self, added: Callable[[bytes, int], None], gone: Callable[[bytes], None]) -> dict[bytes, int]:
        self.added, self.gone = added, gone
        return dict(self.prefixes)

    def find(self, hashes: Sequence[bytes], timeout_s: float, found: Callable[[int], None]) -> None:
        found(next((place for place, block_hash in enumerate(hashes) if block_hash not in self.stored), len(hashes)))

    def write(self, block_hash: bytes, prefix: int | None, block: int, done: Callable[[bool], None]) -> None:
        content = self._content(block)

        def end(good: bool) -> None:
            assert self._content(block) == content, "the block changed before it was written"
            if good:
                self.stored[block_hash] = content
                if prefix is not None:
                    self.prefixes[block_hash] = prefix
            done(block_hash in self.stored)

        self.pending.append(end)

    def read(self, block_hash: bytes, block: int, timeout_s: float, done: Callable[[bool, float], None]) -> None:
        self.waits_s.append(timeout_s)
        self.num_reading += 1
        seconds = self.num_reading * self.read_s
        self._put(block, [GARBAGE] * self._size)

        def end(good: bool) -> None:
            assert self._content(block) == [GARBAGE] * self._size, "the block was used while it was read"
            arrived = good and block_hash in self.stored
            if arrived:
                self._put(block, self.stored[block_hash])
            self.num_reading -= 1
            done(arrived, seconds)

        self.pending.append(end)

    def forget(self, hashes: Iterable[bytes]) -> None:
        for block_hash in hashes:
            if self.stored.pop(block_hash, None) is not None:
                self.prefixes.pop(block_hash, None)
                self.gone(block_hash)

    def stats(self) -> TierStats:
        return TierStats("disk", len(self.stored))

    def run(self, place: int = 0, *, good: bool = True) -> None:
        self.pending.pop(place)(good)

    def run_all(self, *, good: bool = True) -> None:
        while self.pending:
            self.run(good=good)

    def _content(self, block: int) -> list[int | None]:
        return [self._host.get((block, slot)) for slot in range(self._size)]

    def _put(self, block: int, content: Sequence[int | None]) -> None:
        for slot, token in enumerate(content):
            self._host.pop((block, slot), None)
            if token is not None:
                self._host[block, slot] = token


def small(disk: RecordedDisk, cost: CostModel = CHEAP, host: int = 12) -> Engine:
    """Sixteen blocks of four tokens on the device, twelve in host memory."""
    return engine(kv_blocks=18, host_cache_blocks=host, cost=cost, block_bytes=1000, stores=[disk])


def slow_disk(disk: RecordedDisk) -> Engine:
    """Reading four blocks takes a bit longer than a step that computes them, whose fixed cost is small."""
    subject = filled(disk, LinearCost(step_s=0.004, swap_byte_s=0.0), host=20)
    (store,) = subject._stores
    disk.read_s = 1.2 * subject._estimate.cost.prefill_seconds(16) / 4
    store.speed = ReadSpeed(disk.read_s)
    return subject


def prompt(first: int, length: int = 40) -> tuple[int, ...]:
    return tuple(range(first, first + length))


def filled(disk: RecordedDisk, cost: CostModel = CHEAP, host: int = 12) -> Engine:
    """Six prompts in turn: the first is on the disk alone."""
    subject = small(disk, cost, host)
    for number in range(6):
        subject.add(disk.know(request(f"r{number}", prompt(100 * (1 + number)), max_tokens=1)), 0.0, hold=False)
        run_to_end(subject, 0.0, disk)
        while disk.pending:
            disk.run()
    return subject


def test_a_prefix_comes_back_from_the_disk_through_host_memory() -> None:
    disk = RecordedDisk()
    subject = filled(disk)
    subject.add(disk.know(request("again", prompt(100), max_tokens=3)), 0.0, hold=False)
    assert step(subject, 0.0, disk)[0] is None, "it waits"
    disk.run_all()
    plan, emitted = step(subject, 0.0, disk)
    assert plan is not None and len(plan.swap_in) == 6, "half of the host cache at most"
    assert plan.chunks[0].first_position == 24
    emitted += run_to_end(subject, 0.0, disk)
    assert tokens_of(emitted, "again/0") == [next_token("again/0", 40 + n) for n in range(3)]
    subject.check()
    stats = subject.stats()
    host, on_disk = stats.tiers
    assert (stats.found_tokens, stats.device_hit_tokens, host.hit_tokens, on_disk.hit_tokens) == (24, 0, 0, 24)
    assert on_disk.blocks == len(disk.stored) and on_disk.saved_s > 0.0
    assert [each.cached_from for each in emitted if isinstance(each, TokensOut)] == [(("disk", 24),), (), ()]


def test_a_prompt_whose_blocks_do_not_arrive_is_computed() -> None:
    disk = RecordedDisk()
    subject = filled(disk)
    subject.add(disk.know(request("again", prompt(100), max_tokens=1)), 0.0, hold=False)
    assert step(subject, 0.0, disk)[0] is None and len(disk.pending) == 6
    disk.run_all(good=False)
    plan, _ = step(subject, 0.0, disk)
    assert plan is not None and not plan.swap_in and plan.chunks[0].first_position == 0


def test_prompts_wait_for_the_disk_in_their_order_and_streams_do_not_wait() -> None:
    disk = RecordedDisk()
    subject = filled(disk)
    subject.add(disk.know(request("stream", prompt(800, 8), max_tokens=9)), 0.0, hold=False)
    step(subject, 0.0, disk)
    subject.add(disk.know(request("again", prompt(100), max_tokens=1)), 0.0, hold=False)
    subject.add(disk.know(request("new", prompt(900, 8), max_tokens=1)), 0.0, hold=False)
    plan, _ = step(subject, 0.0, disk)
    assert plan is not None and [chunk.key for chunk in plan.chunks] == ["stream/0"]
    disk.run_all()
    plan, _ = step(subject, 0.0, disk)
    assert plan is not None and plan.swap_in and {chunk.key for chunk in plan.chunks} >= {"stream/0", "again/0"}


def test_a_prompt_waits_no_longer_than_its_patience_for_a_disk_that_hangs() -> None:
    disk = RecordedDisk()
    subject = filled(disk)
    subject.add(disk.know(request("again", prompt(100), max_tokens=1)), 0.0, hold=False)
    assert step(subject, 0.0, disk)[0] is None
    cost, until_s = subject._estimate.cost, subject.wakes_at_s
    in_chunks_s = cost.prefill_seconds(40) + 2 * cost.prefill_seconds(0)
    assert until_s == pytest.approx(PATIENCE * in_chunks_s)
    assert step(subject, 0.9 * until_s, disk)[0] is None
    plan, _ = step(subject, until_s, disk)
    assert plan is not None and plan.chunks[0].first_position == 0 and disk.pending


def test_what_is_read_from_the_back_ends_the_computing_where_they_meet() -> None:
    """Reading takes about as long as computing: the last blocks are read, and the first ones computed."""
    disk = RecordedDisk()
    subject = slow_disk(disk)
    subject.add(disk.know(request("again", prompt(100), max_tokens=2)), 0.0, hold=False)
    assert step(subject, 0.0, disk)[0] is None, "the first read may end at once"
    plan, emitted = step(subject, subject.wakes_at_s, disk)
    assert plan is not None and not plan.swap_in
    (chunk,) = plan.chunks
    assert chunk.first_position == 0 and 8 <= len(chunk.tokens) <= 24 and chunk.draw is None
    assert len(disk.waits_s) == 9 - len(chunk.tokens) // 4, "what computing has passed is not read"
    disk.run()  # the last block
    disk.run(good=False)
    while plan is not None and not plan.swap_in:
        end = plan.chunks[0].first_position + len(plan.chunks[0].tokens)
        assert end <= 32
        plan, more = step(subject, 0.0, disk)
        emitted += more
    assert plan is not None and end == 32 and plan.chunks[0].first_position == 36
    emitted += run_to_end(subject, 0.0, disk)
    assert tokens_of(emitted, "again/0") == [next_token("again/0", 40 + n) for n in range(2)]
    host, on_disk = subject.stats().tiers
    assert (host.hit_tokens, on_disk.hit_tokens, subject.stats().found_tokens) == (0, 4, 4)
    disk.run_all()


def test_a_store_that_was_slow_is_used_as_soon_as_a_read_was_fast() -> None:
    disk = RecordedDisk()
    subject = filled(disk, host=20)
    (store,) = subject._stores
    store.speed = ReadSpeed(100.0)
    subject.add(disk.know(request("again", prompt(100), max_tokens=1)), 0.0, hold=False)
    assert step(subject, 0.0, disk)[0] is None and len(disk.pending) == 1, "one block tells whether it is faster"
    disk.run_all()
    assert step(subject, 0.0, disk)[0] is None
    disk.run_all()
    plan, _ = step(subject, 0.0, disk)
    assert plan is not None and len(plan.swap_in) == 9


def test_a_prompt_does_not_wait_for_its_first_read_beside_a_stream_whose_step_takes_longer() -> None:
    disk = RecordedDisk()
    subject = filled(disk, host=20)
    subject.add(disk.know(request("stream", prompt(800, 8), max_tokens=9)), 0.0, hold=False)
    step(subject, 0.0, disk)
    (store,) = subject._stores
    store.speed = ReadSpeed(100.0)
    subject.add(disk.know(request("again", prompt(100), max_tokens=1)), 0.0, hold=False)
    plan, _ = planned(subject, 0.0, disk)
    assert [chunk.key for chunk in plan.chunks] == ["stream/0", "again/0"]
    disk.run_all()


def test_a_prompt_that_waits_behind_another_is_read_from_the_front() -> None:
    disk = RecordedDisk()
    subject = slow_disk(disk)
    subject.add(disk.know(request("other", prompt(900, 30), max_tokens=1)), 0.0, hold=False)
    plan = subject.schedule(0.0)
    assert plan is not None
    subject.add(disk.know(request("again", prompt(100), max_tokens=1)), 0.0, hold=False)
    assert len(disk.pending) == READS_AT_ONCE
    for _ in range(3):
        disk.run()
    disk.execute(plan)
    subject.commit(plan, result(plan), 0.0)
    for number in range(9):  # it may wait a while for blocks that are being read
        plan = step(subject, float(number), disk)[0]
        if plan is not None and plan.chunks[0].key == "again/0":
            break
    assert plan is not None
    assert len(plan.swap_in) == 3 and plan.chunks[0].first_position == 12
    disk.run_all()


def test_a_block_that_one_store_lost_is_read_from_the_next() -> None:
    near, far = RecordedDisk(), RecordedDisk()
    filled(near)
    far.stored, far._host = dict(near.stored), near._host
    subject = engine(kv_blocks=18, host_cache_blocks=12, cost=CHEAP, block_bytes=1000, stores=[near, far])
    subject.add(near.know(request("again", prompt(100), max_tokens=1)), 0.0, hold=False)
    assert step(subject, 0.0, near)[0] is None and not far.pending
    near.run(good=False)
    assert len(far.pending) == 1
    far.run()
    near.run_all()
    plan, _ = step(subject, 0.0, near)
    assert plan is not None and len(plan.swap_in) == 6


def test_nothing_is_read_that_is_cheaper_to_compute_or_must_be_computed() -> None:
    disk = RecordedDisk()
    filled(disk)
    subject = small(disk, LinearCost(swap_byte_s=1.0))
    subject.add(disk.know(request("again", prompt(100), max_tokens=1)), 0.0, hold=False)
    subject = small(disk)
    subject.add(disk.know(request("fresh", prompt(100), max_tokens=1, fresh=True)), 0.0, hold=False)
    assert not disk.pending and not disk.waits_s


def test_a_fresh_prompt_forgets_its_blocks_on_the_disk() -> None:
    disk = RecordedDisk()
    subject = filled(disk)
    before = len(disk.stored)
    subject.add(disk.know(request("fresh", prompt(100), max_tokens=1, fresh=True)), 0.0, hold=False)
    plan, _ = step(subject, 0.0, disk)
    assert plan is not None and before - len(disk.stored) == 10


def test_a_block_that_is_forgotten_while_it_is_read_is_not_used() -> None:
    disk = RecordedDisk()
    subject = filled(disk)
    subject.add(disk.know(request("again", prompt(100), max_tokens=1)), 0.0, hold=False)
    assert step(subject, 0.0, disk)[0] is None and disk.pending
    subject.pool.clear_cache()
    disk.run_all()
    subject.check()
    plan, _ = step(subject, 0.0, disk)
    assert plan is not None and not plan.swap_in and not len(subject.pool.host)


def test_siblings_wait_for_one_read() -> None:
    disk = RecordedDisk()
    subject = filled(disk)
    for name in ("g#0", "g#1"):
        subject.add(disk.know(request(name, prompt(100), max_tokens=1, group="g")), 0.0, hold=False)
    assert step(subject, 0.0, disk)[0] is None and len(disk.waits_s) == 6
    disk.run_all()
    plan, _ = step(subject, 0.0, disk)
    assert plan is not None and len(plan.swap_in) == 6
    run_to_end(subject, 0.0, disk)


def test_what_a_failed_step_should_have_saved_is_not_written() -> None:
    disk = RecordedDisk()
    subject = small(disk)
    while True:
        number = subject.stats().steps
        subject.add(disk.know(request(f"r{number}", prompt(10 + 50 * number), max_tokens=1)), 0.0, hold=False)
        plan = subject.schedule(0.0)
        assert plan is not None
        if plan.swap_out:
            break
        disk.execute(plan)
        subject.commit(plan, result(plan), 0.0)
        run_to_end(subject, 0.0, disk)
    before = len(disk.pending)
    subject.steps_failed([plan], "a test")
    assert len(disk.pending) == before and not subject.pool.host._held
    subject.check()


def test_a_read_takes_no_block_that_a_step_in_flight_uses() -> None:
    disk = RecordedDisk()
    subject = filled(disk, host=20)
    subject.add(disk.know(request("again", prompt(100), max_tokens=1)), 0.0, hold=False)
    assert subject.schedule(0.0) is None
    disk.run_all()
    plan = subject.schedule(0.0)
    assert plan is not None and plan.swap_in and plan.swap_out
    subject.add(disk.know(request("next", prompt(200), max_tokens=1)), 0.0, hold=False)
    used = {host for host, _ in plan.swap_in} | {host for _, host in plan.swap_out}
    loading = set(subject.pool.host._loading)
    assert loading and not loading & used
    disk.execute(plan)  # attends to what it restores
    subject.commit(plan, result(plan), 0.0)
    disk.run_all()
    run_to_end(subject, 0.0, disk)


def test_what_a_step_saves_and_finds_to_be_in_doubt_is_not_written() -> None:
    disk = RecordedDisk()
    sizes = {"kv_blocks": 18, "host_cache_blocks": 12, "max_pinned": 6, "max_batch_tokens": 8, "block_bytes": 1000}
    subject = engine(**sizes, cost=CHEAP, stores=[disk])  # type: ignore[arg-type]
    made = disk.know(request("a", tuple(range(1, 17))))
    subject.pin(made, 60.0, 0.0)
    subject.add(made, 0.0, hold=False)
    planned(subject, 0.0, disk)
    plan = subject.schedule(0.0)
    assert plan is not None and len(plan.swap_out) == 2 and plan.chunks[0].draw is not None
    disk.execute(plan)
    subject.commit(plan, structs.replace(result(plan), tokens=(None,)), 0.0)
    assert subject.stats().non_finite == 1 and not disk.pending
    subject.check()


def test_a_block_that_arrives_after_a_step_has_saved_it_is_free() -> None:
    host = HostCache(2, KVEventLog(128))
    block = host.load(b"a")
    assert block is not None and host.save(b"a", None, ()) == 1 - block
    host.loaded(block, None, arrived=True)
    host.check()
    assert host.match([b"a"]) == [1 - block]


def test_the_log_has_what_can_be_read_from_the_disk_and_nothing_else() -> None:
    disk = RecordedDisk()
    disk.stored, disk.prefixes = {b"old": [1]}, {b"old": 5}
    pool = BlockPool(4, 4, block_bytes=1000, host_blocks=3)
    tier = StoreTier(disk, pool)
    blocks = [pool.host.save(block_hash, prefix, ()) for block_hash, prefix in ((b"a", 6), (b"b", None), (b"c", 7))]
    tier.save(
        [(block_hash, block) for block_hash, block in zip((b"a", b"b", b"c"), blocks, strict=True) if block is not None]
    )
    assert pool.log.hashes(Tier.DISK) == {5}, "what is still being written is not there"
    disk.run()
    disk.run()
    disk.run(good=False)
    assert pool.log.hashes(Tier.DISK) == {5, 6} and disk.prefixes == {b"old": 5, b"a": 6}
    pool.host.clear()
    assert pool.log.hashes(Tier.DISK) == {5, 6}
    pool.forget_in_stores = tier.forget
    pool.forget([b"old", b"a", b"b"])
    assert not pool.log.hashes(Tier.DISK)


class DiskMachine(HostMachine):
    """The disk ends reads and writes at any time and in any order, or fails them."""

    @initialize(
        depth=st.integers(1, 4),
        batching=st.sampled_from(BATCHING),
        budget=st.integers(5, 16),
        blocks=st.integers(9, 14),
        host=st.integers(2, 16),
        digest=st.booleans(),
        block_s=st.sampled_from([1e-6, 0.003, 0.01, 0.03]),
    )
    def open(
        self, depth: int, batching: str, budget: int, blocks: int, host: int, digest: bool, block_s: float
    ) -> None:
        self.device: RecordedDisk = RecordedDisk()
        self.far = RecordedDisk()
        self.far._host = self.device._host
        self.engine = engine(
            kv_blocks=blocks,
            host_cache_blocks=host,
            max_pinned=host // 2,
            max_running=5,
            max_batch_tokens=budget,
            batching=batching,
            depth=depth,
            cost=LinearCost(step_s=0.01, swap_byte_s=0.0002),
            block_bytes=10,
            stores=[self.device, self.far],
        )
        self.engine.leases._digest = digest
        for first in (1, 2, *range(20, 120, 20), 200, 300, 400):  # what an earlier process has left there
            tokens = range(first, first + (27 if first >= 200 else 14))
            for place, block_hash in enumerate(block_hashes(tokens, 4)):
                for disk in (self.device, self.far):
                    disk.stored[block_hash] = list(tokens[4 * place : 4 * place + 4])
        self.engine._stores[0].speed = ReadSpeed(block_s)
        self.flow = Pipeline(self.engine, depth, self.device)

    @rule(
        document=st.integers(1, 3),
        length=st.integers(16, 27),
        hold=st.booleans(),
        ends=st.lists(st.sampled_from(["read", "read", "miss", "step", "step", "abort", "fail"]), max_size=8),
    )
    def ask_of_a_long_document(self, document: int, length: int, hold: bool, ends: list[str]) -> None:
        """Blocks arrive from the back, or do not, while it is computed from the front, until it is ended."""
        first = 100 + 100 * document
        made = request(f"r{self.count}", tuple(range(first, first + length)), max_tokens=2)
        self._add(made, hold)
        for end in ends:
            self.flow.fill(self.now_s)
            store = self.device if self.device.pending else self.far
            if end == "step":
                self.end_step()
            elif end == "fail" and self.flow.plans:
                self.fail_steps()
            elif end == "abort":
                self.engine.sequences.abort(made.key)
                self.alive.pop(made.key, None)
            elif store.pending:
                store.run(good=end == "read")

    @precondition(lambda self: self.flow.plans)
    @rule()
    def fail_steps(self) -> None:
        """The oldest step fails, and those behind it have ended."""
        self.flow.fail()
        for each in self.engine.drain():
            self.emitted.append(each)
            if isinstance(each, FailedOut):
                self.alive.pop(each.key, None)

    @precondition(lambda self: self.device.pending or self.far.pending)
    @rule(data=st.data(), good=st.booleans())
    def store_ends(self, data: st.DataObject, good: bool) -> None:
        store = data.draw(st.sampled_from([each for each in (self.device, self.far) if each.pending]))
        store.run(data.draw(st.integers(0, len(store.pending) - 1)), good=good)

    def teardown(self) -> None:
        self._finish_disk()
        super().teardown()
        self._finish_disk()
        self.engine.check()
        assert not self.engine.pool.host._held and not self.engine.pool.host._loading

    def _finish_disk(self) -> None:
        while self.device.pending or self.far.pending:
            self.device.run_all()
            self.far.run_all()


DiskMachine.TestCase.settings = examples(80, stateful_step_count=60)
TestDiskMachine = DiskMachine.TestCase


TOKENS = LinearCost(0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)  # a second each: a prompt of 40 waits for one in vain


def waiting(disk: RecordedDisk, *others: int, kv_blocks: int = 18, **config: Any) -> Engine:
    """A prompt that waits for its disk, which should take two seconds, and others of so many tokens behind it."""
    disk.read_byte_s = 2 / 9000
    subject = engine(kv_blocks=kv_blocks, host_cache_blocks=20, cost=TOKENS, block_bytes=1000, stores=[disk], **config)
    for number in range(6):
        subject.add(disk.know(request(f"r{number}", prompt(100 * (1 + number)), max_tokens=1)), 0.0, hold=False)
        run_to_end(subject, 0.0, disk)
        while disk.pending:
            disk.run()
    subject.add(disk.know(request("again", prompt(100), max_tokens=1)), 0.0, hold=False)
    for number, length in enumerate(others):
        subject.add(disk.know(request(f"o{number}", prompt(800 + 20 * number, length), max_tokens=1)), 0.0, hold=False)
    return subject


def first_steps(subject: Engine, disk: RecordedDisk) -> list[str]:
    """What is computed before the prompt that waits, while nothing arrives."""
    found = []
    while (plan := step(subject, 0.0, disk)[0]) is not None:
        found += [chunk.key for chunk in plan.chunks]
    return found


def test_prompts_that_are_computed_while_one_waits_for_its_disk_go_first() -> None:
    disk = RecordedDisk()
    subject = waiting(disk, 1, 9, 1)
    assert first_steps(subject, disk) == ["o0/0", "o2/0"], "two seconds are left, and nine tokens take nine"
    disk.run_all()
    plan, _ = step(subject, 0.0, disk)
    assert plan is not None and plan.chunks[0].key == "again/0" and plan.swap_in


def test_a_prompt_that_waits_is_next_when_it_has_waited_long_enough_whoever_comes() -> None:
    disk = RecordedDisk()
    subject, order = waiting(disk), list[set[str]]()
    for number in range(3):
        subject.add(disk.know(request(f"n{number}", prompt(800 + number, 1), max_tokens=1)), number / 2, hold=False)
        plan, _ = step(subject, number / 2, disk)
        order.append({chunk.key for chunk in plan.chunks} if plan is not None else set())
    assert order == [{"n0/0"}, {"n1/0"}, {"again/0", "n2/0"}], "nothing has arrived for a second"


@pytest.mark.parametrize("config", [{"kv_blocks": 13}, {"max_running": 1}, {"batching": "orca"}])
def test_nobody_goes_first_who_would_take_its_blocks_or_its_slot(config: dict[str, Any]) -> None:
    """It needs ten blocks of eleven, and the other one takes one: none would be left for its answer."""
    disk = RecordedDisk()
    subject = waiting(disk, 1, **config)
    assert step(subject, 0.0, disk)[0] is None
    disk.run_all()
    plan, _ = step(subject, 0.0, disk)
    assert plan is not None and "again/0" in {chunk.key for chunk in plan.chunks}
