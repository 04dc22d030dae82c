"""Block ownership when blocks are scarce: recomputation, siblings, copy-on-write. On a checked memory."""

import contextlib
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtransfer.errors import LeaseLost
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
from tests.examples import examples
from workers.config import BATCHING
from workers.costs import LinearCost
from workers.engine.engine import Engine
from workers.engine.sequence import Lease
from workers.engine.step import StepPlan
from workers.errors import InvalidRequest, Overloaded, UnknownSequence
from workers.request import SLO, Request, SamplingParams, TokensOut

PROMPT = tuple(range(1, 7))  # a block and a half


def starved(**config: Any) -> tuple[Engine, Device]:
    """Three answers that outgrow eight blocks of four."""
    subject, device = engine(kv_blocks=10, **config), Device()
    for index in range(3):
        subject.add(device.know(request(f"r{index}", (1 + index,) * 5, max_tokens=10)), float(index), hold=False)
    return subject, device


def test_a_preempted_sequence_is_recomputed_with_the_same_tokens() -> None:
    subject, device = starved()
    recomputed = 0
    begun: set[str] = set()
    emitted = []
    while (made := step(subject, 9.0, device))[0] is not None:
        recomputed += sum(c.first_position == 0 and c.key in begun for c in made[0].chunks)
        begun |= {chunk.key for chunk in made[0].chunks}
        emitted += made[1]
    assert subject.stats().preemptions > 0 and recomputed > 0
    for index in range(3):
        assert tokens_of(emitted, f"r{index}/0") == [next_token(f"r{index}/0", 5 + n) for n in range(10)]


def siblings(subject, device: Device, count: int, *, hold: bool = False, prompt: tuple[int, ...] = PROMPT) -> list[str]:
    made = [device.know(request(f"r#{index}", prompt, group="r")) for index in range(count)]
    for each in made:
        subject.add(each, 0.0, hold=hold)
    return [each.key for each in made]


@pytest.mark.parametrize("length", [1, 4, 5, 6, 8, 9, 30])
def test_siblings_compute_their_prompt_once(length: int) -> None:
    subject, device = engine(kv_blocks=66), Device()
    keys = siblings(subject, device, 3, prompt=tuple(range(1, length + 1)))
    computed, emitted = 0, []
    while (made := step(subject, 0.0, device))[0] is not None:
        computed += sum(len(c.tokens) for c in made[0].chunks if c.first_position < length)
        emitted += made[1]
    assert computed <= length + 2 * max(1, length % 4)  # the others: one token each, or their own last block
    for key in keys:
        assert tokens_of(emitted, key) == [next_token(key, length + n) for n in range(8)]


def test_siblings_share_blocks_and_copy_only_the_one_they_write() -> None:
    subject, device = engine(), Device()
    siblings(subject, device, 3)
    step(subject, 0.0, device)  # the first computes; the others wait for it
    assert subject.stats().running == 1
    plan, _ = planned(subject, 0.0, device)
    assert [len(chunk.tokens) for chunk in plan.chunks] == [1, 1, 1]
    assert len(plan.copies) == 2
    assert subject.stats().total_blocks - subject.stats().free_blocks == 1 + 3  # one full block shared, a tail each


def test_a_prompt_of_another_group_overtakes_waiting_siblings() -> None:
    subject, device = engine(max_batch_tokens=8), Device()
    siblings(subject, device, 2, prompt=tuple(range(1, 21)))
    step(subject, 0.0, device)
    subject.add(device.know(request("other", (500, 501, 502))), 0.0, hold=False)
    step(subject, 0.0, device)
    plan, _ = planned(subject, 0.0, device)
    assert [chunk.key for chunk in plan.chunks] == ["r#0/0", "other/0"]


def test_a_sibling_goes_on_when_the_one_it_waits_for_is_aborted() -> None:
    subject, device = engine(max_batch_tokens=8), Device()
    first, second = siblings(subject, device, 2, prompt=tuple(range(1, 21)))
    step(subject, 0.0, device)
    subject.sequences.abort(first)
    emitted = run_to_end(subject, 0.0, device)
    assert tokens_of(emitted, second) == [next_token(second, 20 + n) for n in range(8)]


def test_held_siblings_are_leased_apart_but_share_blocks() -> None:
    subject, device = engine(), Device()
    siblings(subject, device, 2, hold=True)
    emitted = run_to_end(subject, 0.0, device)
    first, second = (each.blocks for each in emitted if isinstance(each, Lease))
    assert first[0] == second[0] and first[1] != second[1]
    assert subject.stats().leases == 2


def untimed(subject: Engine, device: Device) -> None:
    """A step that teaches nothing about what steps cost."""
    plan = subject.schedule(0.0)
    assert plan is not None
    device.execute(plan)
    subject.commit(plan, result(plan, seconds=0.0), 0.0)
    subject.drain()


def admit_a_held_sibling_without_a_token() -> tuple[Engine, Device, StepPlan, Request]:
    """A decode's SLO leaves time for four tokens of a prompt's beginning: one of three takes it, and what is left
    is too short for the sibling's last token, which looks at more before it.
    """
    cost = LinearCost(step_s=0.004, prefill_token_s=1e-3, prefill_pair_s=2e-4, decode_row_s=0.0, decode_context_s=0.0)
    subject, device = engine(max_batch_tokens=64, cost=cost), Device()
    subject.add(device.know(request("d", (90, 91, 92, 93, 94, 95), slo=SLO(tpot_s=0.0102))), 0.0, hold=False)
    untimed(subject, device)
    first, second = (device.know(request(f"r#{index}", PROMPT, group="r")) for index in range(2))
    subject.add(first, 0.0, hold=True)
    for _ in range(2):
        untimed(subject, device)
    subject.add(device.know(request("other", (50, 51, 52))), 0.0, hold=False)
    subject.add(second, 0.0, hold=True)
    plan = subject.schedule(0.0)
    assert plan is not None and second.key not in [chunk.key for chunk in plan.chunks]
    return subject, device, plan, second


def test_a_held_sibling_that_gets_no_token_yet_is_leased_on_the_block_that_it_will_write() -> None:
    subject, device, plan, second = admit_a_held_sibling_without_a_token()
    lease = next(each for each in subject.drain() if isinstance(each, Lease) and each.key == second.key)
    device.execute(plan)
    subject.commit(plan, result(plan), 0.0)
    plan, emitted = planned(subject, 0.0, device)
    assert [chunk.blocks for chunk in plan.chunks if chunk.key == second.key] == [lease.blocks]
    progress = subject.leases.progress(second.key, lease.epoch, 0, 0.0)
    assert progress.finished and progress.ready_blocks == 2
    assert tokens_of(emitted, second.key) == [next_token(second.key, len(PROMPT))]


def test_a_block_is_not_given_away_before_the_step_that_copies_into_it() -> None:
    """A transfer could write to it at once, and the copy would then overwrite that."""
    subject, _, plan, second = admit_a_held_sibling_without_a_token()
    subject.sequences.abort(second.key)
    subject.check()
    targets = {target for _, target in plan.copies}
    assert targets and not targets & set(subject.pool.allocate(subject.pool.num_free))


def test_a_step_does_not_preempt_a_sequence_that_it_admitted() -> None:
    """The sibling's tail is copied in the same step: saved before, it would be garbage."""
    subject, device = engine(kv_blocks=10, batching="static"), Device()
    subject.add(device.know(request("r#0", PROMPT, max_tokens=1, group="r")), 0.0, hold=False)
    run_to_end(subject, 0.0, device)
    sequence = device.know(request("arrived", tuple(range(50, 57)), max_tokens=1))
    subject.reservations.reserve(sequence, 0.0)
    blocks = tuple(subject.reservations.get(sequence.key).blocks)
    subject.pool.begin_transfer(blocks)  # not settled: its last block must be copied before it is written
    device.fill(blocks, sequence.prompt)
    subject.reservations.fetched(sequence.key, 0.0)
    subject.reservations.decode(sequence.key, [next_token(sequence.key, 7)], 0.0)
    subject.add(device.know(request("wide", tuple(range(70, 81)), max_tokens=1)), 1.0, hold=False)
    late = device.know(request("r#1", PROMPT, max_tokens=2, group="r"))
    subject.add(late, 2.0, hold=False)
    emitted = run_to_end(subject, 3.0, device)
    assert tokens_of(emitted, late.key) == [next_token(late.key, 6), next_token(late.key, 7)]


def test_a_held_prompt_is_computed_in_its_leased_blocks() -> None:
    """A chunk after one that ended inside a block continues in that block, although the lease holds it too."""
    subject, device = engine(max_batch_tokens=9), Device()
    subject.add(device.know(request("a", tuple(range(1, 24)))), 0.0, hold=True)
    copies, emitted = 0, []
    while (made := step(subject, 0.0, device))[0] is not None:
        copies += len(made[0].copies)
        emitted += made[1]
    assert copies == 0
    lease = next(each for each in emitted if isinstance(each, Lease))
    assert subject.leases.progress("a/0", lease.epoch, 0, 0.0).ready_blocks == 6


def test_the_reservation_of_a_sibling_waits_until_the_shared_kv_has_come() -> None:
    subject = engine()
    first, second = (request(f"r#{index}", PROMPT, group="r") for index in range(2))
    subject.reservations.reserve(first, 0.0)
    assert subject.reservations.waits_for_sibling(second)
    with pytest.raises(Overloaded, match="sibling"):
        subject.reservations.reserve(second, 0.0)
    subject.reservations.fetched(first.key, 0.0)
    assert subject.reservations.reserve(second, 0.0).cached_tokens == 4


def test_a_prompt_that_wants_its_own_logprobs_computes_all_of_it() -> None:
    subject = engine(max_batch_tokens=8)
    subject.add(request("warm", tuple(range(1, 13)), max_tokens=1), 0.0, hold=False)
    run_to_end(subject)
    sampling = SamplingParams(temperature=0.0, seed=1, max_tokens=2, prompt_logprobs=0)
    subject.add(Request("a", tuple(range(1, 13)), sampling, reply_to="test"), 0.0, hold=False)
    outputs = [each for each in run_to_end(subject) if isinstance(each, TokensOut)]
    assert [score.chosen for score in outputs[0].prompt_logprobs] == [-float(token) for token in range(2, 13)]
    assert not outputs[1].prompt_logprobs and outputs[0].cached_tokens == 0


class EngineMachine(RuleBasedStateMachine):
    """Everything at once, on a small pool: at every step each token must attend to the right ones."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.count = 0
        self.emitted: list = []
        self.alive: dict[str, Request] = {}
        self.reading: list[tuple[int, ...]] = []

    @initialize(
        depth=st.integers(0, 4),
        batching=st.sampled_from(BATCHING),
        budget=st.integers(5, 16),
        step_s=st.floats(0, 0.1),
        has_state=st.booleans(),
    )
    def open(self, depth: int, batching: str, budget: int, step_s: float, has_state: bool) -> None:
        """A depth of 0: of 1, with one more step ahead. `has_state`: as with linear attention."""
        ahead, depth = not depth, max(1, depth)
        self.device = Device(has_state=has_state)
        self.engine = engine(
            kv_blocks=14,
            max_running=5,
            max_batch_tokens=budget,
            batching=batching,
            depth=depth,
            cost=LinearCost(step_s=step_s, swap_byte_s=0.0002),
            block_bytes=10,
            has_state=has_state,
        )
        self.flow = Pipeline(self.engine, depth, self.device, ahead=ahead)

    @rule(
        length=st.integers(1, 14),
        first=st.integers(0, 1),
        most=st.integers(1, 9),
        hold=st.booleans(),
        cut=st.just(0) | st.integers(1, 13),
    )
    def add(self, length: int, first: int, most: int, hold: bool, cut: int) -> None:
        made = request(f"r{self.count}", tuple(range(1 + first, 1 + first + length)), max_tokens=most)
        self._add(made, hold, cut if hold and cut < length else 0)

    @rule(length=st.integers(1, 14), number=st.integers(2, 3), most=st.integers(1, 9), hold=st.booleans())
    def add_siblings(self, length: int, number: int, most: int, hold: bool) -> None:
        group = f"g{self.count}"
        for index in range(number):
            name = f"{group}#{index}"
            self._add(request(name, tuple(range(1, 1 + length)), max_tokens=most, group=group), hold)

    def _add(self, made: Request, hold: bool, cut_tokens: int = 0) -> None:
        self.count += 1
        try:
            self.engine.add(self.device.know(made), self.now_s, hold=hold, cut_tokens=cut_tokens)
            self.alive[made.key] = made
        except (Overloaded, InvalidRequest):
            pass

    @rule(length=st.integers(1, 14), most=st.integers(1, 9), group=st.sampled_from(["", "g"]))
    def reserve(self, length: int, most: int, group: str) -> None:
        made = request(f"r{self.count}", tuple(range(1, 1 + length)), max_tokens=most, group=group)
        try:
            self.engine.reservations.reserve(self.device.know(made), self.now_s)
            self.alive[made.key] = made
            self.count += 1
        except (Overloaded, InvalidRequest):
            pass

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), settle=st.booleans(), starts_decoding=st.booleans())
    def fetch(self, data: st.DataObject, settle: bool, starts_decoding: bool) -> None:
        """Part of the prompt's KV arrives, with tokens sampled elsewhere; or with none, and it samples by itself."""
        key = data.draw(st.sampled_from(sorted(self.alive)))
        try:
            sequence = self.engine.reservations.get(key)
            if sequence.fetched:
                return
            length, most = sequence.request.num_tokens, sequence.request.sampling.max_tokens or 1
            arrived = data.draw(st.just(length) | st.integers(0, length))
            blocks = tuple(sequence.blocks[sequence.cached_tokens // 4 : -(-arrived // 4)])
            self.engine.pool.begin_transfer(blocks)
            self.reading.append(blocks)
            self.device.fill(tuple(sequence.blocks), sequence.request.prompt[: max(arrived, sequence.cached_tokens)])
            self.engine.reservations.fetched(key, self.now_s, num_tokens=arrived, starts_decoding=starts_decoding)
            if not starts_decoding:
                drawn = data.draw(st.integers(0, most - 1))
                self.engine.reservations.decode(key, [next_token(key, length + n) for n in range(drawn)], self.now_s)
            if settle:
                self.settle()
        except UnknownSequence:
            pass

    @precondition(lambda self: self.reading)
    @rule()
    def settle(self) -> None:
        self.engine.pool.end_transfer(self.reading.pop(0))

    @rule(fill=st.booleans())
    def begin_steps(self, fill: bool) -> None:
        if fill:
            self.flow.fill(self.now_s)
        else:
            self.flow.begin(self.now_s)

    @rule()
    def compute_step(self) -> None:
        self.flow.compute()

    @rule()
    def end_step(self) -> None:
        if not self.flow.plans:
            self.flow.begin(self.now_s)
        self.flow.end(self.now_s)
        self.emitted += self.engine.drain()

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.alive)))
        self.engine.sequences.abort(key)
        del self.alive[key]

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), most=st.integers(1, 30))
    def offer_migration(self, data: st.DataObject, most: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.alive)))
        with contextlib.suppress(UnknownSequence):
            lease = self.engine.sequences.offer_migration(key, most, self.now_s)
            if lease is not None:
                self.emitted.append(lease)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def hold_prefix(self, data: st.DataObject) -> None:
        """Of a request that may have ended, generated tokens included."""
        key = data.draw(st.sampled_from(sorted(self.alive)))
        lease = self.engine.prefix_fetches.hold(f"{key}:prefix", self.device.tokens(key), self.now_s)
        if lease is not None:
            self.emitted.append(lease)

    @precondition(lambda self: any(isinstance(each, Lease) for each in self.emitted))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from([each for each in self.emitted if isinstance(each, Lease)]))
        with contextlib.suppress(LeaseLost):
            self.engine.leases.release(lease.key, lease.epoch)

    @precondition(lambda self: any(isinstance(each, Lease) for each in self.emitted))
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        """A reader that has some blocks asks for the others."""
        lease = data.draw(st.sampled_from([each for each in self.emitted if isinstance(each, Lease)]))
        with contextlib.suppress(LeaseLost):
            have = data.draw(st.integers(0, len(lease.digests)))
            self.engine.leases.progress(lease.key, lease.epoch, have, self.now_s)

    @rule(seconds=st.sampled_from([0.1, 3.0, 11.0]))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.engine.expire(self.now_s)

    @invariant()
    def books_balance(self) -> None:
        self.engine.check()

    def teardown(self) -> None:
        while self.flow.plans:
            self.end_step()
        while self.reading:
            self.settle()
        for key in [key for key in self.alive if self.engine.holds(key)]:
            try:
                self.engine.reservations.get(key)
            except UnknownSequence:
                continue
            self.engine.sequences.abort(key)  # its KV will never come
            del self.alive[key]
        for _ in range(2000):
            self.now_s += 1.0
            self.engine.expire(self.now_s)
            self.flow.fill(self.now_s)
            self.end_step()
            if not any(self.engine.holds(key) for key in self.alive):
                break
        else:
            raise AssertionError("a sequence starves")
        while self.flow.plans:
            self.end_step()
        self.now_s += 100.0
        self.engine.expire(self.now_s)
        self.engine.check()
        stats = self.engine.stats()
        assert stats.free_blocks == stats.total_blocks
        for key in self.alive:
            outputs = [each for each in self.emitted if isinstance(each, TokensOut) and each.key == key]
            positions = [each.first_position for each in outputs]
            assert positions == list(range(positions[0], positions[0] + len(positions))) if positions else True


EngineMachine.TestCase.settings = examples(60, stateful_step_count=60)
TestEngineMachine = EngineMachine.TestCase
