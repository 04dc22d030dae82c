"""Prefixes evicted from the device and restored from the host, on a memory that records every token."""

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from tests.engine.driving import (
    Device,
    Pipeline,
    bring,
    digest_of,
    engine,
    next_token,
    request,
    result,
    run_to_end,
    step,
    tokens_of,
)
from tests.engine.test_memory import EngineMachine
from tests.examples import examples
from workers.config import BATCHING
from workers.costs import CostModel, LinearCost
from workers.engine.engine import Engine, EngineOutput
from workers.engine.host_cache import HostCache
from workers.engine.kv_event_log import KVEventLog, Tier
from workers.engine.sequence import Lease
from workers.errors import InvalidRequest, Overloaded
from workers.request import Request, TokensOut

CHEAP = LinearCost(swap_byte_s=0.0)
DEAR = LinearCost(swap_byte_s=1.0)


def small(cost: CostModel = CHEAP, *, host: int = 32, **config: Any) -> tuple[Engine, Device]:
    """Sixteen blocks of four tokens on the device."""
    subject = engine(kv_blocks=18, host_cache_blocks=host, cost=cost, block_bytes=1000, **config)
    return subject, Device()


def answer(
    subject: Engine, device: Device, made: Request, *, hold: bool = False
) -> tuple[int, int, list[EngineOutput]]:
    """Run to the end; returns tokens computed of the prompt, cached tokens, and outputs."""
    subject.add(device.know(made), 0.0, hold=hold)
    computed = 0
    emitted: list[EngineOutput] = []
    while (done := step(subject, 0.0, device))[0] is not None:
        computed += sum(len(chunk.tokens) for chunk in done[0].chunks if chunk.first_position < made.num_tokens)
        emitted += done[1]
    cached = max(getattr(each, "cached_tokens", 0) for each in emitted)
    return computed, cached, emitted


def prompt(first: int, length: int = 40) -> tuple[int, ...]:
    return tuple(range(first, first + length))


def test_a_prefix_that_was_evicted_comes_back_from_the_host() -> None:
    subject, device = small()
    for number, first in enumerate((100, 300, 500)):
        answer(subject, device, request(f"r{number}", prompt(first), max_tokens=1))
    computed, cached, emitted = answer(subject, device, request("again", prompt(100), max_tokens=3))
    assert (computed, cached) == (4, 36), "nine of ten blocks: a token is left to compute"
    assert tokens_of(emitted, "again/0") == [next_token("again/0", 40 + n) for n in range(3)]
    stats = subject.stats()
    (tier,) = stats.tiers
    assert (stats.sought_tokens, stats.found_tokens, stats.device_hit_tokens, tier.hit_tokens) == (160, 36, 0, 36)
    assert (tier.read_bytes, tier.written_bytes, tier.dropped_blocks) == (9000, 30_000, 0)
    assert tier.saved_s > 0.0 == stats.device_saved_s
    assert [each.cached_from for each in emitted if isinstance(each, TokensOut)] == [(("host", 36),), (), ()]


@pytest.mark.parametrize(("cost", "host"), [(DEAR, 32), (CHEAP, 0)])
def test_an_evicted_prefix_is_recomputed_without_a_host_cache_or_with_slow_swaps(cost: CostModel, host: int) -> None:
    subject, device = small(cost, host=host)
    for number, first in enumerate((100, 300, 500)):
        answer(subject, device, request(f"r{number}", prompt(first), max_tokens=1))
    computed, cached, _ = answer(subject, device, request("again", prompt(100), max_tokens=1))
    assert (computed, cached) == (40, 0)
    assert not len(subject.pool.host), "nothing is saved that would not come back"
    for tier in subject.stats().tiers:
        assert tier.dropped_blocks and tier.trouble == f"stores nothing: dropped {tier.dropped_blocks} blocks"


@pytest.mark.parametrize("digest", [True, False])
def test_restored_blocks_are_ready_for_a_reader_after_their_step(digest: bool) -> None:
    subject, device = small()
    subject.leases._digest = digest
    for number, first in enumerate((100, 300, 500)):
        answer(subject, device, request(f"r{number}", prompt(first), max_tokens=1))
    subject.add(device.know(request("held", prompt(100))), 0.0, hold=True)
    plan = subject.schedule(0.0)
    assert plan is not None and plan.swap_in
    (lease,) = [each for each in subject.drain() if isinstance(each, Lease)]
    assert subject.leases.progress("held/0", lease.epoch, 0, 0.0).ready_blocks == 0
    device.execute(plan)
    subject.commit(plan, result(plan), 0.0)
    device.check_leases(subject)
    progress = subject.leases.progress("held/0", lease.epoch, 0, 0.0)
    assert progress.ready_blocks == 10
    if digest:
        assert progress.cells[0] == tuple(digest_of(block, 4) for block in lease.blocks)


def test_restored_blocks_do_not_migrate_before_their_step_has_ended() -> None:
    subject, device = small()
    subject.leases._digest = False
    for number, first in enumerate((100, 300, 500)):
        answer(subject, device, request(f"r{number}", prompt(first), max_tokens=1))
    subject.add(device.know(request("moves", prompt(100))), 0.0, hold=False)
    plan = subject.schedule(0.0)
    assert plan is not None and plan.swap_in
    assert subject.sequences.offer_migration("moves/0", 40, 0.0) is None
    device.execute(plan)
    subject.commit(plan, result(plan), 0.0)
    lease = subject.sequences.offer_migration("moves/0", 40, 0.0)
    assert lease is not None and len(lease.blocks) == 10
    device.check_leases(subject)


def test_a_fresh_prompt_ignores_the_host_cache() -> None:
    subject, device = small()
    for number, first in enumerate((100, 300, 500)):
        answer(subject, device, request(f"r{number}", prompt(first), max_tokens=1))
    computed, cached, _ = answer(subject, device, request("fresh", prompt(100), max_tokens=1, fresh=True))
    assert (computed, cached) == (40, 0)


def test_an_idle_pool_with_room_saves_nothing() -> None:
    subject, device = engine(kv_blocks=200, host_cache_blocks=32, cost=CHEAP, block_bytes=1000), Device()
    for number, first in enumerate((100, 300, 500)):
        answer(subject, device, request(f"r{number}", prompt(first), max_tokens=1))
    assert not len(subject.pool.host)


def test_saved_blocks_are_not_written_before_they_are_saved() -> None:
    """A block that a step in flight still copies is not allocated, for a transfer for example."""
    subject, device = small()
    answer(subject, device, request("r0", prompt(100), max_tokens=1))
    subject.add(device.know(request("r1", prompt(300, 20), max_tokens=1)), 0.0, hold=False)
    plan = subject.schedule(0.0)
    assert plan is not None and plan.swap_out
    taken = subject.pool.allocate(subject.pool.num_free)
    assert not {block for block, _ in plan.swap_out} & set(taken)


def test_the_host_forgets_the_oldest_but_nothing_that_the_step_reads() -> None:
    host = HostCache(2, KVEventLog(128))
    a, b = host.save(b"a", 1, ()), host.save(b"b", None, ())
    assert a is not None and b is not None
    assert sorted((a, b)) == [0, 1] and host.match([b"a", b"x"]) == [a]
    assert host.save(b"c", 3, {b}) == a and b"a" not in host
    assert host.save(b"d", 4, {a, b}) is None
    host.forget([b"b"])
    assert host.save(b"d", 4, {b}) == a, "free, but read by the step in the making"
    host.check()
    host.clear()
    host.check()
    assert host._log.hashes(Tier.HOST) == frozenset()


def test_blocks_in_use_survive_a_scan_of_ten_times_the_host_cache() -> None:
    host = HostCache(5120, KVEventLog(128))
    hot = [b"hot %d" % number for number in range(1024)]
    for block_hash in hot:
        host.save(block_hash, None, ())
    assert len(host.match(hot)) == 1024
    for number in range(10 * 5120):
        host.save(b"scan %d" % number, None, ())
    assert len(host.match(hot)) == 1024
    host.check()


def test_hits_are_forgotten_when_others_are_hit_later() -> None:
    host = HostCache(10, KVEventLog(128))
    hashes = [b"%d" % number for number in range(10)]
    for block_hash in hashes:
        host.save(block_hash, None, ())
    for block_hash in (*hashes[6:], *hashes[:2]):
        host.match([block_hash])
    for number in range(8):
        host.save(b"new %d" % number, None, ())
    assert [block_hash in host for block_hash in hashes] == [True, True] + 8 * [False], "two of ten are protected"
    host.check()


def test_the_estimate_excludes_the_time_of_copies() -> None:
    subject, device = small(LinearCost(swap_byte_s=1e-6))
    before = subject._estimate.cost.prefill_seconds(16)
    run_to_end(subject, 0.0, device)
    assert subject._estimate.cost.prefill_seconds(16) == before


class HostMachine(EngineMachine):
    """Everything at once, on a small pool with a small host cache behind it."""

    @initialize(
        depth=st.integers(1, 4),
        batching=st.sampled_from(BATCHING),
        budget=st.integers(5, 16),
        blocks=st.integers(9, 14),
        host=st.integers(1, 16),
        digest=st.booleans(),
    )
    def open(self, depth: int, batching: str, budget: int, blocks: int, host: int, digest: bool) -> None:
        self.device = Device()
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
        )
        self.engine.leases._digest = digest
        self.flow = Pipeline(self.engine, depth, self.device)
        for document in range(1, 6):  # the first ones leave the device
            self.ask_of_a_document(document, 14, False, 1)
            self.flow.run()
        self.emitted += self.engine.drain()

    @rule(document=st.integers(1, 5), length=st.integers(9, 14), hold=st.booleans(), fresh=st.integers(0, 9))
    def ask_of_a_document(self, document: int, length: int, hold: bool, fresh: int) -> None:
        """Together they are more than the device holds."""
        tokens = tuple(range(20 * document, 20 * document + length))
        self._add(request(f"r{self.count}", tokens, max_tokens=1, fresh=not fresh), hold)

    @rule(document=st.integers(1, 5), length=st.integers(4, 14), ttl_s=st.sampled_from([0.1, 1e9]))
    def pin_a_document(self, document: int, length: int, ttl_s: float) -> None:
        with suppress(Overloaded, InvalidRequest):
            self.engine.pin(request("pin", tuple(range(20 * document, 20 * document + length))), ttl_s, self.now_s)

    @rule(document=st.integers(0, 5))
    def unpin_a_document(self, document: int) -> None:
        """0: all."""
        made = request("pin", tuple(range(20 * document, 20 * document + 14))) if document else None
        self.engine.unpin(made)

    @rule(document=st.integers(1, 5), have=st.integers(0, 1))
    def lend_a_document(self, document: int, have: int) -> None:
        """To a reader that has its first block or nothing, from the device and from host memory."""
        made = self.device.know(request(f"l{self.count}", tuple(range(20 * document, 20 * document + 14))))
        self.count += 1
        lease = self.engine.prefix_fetches.hold(f"{made.key}:prefix", made.prompt, self.now_s)
        if lease is not None:
            self.emitted.append(lease)
            self.device.readers_have[lease.key] = have
            self.engine.leases.progress(lease.key, lease.epoch, have, self.now_s)

    @rule(length=st.integers(8, 14), first=st.integers(0, 1), hold=st.booleans())
    def add_fresh(self, length: int, first: int, hold: bool) -> None:
        made = request(f"r{self.count}", tuple(range(1 + first, 1 + first + length)), max_tokens=1, fresh=True)
        self._add(made, hold)

    @precondition(lambda self: not self.reading)
    @rule(first=st.integers(0, 3))
    def fetch(self, first: int) -> None:
        """Another worker's prefix arrives, and lies in the cache."""
        tokens = tuple(range(1 + first, 13 + first))
        if self.engine.pool.num_free < 3:
            return
        fetch = self.engine.prefix_fetches.begin(tokens)
        self.device.fill(fetch.blocks, tokens)
        bring(self.engine.prefix_fetches, fetch)
        self.engine.prefix_fetches.end(fetch)


HostMachine.TestCase.settings = examples(60, stateful_step_count=60)
TestHostMachine = HostMachine.TestCase
