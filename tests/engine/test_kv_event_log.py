"""The KV event log: any reader, however far behind, ends with the hashes that are cached."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec import Struct, msgpack

from tests.engine.driving import model_facts
from workers.config import EngineConfig
from workers.engine.blocks import BlockPool
from workers.engine.engine import Engine
from workers.engine.kv_event_log import KVEventLog, Tier
from workers.engine.sequence import Lease
from workers.engine.step import StepPlan, StepResult
from workers.kv_events import HASH_BLOCK_SIZE, HashChanges, KVEvents, prefix_hash_of_block, prefix_hashes
from workers.request import Request, SamplingParams

TIERS = st.sampled_from(list(Tier))
HASHES = st.integers(1, 12)


class Reader:
    """A reader's copy of the cache's hashes."""

    def __init__(self) -> None:
        self.last = self.reach = 0
        self.hashes: dict[Tier, set[int]] = {tier: set() for tier in Tier}

    def take(self, news: KVEvents) -> None:
        assert news.whole or news.first == self.last
        for tier in Tier:
            changes: HashChanges = getattr(news, tier.value)
            if news.whole:
                self.hashes[tier].clear()
            self.hashes[tier] -= set(changes.removed)
            self.hashes[tier] |= set(changes.added)
        self.last, self.reach = news.last, news.reach

    def catch_up(self, log: KVEventLog, most: int) -> int:
        """Read until nothing is new. Returns the number of reads."""
        for asked in range(1, 100):
            self.take(log.since(self.last, self.reach, most))
            if self.reach == self.last:
                return asked
        raise AssertionError("there is always more")


class LogMachine(RuleBasedStateMachine):
    """Two readers, one that reads after every change and one at random times; the log forgets removals soon."""

    def __init__(self) -> None:
        super().__init__()
        self.log = KVEventLog(16, max_removed=4)
        self.truth: dict[Tier, set[int]] = {tier: set() for tier in Tier}
        self.readers = [Reader(), Reader()]

    @rule(tier=TIERS, hashes=st.lists(HASHES, max_size=5))
    def add(self, tier: Tier, hashes: list[int]) -> None:
        for prefix_hash in hashes:
            self.log.add(tier, prefix_hash)
            self.truth[tier].add(prefix_hash)

    @rule(tier=TIERS, hashes=st.lists(HASHES, max_size=5))
    def remove(self, tier: Tier, hashes: list[int]) -> None:
        for prefix_hash in hashes:
            self.log.remove(tier, prefix_hash)
            self.truth[tier].discard(prefix_hash)

    @rule(which=st.integers(0, 1), most=st.integers(1, 5))
    def read_some(self, which: int, most: int) -> None:
        reader = self.readers[which]
        reader.take(self.log.since(reader.last, reader.reach, most))

    @rule(most=st.integers(1, 5))
    def catch_up(self, most: int) -> None:
        self.readers[0].catch_up(self.log, most)
        assert self.readers[0].hashes == self.truth and self.readers[0].last == self.log.number

    @rule(which=st.integers(0, 1))
    def begin_anew(self, which: int) -> None:
        self.readers[which] = Reader()

    @invariant()
    def who_knows_all_knows_the_truth(self) -> None:
        for reader in self.readers:
            if reader.last == reader.reach == self.log.number:
                assert reader.hashes == self.truth
        assert all(self.log.hashes(tier) == hashes for tier, hashes in self.truth.items())

    def teardown(self) -> None:
        for reader in self.readers:
            reader.catch_up(self.log, 3)
            assert reader.hashes == self.truth


LogMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestLogMachine = LogMachine.TestCase


def test_a_reply_is_bounded_and_the_next_one_continues() -> None:
    log, reader = KVEventLog(16), Reader()
    for prefix_hash in range(10_000):
        log.add(Tier.DEVICE, prefix_hash)
    assert len(log.since(0, 0).device.added) == 4096
    assert reader.catch_up(log, 4096) == 3 and len(reader.hashes[Tier.DEVICE]) == 10_000


def test_endless_changes_take_bounded_memory_and_old_names_stay() -> None:
    log, reader = KVEventLog(16, max_removed=100), Reader()
    for prefix_hash in range(50):
        log.add(Tier.DISK, prefix_hash)
    for prefix_hash in range(50, 20_000):
        log.add(Tier.HOST, prefix_hash)
        log.remove(Tier.HOST, prefix_hash - 10)
        assert len(log._added) <= 2 * (2 * 60 + 100)
        if prefix_hash % 7 == 0:
            reader.take(log.since(reader.last, reader.reach, 5))
    reader.catch_up(log, 5)
    assert reader.hashes[Tier.DISK] == set(range(50)) and reader.hashes[Tier.HOST] == set(range(19_990, 20_000))


def test_a_reader_that_is_too_far_behind_gets_everything() -> None:
    log, reader = KVEventLog(16, max_removed=10), Reader()
    for prefix_hash in range(20):
        log.add(Tier.DEVICE, prefix_hash)
    reader.catch_up(log, 100)
    for prefix_hash in range(10):
        log.remove(Tier.DEVICE, prefix_hash)
    assert not log.since(reader.last, reader.reach).whole
    log.remove(Tier.DEVICE, 10)
    assert log.since(reader.last, reader.reach).whole
    assert log.since(99, 99).whole, "a number of another life"


def test_a_name_that_is_removed_and_added_again_is_present() -> None:
    log, reader = KVEventLog(16), Reader()
    log.add(Tier.DEVICE, 1)
    reader.catch_up(log, 9)
    log.remove(Tier.DEVICE, 1)
    log.add(Tier.DEVICE, 1)
    log.remove(Tier.HOST, 1)  # it never was there
    reader.catch_up(log, 9)
    assert reader.hashes == {tier: {1} if tier is Tier.DEVICE else set() for tier in Tier} and log.number == 3


@given(st.sampled_from([16, 48, 64, 128, 256, 512]), st.integers(0, 2000))
def test_a_block_has_the_name_of_the_tokens_that_end_with_it(block_size: int, length: int) -> None:
    tokens = range(length)
    hashes = prefix_hashes(tokens)
    hash_block_size = KVEventLog(block_size).hash_block_size
    found = [prefix_hash_of_block(hashes, index, block_size) for index in range(length // block_size)]
    ends = {(index + 1) * block_size: prefix_hash for index, prefix_hash in enumerate(found) if prefix_hash is not None}
    assert ends == {
        end: prefix_hashes(tokens[:end])[-1]
        for end in range(hash_block_size, length // block_size * block_size + 1, hash_block_size)
    }


def computed(pool: BlockPool, tokens: range) -> list[int]:
    """Blocks of this prompt, cached as an engine caches them."""
    blocks = pool.allocate(len(tokens) // pool.block_size)
    for index, block in enumerate(blocks):
        content = b"%d" % hash(tuple(tokens[: (index + 1) * pool.block_size]))
        pool.cache_block(block, content, prefix_hash_of_block(prefix_hashes(tokens), index, pool.block_size))
    return blocks


def test_evicted_cleared_and_forgotten_blocks_are_logged_as_removed() -> None:
    pool = BlockPool(8, 64)
    first, second = range(256), range(1000, 1256)
    pool.free(computed(pool, first))
    held = computed(pool, second)
    assert pool.log.hashes(Tier.DEVICE) == {*prefix_hashes(first), *prefix_hashes(second)}
    taken = pool.allocate(1)  # the tail of the first one
    pool.check([held, taken])
    assert pool.log.hashes(Tier.DEVICE) == {prefix_hashes(first)[0], *prefix_hashes(second)}
    pool.clear_cache()
    assert pool.log.hashes(Tier.DEVICE) == set(prefix_hashes(second)), "what is held can be found"
    pool.forget([prefix_hash for prefix_hash in (pool._block_hashes[held[1]],) if prefix_hash is not None])
    assert pool.log.hashes(Tier.DEVICE) == {prefix_hashes(second)[1]}


def engine(block_size: int, num_blocks: int) -> Engine:
    config = EngineConfig(block_size=block_size, kv_blocks=num_blocks, max_batch_tokens=512)
    return Engine(config, model_facts(vocab_size=10_000))


def run(subject: Engine, request: Request, *, hold: bool = False) -> int:
    """Run to the end; returns how many of its tokens were cached."""
    subject.add(request, 0.0, hold=hold)
    cached = 0
    while (plan := subject.schedule(0.0)) is not None:
        subject.commit(plan, answer(plan), 0.0)
        subject.check()
        for emitted in subject.drain():
            if isinstance(emitted, Lease):
                subject.leases.release(emitted.key, emitted.epoch)
            else:
                cached = max(cached, getattr(emitted, "cached_tokens", 0))
    return cached


def answer(plan: StepPlan) -> StepResult:
    tokens = tuple(1 + chunk.draw.position if chunk.draw else None for chunk in plan.chunks)
    return StepResult(plan.number, tokens, tuple(None for _ in tokens), ((b"",) * len(plan.digest_blocks),), 0.01)


@settings(max_examples=40)
@given(
    st.sampled_from([16, 64, 128, 256]),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 700), st.integers(1, 80), st.booleans()), max_size=12),
)
def test_an_engine_finds_the_prefixes_in_its_log(block_size: int, asked: list[tuple[int, int, int, bool]]) -> None:
    """One request at a time, on a pool too small for all: a prompt's logged prefix is cached, up to its last token."""
    subject, reader = engine(block_size, 1024 // block_size), Reader()
    for number, (first, length, most, hold) in enumerate(asked):
        prompt = tuple(range(1 + 100 * first, 1 + 100 * first + length))
        sampling = SamplingParams(seed=1, max_tokens=most)
        reader.catch_up(subject.pool.log, 3)
        assert subject.stats().cache_number == reader.last
        emitted = 0
        for prefix_hash in prefix_hashes(prompt[:-1])[
            max(HASH_BLOCK_SIZE, block_size) // HASH_BLOCK_SIZE - 1 :: max(HASH_BLOCK_SIZE, block_size)
            // HASH_BLOCK_SIZE
        ]:
            if prefix_hash not in reader.hashes[Tier.DEVICE]:
                break
            emitted += max(HASH_BLOCK_SIZE, block_size)
        cached = run(subject, Request(f"r{number}", prompt, sampling), hold=hold)
        assert emitted <= cached < emitted + max(HASH_BLOCK_SIZE, block_size)


def test_the_log_is_empty_without_prefix_caching() -> None:
    config = EngineConfig(prefix_caching=False)
    subject = Engine(config, model_facts(vocab_size=10_000))
    run(subject, Request("r", tuple(range(1, 400)), SamplingParams(seed=1, max_tokens=4)))
    assert subject.stats().cache_number == 0


class KVEventsOfTwoTiers(Struct, frozen=True):
    """What an earlier version sends and reads."""

    first: int
    last: int
    reach: int
    grain: int
    whole: bool = False
    device: HashChanges = HashChanges()
    host: HashChanges = HashChanges()


def test_versions_with_and_without_further_tiers_read_each_others_events() -> None:
    log = KVEventLog(16)
    for tier in Tier:
        log.add(tier, 5)
    news = log.since(0, 0)
    old = msgpack.decode(msgpack.encode(news), type=KVEventsOfTwoTiers)
    assert (old.last, old.device.added, old.host.added) == (4, (5,), (5,))
    new = msgpack.decode(msgpack.encode(old), type=KVEvents)
    assert (new.host, new.disk, new.remote) == (news.host, HashChanges(), HashChanges())
