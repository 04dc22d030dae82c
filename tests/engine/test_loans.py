"""Blocks of a sequence that move to other workers: what is lent, what comes back, and who holds what meanwhile."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kvtransfer.errors import LeaseLost, LoanRefused
from tests.engine.driving import VOCAB, Device, engine, next_token, request, result, tokens_of
from tests.examples import examples
from workers.config import KEPT_SHARE
from workers.engine.blocks import BlockPool
from workers.engine.borrowing import BlockMove
from workers.engine.engine import Engine
from workers.engine.loans import LENDS_AGAIN_S, RECALL_S, LoanManager
from workers.engine.sequence import Lease, Sequence, SpanReturn
from workers.engine.step import Chunk, RemoteKV
from workers.ops.batch import SPAN
from workers.request import FailedOut, Request

BLOCK = 16
LONG = 4096


def large(kv_blocks: int, **config: Any) -> Engine:
    """A worker whose pool holds `kv_blocks` - 2 blocks of 16 tokens."""
    sizes = {"block_size": BLOCK, "kv_blocks": kv_blocks, "max_batch_tokens": 64, "max_running": 8}
    return engine(context_length=LONG, **(sizes | config))


def prompt(num_tokens: int) -> tuple[int, ...]:
    return tuple(1 + place * 13 % (VOCAB - 1) for place in range(num_tokens))


@dataclass
class Town:
    """A borrower and its lenders, which also have requests of their own. A step of all takes half a second.

    A move or return takes place between two steps; `patience`: how many steps later.
    """

    borrower: Engine
    lenders: dict[str, Engine]
    patience: int = 0
    move_s: float = 0.0  # as measured, for a block; 0: blocks come back only when they are recalled
    device: Device = field(default_factory=lambda: Device(BLOCK))
    emitted: list[Any] = field(default_factory=list)
    moves: list[tuple[BlockMove | tuple[SpanReturn, Lease], int]] = field(default_factory=list)
    num_moves: int = 0
    num_returns: int = 0  # to another lender, or
    num_back: int = 0  # into the borrower's pool
    blocks_back: int = 0
    now_s: float = 0.0

    def __post_init__(self) -> None:
        for name, lender in self.lenders.items():
            self.device.lenders[name] = lender, Device(BLOCK)

    def ask(self, engine: Engine, asked: Request, *, borrows: bool = False) -> None:
        """A request of the borrower or a lender."""
        device = next((device for lender, device in self.device.lenders.values() if lender is engine), self.device)
        engine.add(device.know(asked), self.now_s, hold=False, borrows=borrows)

    def step(self) -> bool:
        """Returns whether anything was computed or moved."""
        self.now_s += 0.5
        self.device.now_s = self.now_s
        has_computed = self._compute(self.borrower, self.device)
        self.moves += [(each, self.patience) for each in self.borrower.borrowed.take_due()]
        for wanted in self.borrower.borrowed.take_returns():
            self._offer(wanted)
        due = [move for move, wait in self.moves if not wait]
        waiting = [(move, wait - 1) for move, wait in self.moves if wait]
        has_moved = bool(self.moves)
        self.moves = waiting
        for move in due:
            if isinstance(move, BlockMove):
                self._move(move)
            else:
                self._return(*move)
        for span in self.borrower.borrowed.take_repaid():
            self.lenders[span.lender].loans.repay(span.loan)
        for name, (lender, device) in self.device.lenders.items():
            has_computed |= self._compute(lender, device)
            held = [span.loan for span in self.borrower.remote() if span.lender == name]
            self.borrower.borrowed.recalled(name, lender.loans.renew(held, self.now_s))
        for each in (self.borrower, *self.lenders.values()):
            each.expire(self.now_s)
            each.check()
        return has_computed or has_moved or any(each.has_work for each in self.lenders.values())

    def run(self) -> None:
        while self.step():
            pass

    def _compute(self, engine: Engine, device: Device) -> bool:
        plan = engine.schedule(self.now_s)
        if plan is not None:
            lost = tuple(index for index, chunk in enumerate(plan.chunks) if not self._is_lent(chunk))
            kept = tuple(chunk for index, chunk in enumerate(plan.chunks) if index not in lost)
            device.execute(structs.replace(plan, chunks=kept))
            made = result(plan)
            tokens = tuple(None if index in lost else token for index, token in enumerate(made.tokens))
            engine.commit(plan, structs.replace(made, tokens=tokens, lost=lost), self.now_s)
        self.emitted += engine.drain()
        return plan is not None

    def _is_lent(self, chunk: Chunk) -> bool:
        try:
            for span in chunk.remote:
                self.lenders[span.lender].loans.ready(span.loan, span.num_blocks, self.now_s)
        except LeaseLost:
            return False
        return True

    def _move(self, move: BlockMove) -> None:
        last = move.last
        for name, lender in self.lenders.items():
            number, held = (last.loan, last.num_blocks) if last is not None and last.lender == name else (0, 0)
            try:
                loan, blocks = lender.loans.take(move.count, self.now_s, number, held)
            except (LoanRefused, LeaseLost):
                continue
            first = move.first * BLOCK
            tokens = self.device.tokens(move.key)[first : first + move.count * BLOCK]
            self.device.lenders[name][1].fill(blocks, tuple(tokens))
            lender.loans.filled(loan, self.now_s, arrived=True)
            if not self.borrower.borrowed.moved(move, RemoteKV(name, loan, held + move.count)):
                lender.loans.repay(loan)
            self.num_moves += 1
            if self.move_s:
                self.borrower.borrowed.learn_move(self.move_s * move.count, move.count)
                self.borrower.borrowed.learn_wait(1.0)
            return
        self.borrower.sequences.move_failed(move, "no worker lends blocks")

    def _offer(self, wanted: SpanReturn) -> None:
        span = wanted.span
        try:
            lender = self.lenders[span.lender]
            blocks = lender.loans.ready(span.loan, span.num_blocks, self.now_s)
            lease = lender.leases.offer_held(f"loan:{span.loan}", blocks, self.now_s)
        except LeaseLost:
            return self.borrower.borrowed.not_returned(wanted)
        self.moves.append(((wanted, lease), self.patience))

    def _return(self, wanted: SpanReturn, lease: Lease) -> None:
        lender, source = self.device.lenders[wanted.span.lender]
        if wanted.blocks:
            self.device.copy(source, lease.blocks, wanted.blocks)
            self.num_back += self.borrower.borrowed.returned(wanted, None)
            self.blocks_back += len(wanted.blocks)
            lender.leases.drop(lease.key)
            return
        for name, (other, target) in self.device.lenders.items():
            if other is lender:
                continue
            try:
                loan, blocks = other.loans.take(wanted.span.num_blocks, self.now_s)
            except LoanRefused:
                continue
            target.copy(source, lease.blocks, blocks)
            other.loans.filled(loan, self.now_s, arrived=True)
            if self.borrower.borrowed.returned(wanted, RemoteKV(name, loan, wanted.span.num_blocks)):
                self.num_returns += 1
            else:
                other.loans.repay(loan)
            break
        else:
            self.borrower.borrowed.not_returned(wanted)
        lender.leases.drop(lease.key)


def test_a_sequence_longer_than_the_pool_is_served_with_blocks_on_other_workers() -> None:
    town = Town(large(34), {"a": large(130)})
    long = request("long", prompt(1000), max_tokens=200)
    town.borrower.add(town.device.know(long), 0.0, hold=False, borrows=True)
    town.run()
    assert tokens_of(town.emitted, long.key) == [next_token(long.key, 1000 + place) for place in range(200)]
    assert town.num_moves > 0
    assert not len(town.lenders["a"].loans)
    for each in (town.borrower, town.lenders["a"]):
        assert each.stats().free_blocks == each.stats().total_blocks


def test_blocks_move_in_whole_spans_and_one_lender_has_one_loan() -> None:
    town = Town(large(34), {"a": large(130)})
    town.borrower.add(town.device.know(request("long", prompt(1000))), 0.0, hold=False, borrows=True)
    most = 0
    while town.step():
        for sequence in town.borrower.sequences:
            assert len(sequence.remote) <= 1 and sequence.num_remote * BLOCK % SPAN == 0
            most = max(most, sequence.num_remote)
    assert most * BLOCK > 1000 - 34 * BLOCK


def test_other_sequences_run_beside_it() -> None:
    town = Town(large(42), {"a": large(130)}, patience=2)
    asked = [request("long", prompt(900), max_tokens=60), *(request(f"s{n}", prompt(40 + n)) for n in range(3))]
    for each in asked:
        town.borrower.add(town.device.know(each), 0.0, hold=False, borrows=each.id == "long")
    town.run()
    for each in asked:
        wanted = [next_token(each.key, len(each.prompt) + place) for place in range(each.sampling.max_tokens or 0)]
        assert tokens_of(town.emitted, each.key) == wanted


@pytest.mark.parametrize("batching", ["prefill-only", "prefill-first"])
def test_a_borrower_that_could_move_no_span_waits_for_an_older_sequence(batching: str) -> None:
    """Else it would lose its blocks to the older one again and again, whose step never comes."""
    town = Town(large(19, batching=batching), {"a": large(130)})
    older = town.device.know(request("older", prompt(160)[::-1], max_tokens=16))
    town.borrower.add(older, 0.0, hold=False)
    while not tokens_of(town.emitted, older.key):
        town.step()
    long = town.device.know(request("long", prompt(400)))
    town.borrower.add(long, town.now_s, hold=False, borrows=True)
    for _ in range(200):
        town.step()
    assert [len(tokens_of(town.emitted, each.key)) for each in (older, long)] == [16, 8]
    assert town.num_moves and not town.borrower.stats().preemptions


def test_without_a_lender_the_sequence_fails_and_leaves_nothing() -> None:
    town = Town(large(34), {"a": large(12)})
    town.borrower.add(town.device.know(request("long", prompt(1000))), 0.0, hold=False, borrows=True)
    town.run()
    (failed,) = [each for each in town.emitted if isinstance(each, FailedOut)]
    assert "no worker lends" in failed.reason and failed.no_memory and not failed.final
    assert town.borrower.stats().free_blocks == town.borrower.stats().total_blocks
    assert not len(town.lenders["a"].loans)


def test_an_aborted_sequence_gives_its_loans_back_also_one_in_progress() -> None:
    town = Town(large(34), {"a": large(130)}, patience=3)
    town.borrower.add(town.device.know(request("long", prompt(1000))), 0.0, hold=False, borrows=True)
    while not (town.num_moves and town.moves):
        town.step()
    assert len(town.lenders["a"].loans) == 1
    town.borrower.sequences.abort("long/0")
    town.run()
    assert not len(town.lenders["a"].loans)
    assert town.borrower.stats().free_blocks == town.borrower.stats().total_blocks


def test_a_chunk_whose_remote_kv_is_lost_fails_alone_and_may_be_tried_again() -> None:
    town = Town(large(42), {"a": large(130)})
    for each in (request("long", prompt(900)), request("short", prompt(20), max_tokens=30)):
        town.borrower.add(town.device.know(each), 0.0, hold=False, borrows=each.id == "long")
    while not any(each.remote for each in town.borrower.sequences):
        town.step()
    plan = town.borrower.schedule(0.0)
    assert plan is not None
    town.device.execute(plan)
    (place,) = [index for index, chunk in enumerate(plan.chunks) if chunk.remote]
    made = result(plan)
    tokens = tuple(None if index == place else token for index, token in enumerate(made.tokens))
    made = type(made)(made.number, tokens, made.logprobs, made.digests, made.seconds, made.prompt_logprobs, (place,))
    town.borrower.commit(plan, made, 0.0)
    town.run()
    (failed,) = [each for each in town.emitted if isinstance(each, FailedOut)]
    assert (failed.key, failed.final) == ("long/0", False) and "another worker" in failed.reason
    assert len(tokens_of(town.emitted, "short/0")) == 30
    assert not len(town.lenders["a"].loans)


def test_a_migration_does_not_take_a_sequence_with_blocks_elsewhere() -> None:
    town = Town(large(34), {"a": large(130)})
    town.borrower.add(town.device.know(request("long", prompt(1000))), 0.0, hold=False, borrows=True)
    while not any(each.remote for each in town.borrower.sequences):
        town.step()
    assert town.borrower.sequences.offer_migration("long/0", 1000, 0.0) is None


def borrowing(town: Town, least: int = 1) -> Sequence:
    """The sequence that has at least this many blocks elsewhere, once there is one."""
    while True:
        for each in town.borrower.sequences:
            if each.num_remote >= least and not each.num_moving:
                return each
        assert town.step()


def answer_of(town: Town, asked: Request) -> list[int]:
    """Its tokens, which are those of a worker with a large pool."""
    tokens = tokens_of(town.emitted, asked.key)
    assert tokens == [next_token(asked.key, len(asked.prompt) + place) for place in range(len(tokens))]
    return tokens


def test_a_lender_that_needs_its_blocks_gets_them_and_another_one_lends() -> None:
    town = Town(large(34), {"a": large(130), "b": large(130)}, patience=2)
    long, own = request("long", prompt(1000), max_tokens=200), request("own", prompt(1900))
    town.ask(town.borrower, long, borrows=True)
    borrowing(town, least=24)
    town.ask(town.lenders["a"], own)
    while not tokens_of(town.emitted, own.key):
        town.step()
        lent = town.lenders["a"].loans.num_blocks
    assert lent == 0 and town.lenders["b"].loans.num_blocks > 0 and town.num_returns == 1
    town.run()
    assert len(answer_of(town, long)) == 200 and len(answer_of(town, own)) == 8
    assert not any(isinstance(each, FailedOut) for each in town.emitted)


def test_a_recalled_span_comes_back_if_there_is_room() -> None:
    town = Town(large(120, max_batch_tokens=32), {"a": large(130)}, patience=2)
    beside, long = request("beside", prompt(1201)[1:], max_tokens=100), request("long", prompt(900), max_tokens=300)
    town.ask(town.borrower, beside)
    while not tokens_of(town.emitted, beside.key):
        town.step()
    town.ask(town.borrower, long, borrows=True)
    sequence = borrowing(town)
    while town.borrower.holds(beside.key):
        town.step()
    town.lenders["a"].loans.recall(1, town.now_s)
    while sequence.remote:
        town.step()
    assert town.num_back == 1 and not len(town.lenders["a"].loans)
    assert -1 not in sequence.blocks
    town.run()
    assert len(answer_of(town, long)) == 300


def beside_another(move_s: float) -> tuple[Town, Request]:
    """A sequence that has borrowed while another one had most of the pool, and that other one has ended."""
    town = Town(large(120, max_batch_tokens=32), {"a": large(130)}, patience=2, move_s=move_s)
    beside, long = request("beside", prompt(1201)[1:], max_tokens=60), request("long", prompt(900), max_tokens=200)
    town.ask(town.borrower, beside)
    while not tokens_of(town.emitted, beside.key):
        town.step()
    town.ask(town.borrower, long, borrows=True)
    borrowing(town)
    while town.borrower.holds(beside.key):
        town.step()
    return town, long


def test_blocks_come_back_when_there_is_room_again() -> None:
    town, long = beside_another(move_s=0.5)
    num_moves = town.num_moves
    while list(town.borrower.remote()):
        town.step()
    assert town.borrower.holds(long.key)
    town.run()
    assert (town.num_back, town.num_moves) == (1, num_moves)
    assert len(answer_of(town, long)) == 200


def test_blocks_stay_where_their_way_back_takes_longer_than_the_waits_it_saves() -> None:
    town, long = beside_another(move_s=20.0)  # a span of 8 blocks or more, and 200 tokens with a second each
    town.run()
    assert town.num_back == 0 and len(answer_of(town, long)) == 200


def test_blocks_stay_while_others_wait_for_memory() -> None:
    town, long = beside_another(move_s=0.01)
    for number in range(9):  # one more than run at once
        town.ask(town.borrower, request(f"s{number}", prompt(50 + number)[number:], max_tokens=150))
    while town.borrower.stats().waiting:
        town.step()
        assert town.num_back == 0
    town.run()
    assert len(answer_of(town, long)) == 200


def test_pulls_take_no_more_time_than_the_waits_when_memory_comes_and_goes() -> None:
    town = Town(large(120, max_batch_tokens=32), {"a": large(130)}, move_s=4.0)
    long = request("long", prompt(300), max_tokens=800)
    town.ask(town.borrower, long, borrows=True)
    number = num_waits = 0
    while town.step():
        sequences = {each.key: each for each in town.borrower.sequences}
        if tokens_of(town.emitted, long.key) and sequences.keys() == {long.key} and not sequences[long.key].remote:
            number += 1
            fills = (town.borrower.pool.num_free - 6) * BLOCK
            town.ask(town.borrower, request(f"s{number}", prompt(fills + number)[number:], max_tokens=80))
        if long.key in sequences and sequences[long.key].remote:
            num_waits += 1
            town.borrower.sequences.abort(f"s{number}/0")
    assert town.num_back >= 3 and len(answer_of(town, long)) == 800
    assert town.blocks_back * 4.0 < num_waits * 1.0


def test_a_recall_that_nobody_can_follow_ends_the_loan_at_its_deadline() -> None:
    town = Town(large(34), {"a": large(130)})
    long, own = request("long", prompt(1000), max_tokens=200), request("own", prompt(1900))
    town.ask(town.borrower, long, borrows=True)
    while not tokens_of(town.emitted, long.key):
        town.step()
    borrowing(town)
    town.ask(town.lenders["a"], own)
    begun_s = town.now_s
    while len(town.lenders["a"].loans):
        town.step()
    assert RECALL_S <= town.now_s - begun_s <= RECALL_S + 1.0
    town.run()
    (failed,) = [each for each in town.emitted if isinstance(each, FailedOut)]
    assert (failed.key, failed.final) == ("long/0", False) and "another worker" in failed.reason
    assert len(answer_of(town, own)) == 8 and town.lenders["a"].loans.expired == 1


def test_a_request_that_ends_while_its_span_comes_back_leaves_nothing() -> None:
    for patience in range(1, 4):
        town = Town(large(34), {"a": large(130), "b": large(130)}, patience=patience)
        town.ask(town.borrower, request("long", prompt(1000), max_tokens=200), borrows=True)
        sequence = borrowing(town)
        town.lenders["a"].loans.recall(1, town.now_s)
        while sequence.returning is None:
            town.step()
        town.borrower.sequences.abort(sequence.key)
        town.run()
        for each in (town.borrower, *town.lenders.values()):
            assert each.stats().free_blocks == each.stats().total_blocks and not len(each.loans)


@examples(60)
@given(
    kv_blocks=st.integers(26, 60),
    lengths=st.lists(st.integers(1, 1500), min_size=1, max_size=4),
    lenders=st.lists(st.integers(10, 140), max_size=3),
    patience=st.integers(0, 4),
    aborts=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 3)), max_size=3),
    own=st.lists(st.tuples(st.integers(0, 150), st.integers(0, 2), st.integers(1, 2000)), max_size=4),
    recalls=st.lists(st.tuples(st.integers(0, 150), st.integers(0, 2)), max_size=4),
    move_s=st.sampled_from([0.0, 0.01, 0.5]),
    least=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_every_answer_is_whole_or_fails_and_every_block_comes_back(
    kv_blocks: int,
    lengths: list[int],
    lenders: list[int],
    patience: int,
    aborts: list[tuple[int, int]],
    own: list[tuple[int, int, int]],
    recalls: list[tuple[int, int]],
    move_s: float,
    least: float,
) -> None:
    """`own`: requests of lenders, which recall loans; `recalls`: without such a reason. Those of at least this share of
    the pool borrow.
    """
    engines = {f"w{place}": large(blocks) for place, blocks in enumerate(lenders)}
    town = Town(large(kv_blocks), engines, patience, move_s)
    room = (kv_blocks - 2) * BLOCK
    asked = [request(f"r{place}", prompt(length), max_tokens=20) for place, length in enumerate(lengths)]
    for each in asked:
        town.ask(town.borrower, each, borrows=len(each.prompt) + 20 > least * room)
    aborted, steps = set(), 0
    while town.step() or steps <= 200:
        for key in [f"r{place}/0" for when, place in aborts if when == steps]:
            aborted |= {key} if town.borrower.sequences.abort(key) else set()
        for place, (when, lender, length) in enumerate(own):
            if when == steps and lender < len(lenders) and length + 20 < (lenders[lender] - 2) * BLOCK:
                asked.append(request(f"own{place}", prompt(length), max_tokens=20))
                town.ask(town.lenders[f"w{lender}"], asked[-1])
        for lender in [lender for when, lender in recalls if when == steps and lender < len(lenders)]:
            town.lenders[f"w{lender}"].loans.recall(1, town.now_s)
        steps += 1
    failed = {each.key for each in town.emitted if isinstance(each, FailedOut)}
    assert not any(key.startswith("own") for key in failed)
    for each in asked:
        assert len(answer_of(town, each)) == 20 or each.key in failed | aborted
    for each_engine in (town.borrower, *town.lenders.values()):
        assert each_engine.stats().free_blocks == each_engine.stats().total_blocks and not len(each_engine.loans)


# ---- the lender's book -----------------------------------------------------------------------------------------


def book(num_blocks: int = 40) -> tuple[LoanManager, BlockPool]:
    pool = BlockPool(num_blocks, BLOCK)
    return LoanManager(pool, 10.0), pool


def test_a_lender_keeps_a_share_of_its_pool() -> None:
    loans, pool = book()
    with pytest.raises(LoanRefused, match="31 blocks wanted, 30 can be lent; ask another worker"):
        loans.take(31, 0.0)
    loans.take(30, 0.0)
    assert pool.num_free == KEPT_SHARE * 40
    with pytest.raises(LoanRefused):
        loans.take(1, 0.0)


def test_a_loan_that_nobody_uses_expires() -> None:
    loans, pool = book()
    number, _ = loans.take(8, 0.0)
    loans.filled(number, 0.0, arrived=True)
    loans.ready(number, 8, 6.0)
    loans.expire(15.9)
    loans.renew([number, 99], 15.9)
    loans.expire(20.0)
    assert len(loans) == 1
    loans.expire(25.9)
    assert (len(loans), loans.expired, pool.num_free) == (0, 1, 40)
    with pytest.raises(LeaseLost, match="no loan 1"):
        loans.ready(number, 8, 26.0)


def test_a_loan_does_not_expire_while_its_blocks_are_read() -> None:
    """The borrower cannot renew it: it learns of its number afterwards."""
    loans, pool = book()
    number, _ = loans.take(8, 0.0)
    loans.expire(25.0)
    loans.filled(number, 25.0, arrived=True)
    loans.expire(34.9)
    assert len(loans.ready(number, 8, 34.9)) == 8
    loans.take(8, 35.0, number, 8)
    loans.filled(number, 60.0, arrived=False)
    loans.expire(60.0)
    assert pool.num_free == 40


def test_blocks_whose_kv_did_not_arrive_are_not_lent() -> None:
    loans, pool = book()
    number, first = loans.take(8, 0.0)
    with pytest.raises(LeaseLost, match="has 0 blocks, not 8"):
        loans.ready(number, 8, 0.0)
    loans.filled(number, 0.0, arrived=True)
    _, more = loans.take(8, 0.0, number, 8)
    with pytest.raises(LoanRefused, match="extended already"):
        loans.take(8, 0.0, number, 8)
    loans.filled(number, 0.0, arrived=False)
    assert loans.ready(number, 8, 0.0) == first and pool.num_free == 32
    assert not set(first) & set(more)
    other, _ = loans.take(8, 0.0)
    loans.filled(other, 0.0, arrived=False)
    assert len(loans) == 1


def test_blocks_that_the_borrower_gave_up_are_taken_back_when_it_borrows_more() -> None:
    loans, pool = book()
    number, first = loans.take(8, 0.0)
    loans.filled(number, 0.0, arrived=True)
    loans.take(8, 0.0, number, 8)
    loans.filled(number, 0.0, arrived=True)  # but the borrower heard nothing of it
    _, second = loans.take(4, 0.0, number, 8)
    loans.filled(number, 0.0, arrived=True)
    assert loans.ready(number, 12, 0.0) == (*first, *second) and pool.num_free == 28


def filled(loans: LoanManager, count: int, now_s: float = 0.0) -> int:
    number, _ = loans.take(count, now_s)
    loans.filled(number, now_s, arrived=True)
    return number


def test_a_recalled_loan_ends_at_its_deadline_although_it_is_used() -> None:
    loans, pool = book(100)
    number = filled(loans, 8)
    loans.recall(8, 5.0)
    assert loans.renew([number], 5.0 + RECALL_S - 1) == (number,)
    loans.expire(5.0 + RECALL_S - 0.1)
    assert len(loans.ready(number, 8, 5.0 + RECALL_S - 0.1)) == 8
    loans.expire(5.0 + RECALL_S)
    assert (len(loans), loans.expired, pool.num_free) == (0, 1, 100)


def test_the_largest_loans_are_recalled_if_they_give_enough_and_nothing_is_lent_for_a_while() -> None:
    loans, _ = book(100)
    numbers = [filled(loans, count) for count in (8, 24, 16)]
    loans.recall(49, 1.0)
    assert loans.renew(numbers, 1.0) == ()
    loans.recall(25, 1.0)
    loans.recall(40, 2.0)  # these are coming
    assert set(loans.renew(numbers, 2.0)) == {numbers[1], numbers[2]}
    for number in (0, numbers[0]):
        with pytest.raises(LoanRefused, match="recalls loans; ask another worker"):
            loans.take(8, 0.9 + LENDS_AGAIN_S, number, 8)
    assert loans.take(8, 2.0 + LENDS_AGAIN_S, numbers[0], 8)
    with pytest.raises(LoanRefused, match="recalls loans; ask another worker"):
        loans.take(8, 2.0 + LENDS_AGAIN_S, numbers[1], 24)
    assert LENDS_AGAIN_S < RECALL_S


def test_a_loan_that_is_repaid_while_blocks_are_read_keeps_them_until_then() -> None:
    """Bytes that arrive late must not land in blocks of another owner."""
    loans, pool = book()
    number = filled(loans, 8)
    loans.take(8, 0.0, number, 8)
    loans.recall(8, 0.0)
    assert loans.renew([number], 0.0) == ()  # no recall either: it is used as soon as it is filled
    loans.repay(number)
    assert pool.num_free == 24
    with pytest.raises(LeaseLost, match="no loan 1"):
        loans.filled(number, 0.0, arrived=True)
    assert (len(loans), pool.num_free) == (0, 40)
