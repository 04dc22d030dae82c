"""Prefixes fetched from another worker: what is held during the fetch, and what stays."""

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.errors import LeaseLost
from tests.engine.driving import (
    bring,
    digest_of,
    engine,
    next_token,
    planned,
    request,
    result,
    run_to_end,
    scheduled,
    step,
    tokens_of,
)
from workers.costs import LinearCost
from workers.engine.blocks import BlockPool, OutOfBlocks, block_hashes
from workers.engine.engine import Engine
from workers.engine.estimate import StepEstimate
from workers.engine.host_tier import StepCopies
from workers.engine.leases import LeaseManager
from workers.engine.prefix_fetch import PrefixFetch, PrefixFetches
from workers.engine.sequence import Lease
from workers.request import Request

BLOCK = 4
CELLS = (b"12345678",)  # digests of a block on one rank


class Side:
    """The pool, leases and fetches of one worker."""

    def __init__(self, num_blocks: int = 8, *, digest: bool = True, prefix_blocks: int = 1) -> None:
        self.pool = BlockPool(num_blocks, BLOCK, block_bytes=1)
        self.leases = LeaseManager(self.pool, 10.0, digest=digest)
        self.prefix_fetches = PrefixFetches(self.pool, self.leases, prefix_blocks, StepEstimate(LinearCost()))

    def computed(self, tokens: range, *, key_digests: int = 99) -> None:
        """A prompt was computed here, held for a reader, and released."""
        hashes = block_hashes(tokens, BLOCK)
        shared = self.pool.match(hashes)
        try:
            blocks = shared + self.pool.allocate(len(hashes) - len(shared))
        except OutOfBlocks:
            self.pool.free(shared)
            raise
        for index, (block, block_hash) in enumerate(zip(blocks, hashes, strict=True)):
            self.pool.cache_block(block, block_hash)
            if index < key_digests:
                self.pool.digests[block] = CELLS
        self.pool.free(blocks)

    def offered(self, step: int, most: int) -> list[tuple[int, int]]:
        return self.leases.offered(step, most, StepCopies())

    def cached(self, tokens: range) -> int:
        found = self.pool.match(block_hashes(tokens, BLOCK))
        self.pool.free(found)
        return len(found)

    def check(self) -> None:
        self.pool.check([*(lease.blocks for lease in self.leases), *(fetch.held for fetch in self.prefix_fetches)])


def test_a_held_prefix_is_ready_at_once_and_stays_until_released() -> None:
    side = Side()
    side.computed(range(10))
    lease = side.prefix_fetches.hold("r:prefix", range(20), 0.0)
    assert lease is not None and (lease.num_tokens, len(lease.blocks)) == (8, 2)
    mark = side.leases.progress("r:prefix", lease.epoch, 0, 1.0)
    assert (mark.ready_blocks, mark.finished, mark.cells) == (2, True, (CELLS * 2,))
    with pytest.raises(OutOfBlocks):
        side.pool.allocate(7)
    side.check()
    side.leases.release("r:prefix", lease.epoch)
    assert side.cached(range(10)) == 2 and side.pool.num_free == 8


def test_a_prefix_is_not_held_for_another_tenant() -> None:
    side = Side()
    side.computed(range(10))
    assert side.prefix_fetches.hold("r:prefix", range(20), 0.0, "eve") is None
    fetch = side.prefix_fetches.begin(range(8), "eve")
    bring(side.prefix_fetches, fetch)
    side.prefix_fetches.end(fetch)
    assert fetch.num_shared == 0
    lease = side.prefix_fetches.hold("e:prefix", range(20), 0.0, "eve")
    assert lease is not None and lease.blocks == fetch.blocks
    side.check()


def test_only_cached_blocks_are_held() -> None:
    side = Side()
    side.computed(range(10))
    assert side.prefix_fetches.hold("r", range(50, 60), 0.0) is None
    assert side.prefix_fetches.hold("r", range(3), 0.0) is None
    assert side.pool.num_free == 8 and len(side.leases) == 0


@pytest.mark.parametrize("digest", [True, False])
def test_blocks_without_a_digest_are_ready_once_they_are_digested(digest: bool) -> None:
    side = Side(digest=digest)
    side.computed(range(12), key_digests=int(digest))
    lease = side.prefix_fetches.hold("r", range(12), 0.0)
    assert lease is not None and lease.num_tokens == 12
    ready = [(side.leases.progress("r", lease.epoch, 0, 0.0).ready_blocks, lease.finished)]
    while asked := side.offered(len(ready), 1):
        side.leases.advance_offers(len(ready), dict.fromkeys(asked, CELLS))
        ready.append((side.leases.progress("r", lease.epoch, 0, 0.0).ready_blocks, lease.finished))
    assert ready == ([(1, False), (2, False), (3, True)] if digest else [(3, True)])
    again = side.prefix_fetches.hold("again", range(12), 0.0)
    assert again is not None and again.finished, "digests are made once"
    side.check()


def test_digests_of_an_earlier_lease_that_are_still_in_flight_do_not_count() -> None:
    """The block may have had other content then."""
    side = Side()
    side.computed(range(4), key_digests=0)
    asked = []
    for number in (1, 2):
        lease = side.prefix_fetches.hold("r", range(4), 0.0)
        assert lease is not None and not side.offered(number, 1), "its reader has not come"
        side.leases.progress("r", lease.epoch, 0, 0.0)
        asked.append(side.offered(number, 1))
    side.leases.advance_offers(1, dict.fromkeys(asked[0], (b"outdated",)))
    lease = next(iter(side.leases))
    assert not lease.finished and asked[0] == asked[1]
    side.leases.advance_offers(2, dict.fromkeys(asked[1], CELLS))
    assert lease.finished and lease.digests == [CELLS]


def test_a_failed_step_withdraws_the_leases_that_wait_for_its_digests() -> None:
    side = Side()
    side.computed(range(4), key_digests=0)
    side.computed(range(50, 54))
    waits = side.prefix_fetches.hold("waits", range(4), 0.0)
    ready = side.prefix_fetches.hold("ready", range(50, 54), 0.0)
    assert waits and ready
    side.leases.progress("waits", waits.epoch, 0, 0.0)
    assert side.offered(1, 9)
    side.leases.steps_failed()
    with pytest.raises(LeaseLost):
        side.leases.progress("waits", waits.epoch, 0, 0.0)
    assert side.leases.progress("ready", ready.epoch, 0, 0.0).finished
    side.check()


def answered(max_tokens: int) -> tuple[Engine, Request]:
    """A decode worker's engine after an answer, and the request of the next turn. The prompt's KV was fetched."""
    subject, prompt = engine(), request("a", tuple(range(1, 11)), max_tokens=max_tokens)
    subject.reservations.reserve(prompt, 0.0)
    subject.reservations.fetched("a/0", 0.0)
    subject.reservations.decode("a/0", [next_token("a/0", 10)], 0.0)
    answer = tokens_of(run_to_end(subject), "a/0")
    assert len(answer) == max_tokens - 1
    return subject, request("b", (*prompt.prompt, next_token("a/0", 10), *answer, 7, 7, 7))


def test_a_decode_worker_lends_what_it_generated_and_an_idle_one_takes_steps_to_digest_it() -> None:
    """As many blocks in a step as a prompt's chunk has."""
    subject, turn = answered(max_tokens=16)
    step_s = subject.stats().step_s
    lease = subject.prefix_fetches.hold("b/0:prefix", turn.prompt, 0.0)
    assert lease is not None and lease.num_tokens == 24, "26 tokens, of which the last has no KV"
    assert subject.leases.progress("b/0:prefix", lease.epoch, 0, 0.0).ready_blocks == 0
    plans = [planned(subject)[0] for _ in range(2)]
    assert [len(plan.digest_blocks) for plan in plans] == [4, 2] and not any(plan.chunks for plan in plans)
    assert step(subject) == (None, [])
    progress = subject.leases.progress("b/0:prefix", lease.epoch, 0, 0.0)
    assert progress.finished and progress.cells == (tuple(digest_of(block, 4) for block in lease.blocks),)
    subject.leases.release("b/0:prefix", lease.epoch)
    subject.check()
    assert subject.stats().free_blocks == subject.stats().total_blocks
    assert subject.stats().step_s == step_s > 0.0, "a step without tokens says nothing about decode steps"


def test_a_prefix_is_digested_in_the_steps_of_running_decodes() -> None:
    subject, turn = answered(max_tokens=16)
    subject.add(request("other", (900,) * 5, max_tokens=4), 0.0, hold=False)
    lease = subject.prefix_fetches.hold("b/0:prefix", turn.prompt, 0.0)
    assert lease is not None
    subject.leases.progress("b/0:prefix", lease.epoch, 0, 0.0)
    plans = [planned(subject)[0] for _ in range(4)]
    assert [(len(plan.chunks), len(plan.digest_blocks)) for plan in plans] == [(1, 4), (1, 2), (1, 0), (1, 0)]


def test_only_what_the_reader_lacks_is_digested() -> None:
    subject, turn = answered(max_tokens=16)
    lease = subject.prefix_fetches.hold("b/0:prefix", turn.prompt, 0.0)
    assert lease is not None and step(subject) == (None, []), "the reader has not come"
    assert subject.leases.progress("b/0:prefix", lease.epoch, 4, 0.0).ready_blocks == 4
    plan, _ = planned(subject)
    assert [block for block, _ in plan.digest_blocks] == list(lease.blocks[4:])
    progress = subject.leases.progress("b/0:prefix", lease.epoch, 4, 0.0)
    assert progress.finished and progress.cells == (tuple(digest_of(block, 4) for block in lease.blocks[4:]),)
    other = subject.prefix_fetches.hold("c/0:prefix", turn.prompt, 0.0)
    assert other is not None
    assert subject.leases.progress("c/0:prefix", other.epoch, 5, 0.0).finished, "its digest is known"
    third = subject.prefix_fetches.hold("d/0:prefix", turn.prompt, 0.0)
    assert third is not None
    subject.leases.progress("d/0:prefix", third.epoch, 0, 0.0)
    run_to_end(subject)
    progress = subject.leases.progress("d/0:prefix", third.epoch, 0, 0.0)
    assert progress.finished and progress.cells == (tuple(digest_of(block, 4) for block in lease.blocks),)


def test_a_lease_that_ends_while_its_blocks_are_digested_leaves_nothing() -> None:
    subject, turn = answered(max_tokens=16)
    lease = subject.prefix_fetches.hold("b/0:prefix", turn.prompt, 0.0)
    assert lease is not None
    subject.leases.progress("b/0:prefix", lease.epoch, 0, 0.0)
    plan = scheduled(subject)
    subject.expire(60.0)
    subject.commit(plan, result(plan), 60.0)
    subject.check()
    assert step(subject) == (None, [])
    assert subject.stats().free_blocks == subject.stats().total_blocks and subject.stats().expired_leases == 1


def test_a_held_prefix_is_freed_when_its_lease_expires() -> None:
    side = Side()
    side.computed(range(8))
    lease = side.prefix_fetches.hold("r", range(8), 0.0)
    assert lease is not None
    side.leases.expire(10.0)
    assert side.pool.num_free == 8
    with pytest.raises(LeaseLost):
        side.leases.release("r", lease.epoch)


def test_a_lent_prefix_is_evicted_after_those_that_nobody_used_since() -> None:
    side = Side()
    side.computed(range(8))
    side.computed(range(100, 108))
    lease = side.prefix_fetches.hold("r", range(8), 0.0)
    assert lease is not None
    side.leases.progress("r", lease.epoch, 0, 6.0)
    side.leases.expire(15.9)
    side.leases.release("r", lease.epoch)
    side.pool.allocate(side.pool.num_free - 2)
    assert (side.cached(range(8)), side.cached(range(100, 108))) == (2, 0)


def test_a_fetched_prefix_is_cached_and_a_failed_fetch_is_freed() -> None:
    side = Side()
    for arrived, cached in ((False, 0), (True, 2)):
        fetch = side.prefix_fetches.begin(range(9))  # two full blocks and one token
        side.check()
        assert len(fetch.blocks) == 3
        if arrived:
            bring(side.prefix_fetches, fetch)
        side.prefix_fetches.end(fetch)
        assert (side.cached(range(9)), side.pool.num_free) == (cached, 8)


def test_only_missing_blocks_are_fetched() -> None:
    side = Side(num_blocks=16, prefix_blocks=2)
    side.computed(range(12))
    fetch = side.prefix_fetches.begin(range(24))
    assert (fetch.num_shared, len(fetch.blocks)) == (2, 6), "three blocks are here, of which two count"
    bring(side.prefix_fetches, fetch)
    side.prefix_fetches.end(fetch)
    assert side.cached(range(24)) == 6


def test_a_prefix_that_does_not_fit_changes_nothing() -> None:
    side = Side()
    side.computed(range(8))
    held = side.pool.allocate(5)
    with pytest.raises(OutOfBlocks):
        side.prefix_fetches.begin(range(20))
    side.pool.free(held)
    assert side.pool.num_free == 8
    side.check()


@settings(max_examples=150)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["hold", "read", "release", "fetch", "end", "lose", "compute", "digest"]),
            st.integers(0, 3),
        ),
        max_size=40,
    ),
    st.booleans(),
)
def test_blocks_balance_for_any_order_of_holds_and_fetches(steps: list[tuple[str, int]], digest: bool) -> None:
    side = Side(num_blocks=12, digest=digest)
    prompts = [range(100 * (n // 2), 100 * (n // 2) + 8 + 5 * (n % 2)) for n in range(4)]
    held: list[Lease] = []
    coming: list[PrefixFetch] = []
    for index, (what, number) in enumerate(steps, 1):
        try:
            if what == "compute":
                side.computed(prompts[number], key_digests=1)
            elif what == "read" and held:
                side.leases.progress(held[-1].key, held[-1].epoch, min(number, len(held[-1].blocks)), 0.0)
            elif what == "digest":
                side.leases.advance_offers(index, dict.fromkeys(side.offered(index, number), CELLS))
            elif what == "hold":
                lease = side.prefix_fetches.hold(f"r{number}", prompts[number], 0.0)
                held = [each for each in held if each.key != f"r{number}" or lease is None]
                held += [lease] if lease else []
            elif what == "fetch":
                coming.append(side.prefix_fetches.begin(prompts[number]))
            elif what == "release" and held:
                done = held.pop(number % len(held))
                side.leases.release(done.key, done.epoch)
            elif what in ("end", "lose") and coming:
                fetch = coming.pop(number % len(coming))
                if what == "end":
                    bring(side.prefix_fetches, fetch)
                side.prefix_fetches.end(fetch)
        except OutOfBlocks:
            assert held or coming
        side.check()
    for fetch in coming:
        side.prefix_fetches.end(fetch)
    side.leases.expire(99.0)
    side.check()
    assert side.pool.num_free == 12


def fetching(byte_s: float) -> tuple[Engine, PrefixFetch]:
    """A worker that gets 32 tokens, of ten bytes each, which it computes in a second each."""
    cost = LinearCost(0.0, 1.0, 0.0, 0.0, 0.0, 0.0, byte_s, 0.0)
    subject = engine(kv_blocks=34, cost=cost, block_bytes=40)
    return subject, subject.prefix_fetches.begin(range(1, 33), now_s=12.0)


def test_a_read_takes_four_latencies_at_the_speed_that_the_link_has_now() -> None:
    side = Side(num_blocks=256)
    begin = partial(side.prefix_fetches.begin, owner="b", latency_s=0.04, bytes_per_s=100.0)  # of a byte a block
    fetch = begin(range(100 * BLOCK))
    assert side.prefix_fetches.take(fetch, 100 * BLOCK, 0.0) == (0, 13 * BLOCK)
    side.prefix_fetches.completed(fetch, 0, 1.0)
    assert side.prefix_fetches.take(fetch, 100 * BLOCK, 1.0) == (13 * BLOCK, 7 * BLOCK), "a 16th: latency is little now"
    side.prefix_fetches.end(fetch)
    again = begin(range(1000, 1000 + 100 * BLOCK))
    assert side.prefix_fetches.take(again, 100 * BLOCK, 2.0) == (0, 7 * BLOCK), "as slow as the last fetch"


def ask(subject: Engine, tenant: str = "") -> None:
    made = request("r", tuple(range(1, 41)), max_tokens=1)
    subject.add(replace(made, tenant=tenant, shares_prefixes=not tenant), 12.0, hold=False)


def test_blocks_that_computing_has_passed_are_given_back() -> None:
    subject, fetch = fetching(byte_s=0.002)
    free = subject.pool.num_free
    assert subject.prefix_fetches.take(fetch, 32, 12.0) == (0, 4)
    subject.prefix_fetches.passed(fetch, 18)
    assert subject.pool.num_free == free + 3, "four blocks are passed; bytes of the first may still arrive"
    subject.check()
    subject.prefix_fetches.end(fetch)
    assert subject.pool.num_free == free + 8


def test_a_prompt_whose_prefix_arrives_waits_for_it_and_computes_the_rest() -> None:
    subject, fetch = fetching(byte_s=0.002)
    ask(subject)
    assert step(subject, 12.0)[0] is None
    assert subject.wakes_at_s == pytest.approx(12.0 + 0.025 * 40), "2.5 % of computing it"
    bring(subject.prefix_fetches, fetch, 13.0)
    subject.prefix_fetches.end(fetch)
    plan, _ = planned(subject, 13.0)
    assert plan.chunks[0].first_position == 32
    subject.check()


@pytest.mark.parametrize("now_s", [12.5, 13.0])
def test_a_prefix_that_does_not_arrive_or_is_late_is_computed(now_s: float) -> None:
    subject, fetch = fetching(byte_s=0.002)
    ask(subject)
    assert step(subject, 12.0)[0] is None
    if now_s < subject.wakes_at_s:
        assert step(subject, now_s)[0] is None
        subject.prefix_fetches.end(fetch)
    plan, _ = planned(subject, now_s)
    assert plan.chunks[0].first_position == 0


def test_nothing_waits_long_for_what_is_computed_sooner_or_at_all_for_what_is_another_tenants() -> None:
    subject, _ = fetching(byte_s=0.2)  # 64 seconds, and 32 of computing
    ask(subject)
    assert step(subject, 12.0)[0] is None
    assert subject.wakes_at_s <= 12.0 + 0.025 * 40, "if it were faster than before, a read would have ended by then"
    assert planned(subject, subject.wakes_at_s)[0].chunks[0].first_position == 0
    subject, _ = fetching(byte_s=0.002)
    ask(subject, tenant="eve")
    assert planned(subject, 12.0)[0].chunks[0].first_position == 0


def test_prompts_behind_it_that_are_computed_until_then_go_first() -> None:
    subject, fetch = fetching(byte_s=0.005)  # 1.6 seconds
    ask(subject)
    subject.add(request("long", tuple(range(100, 120)), max_tokens=1), 12.0, hold=False)
    subject.add(request("short", (200,), max_tokens=1), 12.0, hold=False)
    plan, _ = planned(subject, 12.0)
    assert [chunk.key for chunk in plan.chunks] == ["short/0"]
    bring(subject.prefix_fetches, fetch, 14.0)
    subject.prefix_fetches.end(fetch)
    plan, _ = planned(subject, 14.0)
    assert plan.chunks[0].key == "r/0"
