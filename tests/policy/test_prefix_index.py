"""The prefix index against plain sets."""

from collections.abc import Sequence
from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cluster.policy.routing.prefix_index import Match, PrefixIndex, prefix_hashes
from workers.kv_events import HashChanges, KVEvents

WORKERS = [f"w{number}" for number in range(20)]
who = st.sampled_from(WORKERS[:4])
TIERS = st.sampled_from(["device", "host", "disk", "remote"])
SERVERS = {"w0": "s", "w1": "s", "w2": "t"}
some = st.lists(st.integers(1, 6), max_size=6, unique=True)


def news(
    added: list[int], removed: Sequence[int] = (), *, tier: str = "device", whole: bool = False, block_size: int = 1
) -> KVEvents:
    return KVEvents(0, 1, 1, block_size, whole, **{tier: HashChanges(tuple(added), tuple(removed))})


def test_chains_are_equal_as_far_as_tokens_are() -> None:
    assert prefix_hashes(range(10), 4) == prefix_hashes((*range(8), 77), 4)
    assert prefix_hashes(range(10), 4) != prefix_hashes((0, 9, *range(2, 10)), 4)
    assert prefix_hashes((1, 2, 3, 4, 1, 2, 3, 4), 4)[0] != prefix_hashes((1, 2, 3, 4, 1, 2, 3, 4), 4)[1]
    assert prefix_hashes(range(3), 4) == []
    assert not {*prefix_hashes(range(10), 4, salt="a")} & {
        *prefix_hashes(range(10), 4, salt="b"),
        *prefix_hashes(range(10), 4),
    }
    assert prefix_hashes([1, 2, -1, 4], 2) == prefix_hashes([1, 2], 2), "no worker takes such a token"


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 7), st.data())
def test_a_chain_goes_on_from_any_part_of_it(tokens: list[int], block_size: int, data: st.DataObject) -> None:
    whole = prefix_hashes(tokens, block_size)
    assert len(whole) == len(tokens) // block_size and all(0 <= prefix_hash < 2**60 for prefix_hash in whole)
    part = data.draw(st.integers(0, len(whole)))
    assert prefix_hashes(tokens, block_size, whole[:part]) == whole


def test_a_lookup_returns_the_matched_length_of_each_worker() -> None:
    index = PrefixIndex(block_size=128)
    for worker, hashes in (("a", [1, 2, 3]), ("b", [1, 2]), ("c", [2, 3]), ("d", [1, 3])):
        index.take(worker, "1", news(hashes, block_size=128))
    assert index.matches([1, 2, 3, 4]) == {"a": Match(384), "b": Match(256), "d": Match(128)}
    assert index.matches([]) == {} == index.matches([9])


def test_who_computed_an_answer_has_it_to_its_end() -> None:
    index = PrefixIndex(block_size=4)
    answered = (*range(10), 50)  # the KV of the last token was never computed
    hashes = prefix_hashes(range(8), 4)
    for worker in ("prefill", "decode"):
        index.take(worker, "1", news(hashes, block_size=4))
    index.answered("decode", answered)
    index.answered("gone", answered)
    index.answered("decode", (1, 2, 3))  # too short for a name

    def found(*prompt: int) -> dict[str, Match]:
        return index.matches(prefix_hashes(prompt, 4), prompt=prompt)

    assert found(*answered, 60, 70) == {"prefill": Match(8), "decode": Match(10)}
    assert found(*answered) == {"prefill": Match(8), "decode": Match(10)}
    assert found(*range(9), 77, 50) == {"prefill": Match(8), "decode": Match(8)}, "another answer"
    assert found(*range(4), 9, 9, 9, 9) == {"prefill": Match(4), "decode": Match(4)}
    index.take("decode", "1", news([], hashes[1:], block_size=4))
    assert found(*answered) == {"prefill": Match(8), "decode": Match(4)}, "it was evicted"
    index.answered("prefill", answered)
    assert found(*answered) == {"prefill": Match(10), "decode": Match(4)}


def test_few_answers_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.policy.routing.prefix_index.MAX_ANSWERS", 2)
    index = PrefixIndex(block_size=4)
    prompts = [(first, 1, 2, 3, 4, 5) for first in range(3)]
    index.take(
        "a", "1", news([prefix_hash for each in prompts for prefix_hash in prefix_hashes(each, 4)], block_size=4)
    )
    for each in prompts:
        index.answered("a", each)
    assert [index.matches(prefix_hashes(each, 4), prompt=each)["a"].tokens for each in prompts] == [4, 5, 5]


def test_larger_blocks_have_names_further_apart() -> None:
    index = PrefixIndex(block_size=128)
    index.take("a", "1", news([1, 2, 3], block_size=128))
    index.take("b", "1", news([4, 8], block_size=512))
    index.take("c", "1", news([3, 6], block_size=384))
    hashes = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert index.matches(hashes) == {"a": Match(384), "b": Match(1024), "c": Match(768)}
    index.take("b", "2", news([1], block_size=128))
    assert index.matches(hashes) == {"a": Match(384), "b": Match(128), "c": Match(768)}


def test_blocks_in_host_memory_and_on_a_disk_count_separately() -> None:
    index = PrefixIndex(block_size=1)
    index.take("a", "1", news([1, 3]))
    index.take("a", "1", news([2, 3, 4], tier="host"))
    index.take("b", "1", news([1, 2]))
    index.take("a", "1", news([1, 4, 5, 6], tier="disk"))
    index.take("c", "1", news([1], tier="disk"))
    assert index.matches([1, 2, 3, 4, 5]) == {"a": Match(5, 2, 1), "b": Match(2), "c": Match(1, 0, 1)}
    assert index.matches([1, 2])["a"] == Match(2, 1) and index.matches([1, 2, 3, 4, 5])["a"].ready_tokens == 2
    index.take("a", "1", news([], [5], tier="disk"))
    assert index.matches([1, 2, 3, 4, 5])["a"] == Match(4, 2)
    index.take("a", "1", news([7], whole=True))
    assert "a" not in index.matches([1, 2])


def test_what_one_worker_knows_of_a_server_all_that_use_it_can_read() -> None:
    index = PrefixIndex(block_size=1)
    index.take("a", "1", news([1, 2, 3, 4], tier="remote"), server="s")
    index.take("b", "1", news([1, 2]), server="s")
    index.take("c", "1", news([1]), server="t")
    assert index.matches([1, 2, 3, 4, 5]) == {"a": Match(4, 0, 0, 4), "b": Match(4, 0, 0, 2), "c": Match(1)}
    assert sum(map(len, index._remote._hashes.values())) == 4, "no worker's own"
    index.take("b", "1", news([4], tier="remote"), server="s")
    index.take("a", "1", news([], [4], tier="remote"), server="s")
    assert index.matches([1, 2, 3, 4])["a"] == Match(4, 0, 0, 4), "b still knows it"
    index.forget("a")
    assert index.matches([1, 2, 3, 4]) == {"b": Match(2), "c": Match(1)}


def test_many_holders_are_found_like_few() -> None:
    index = PrefixIndex(block_size=1)
    for number, worker in enumerate(WORKERS):
        index.take(worker, "1", news([1, 2, 3][: 1 + number % 3]))
        if number % 5 == 0:
            index.take(worker, "1", news([4], [3]))
            index.take(worker, "1", news([2, 3], tier="host"))
    found = index.matches([1, 2, 3, 4])
    for number, worker in enumerate(WORKERS):
        there = 1 + number % 3
        expected = Match(4, 2 if there == 1 else 1) if number % 5 == 0 else Match(there)
        assert found[worker] == expected, worker


def test_sent_prompts_count_until_cache_events_must_have_arrived() -> None:
    index = PrefixIndex(block_size=1, expect_s=2.0)
    index.expect("r", "a", "1", [1, 2])
    index.expect("s", "a", "1", [1, 2, 3])
    assert index.matches([1, 2, 3], 1000.0) == {"a": Match(3)}, "however long it takes"
    index.settle("s", 1000.0)
    assert index.matches([1, 2, 3], 1001.9) == {"a": Match(3)}
    assert index.matches([1, 2, 3], 1002.0) == {"a": Match(2)}, "r is still expected"
    index.settle("r", 1002.0)
    index.take("a", "1", news([1]))
    assert index.matches([1, 2, 3], 1004.0) == {"a": Match(1)}


def test_a_restarted_worker_has_nothing() -> None:
    index = PrefixIndex(block_size=1)
    index.take("a", "1", news([1, 2]))
    index.expect("r", "a", "1", [3])
    index.take("a", "2", news([1]))
    assert index.matches([1, 2]) == {"a": Match(1)} and index.matches([3]) == {}
    assert index.is_of("a", "2") and not index.is_of("a", "1") and not index.is_of("b", "1")
    index.settle("r", 0.0)
    assert index.matches([3], 99.0) == {}


class IndexMachine(RuleBasedStateMachine):
    """Anything that workers may say and gateways may send, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(block_size=1, expect_s=2.0)
        self.now_s = 0.0
        self.keys = 0
        self.lives: dict[str, int] = {}
        self.block_sizes: dict[str, int] = {}
        self.known: set[str] = set()  # events of in this life
        self.device: dict[str, set[int]] = {}
        self.host: dict[str, set[int]] = {}
        self.disk: dict[str, set[int]] = {}
        self.remote: dict[str, set[int]] = {}
        self.hopes: list[list] = []  # key, worker, names, until when

    @rule(worker=who, added=some, removed=some, tier=TIERS, whole=st.booleans(), reborn=st.integers(0, 3))
    def take(self, worker: str, added: list[int], removed: list[int], tier: str, whole: bool, reborn: int) -> None:
        if reborn:
            self.block_sizes[worker] = reborn
            self.lives[worker] = self.lives.get(worker, 0) + 1
            self._drop(worker)
        if whole:
            for each in (self.device, self.host, self.disk, self.remote):
                each[worker] = set()
        tiers = {"device": self.device, "host": self.host, "disk": self.disk, "remote": self.remote}
        held = tiers[tier].setdefault(worker, set())
        self.known.add(worker)
        held -= set(removed)
        held |= set(added)
        events = news(added, removed, tier=tier, whole=whole, block_size=self.block_sizes.get(worker, 1))
        self.index.take(worker, str(self.lives.get(worker, 0)), events, SERVERS.get(worker, ""))

    @rule(worker=who)
    def forget(self, worker: str) -> None:
        self.index.forget(worker)
        self._drop(worker)

    def _drop(self, worker: str) -> None:
        self.device.pop(worker, None)
        self.known.discard(worker)
        self.host.pop(worker, None)
        self.disk.pop(worker, None)
        self.remote.pop(worker, None)
        self.hopes = [hope for hope in self.hopes if hope[1] != worker]

    @rule(worker=who, hashes=some)
    def expect(self, worker: str, hashes: list[int]) -> None:
        self.keys += 1
        self.index.expect(f"r{self.keys}", worker, str(self.lives.get(worker, 0)), hashes)
        fresh = set(hashes) - self.device.get(worker, set())
        self.hopes.append([f"r{self.keys}", worker, fresh, float("inf")])

    @rule(number=st.integers(0, 9))
    def settle(self, number: int) -> None:
        key = f"r{self.keys - number}"
        self.index.settle(key, self.now_s)
        for hope in self.hopes:
            if hope[0] == key:
                hope[3] = min(hope[3], self.now_s + 2.0)

    @rule(seconds=st.sampled_from([0.5, 2.0]))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.hopes = [hope for hope in self.hopes if hope[3] > self.now_s]

    @invariant()
    def every_lookup_is_what_the_sets_say(self) -> None:
        for hashes in ([1, 2, 3, 4, 5, 6], [6, 5, 4], [3, 1, 2]):
            expected = {}
            for worker in WORKERS[:4]:
                ready = set(self.device.get(worker, ()))
                ready = ready.union(*(hope[2] for hope in self.hopes if hope[1] == worker))
                host = self.host.get(worker, set()) - ready
                disk = self.disk.get(worker, set()) - ready - host
                server = SERVERS.get(worker, worker) if worker in self.known else ""
                told = [hashes for each, hashes in self.remote.items() if SERVERS.get(each, each) == server]
                remote = set().union(*told) - ready - host - disk
                block_size = self.block_sizes.get(worker, 1) if worker in self.known else 1
                found = list(
                    takewhile((ready | host | disk | remote).__contains__, hashes[block_size - 1 :: block_size])
                )
                if found:
                    behind = (
                        sum(prefix_hash in tier for prefix_hash in found) * block_size for tier in (host, disk, remote)
                    )
                    expected[worker] = Match(len(found) * block_size, *behind)
            assert self.index.matches(hashes, self.now_s) == expected

    def teardown(self) -> None:
        for worker in WORKERS[:4]:
            self.index.forget(worker)
        left = (
            self.index._device.holders,
            self.index._host.holders,
            self.index._disk.holders,
            self.index._remote.holders,
            self.index._sharing,
            self.index._expected_holders,
            self.index._expected_counts,
        )
        assert not any(left), "names without a holder stay"
        assert not self.index._expected and len(self.index._free) == len(self.index._workers)


IndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestIndexMachine = IndexMachine.TestCase


def test_endless_changes_of_a_worker_take_bounded_memory() -> None:
    index = PrefixIndex(block_size=1)
    for first in range(0, 50_000, 100):
        index.take("a", "1", news(list(range(first, first + 100)), list(range(first - 500, first - 400))))
    assert len(index._device.holders) == 500
    assert max(len(hashes) for hashes in index._device._hashes.values()) < 3000


def test_a_full_index_knows_no_further_names_until_others_are_gone() -> None:
    index = PrefixIndex(block_size=1, max_hashes=3)
    index.take("a", "1", news([1, 2, 3]))
    index.take("b", "1", news([1, 4]))
    assert index.matches([1]) == {"a": Match(1), "b": Match(1)} and index.matches([4]) == {}
    index.take("a", "1", news([5], removed=[3]))
    assert index.matches([5]) == {"a": Match(1)}
    index.take("b", "1", news([], removed=[4]))
    index.forget("a")
    index.take("b", "1", news([6, 7]))
    assert index.matches([7]) == {"b": Match(1)} and len(index._device.holders) == 3
    assert index.dropped == (("device", 1), ("host", 0), ("disk", 0), ("remote", 0))
