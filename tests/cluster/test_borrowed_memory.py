"""A request longer than every worker's KV pool: one worker serves it, others hold a part. A real model, digests on."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from cluster.events import Unservable
from cluster.spec import ClusterSpec
from diptych.view import WorkerState
from kvtransfer.errors import LoanRefused
from kvtransfer.ticket import SpanQuery, TransferTicket
from tests.cluster.local import Cluster, cluster, completed, mixed_spec, split_spec, tokens_of
from tests.model.tiny import write_tiny_llama
from workers.request import FinishReason, Request, SamplingParams
from workers.worker import Worker

BLOCK = 8
LARGE, SMALL = 130, 58  # blocks; a small worker holds 448 tokens
PROMPT = tuple(3 + 11 * position % 300 for position in range(600))
ANSWER = 60  # tokens
SHORT = tuple(5 + 7 * position % 300 for position in range(40))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", context_length=1024)


@pytest.fixture(scope="module")
def alone(model: Path) -> list[int]:
    """The tokens from one worker that holds all of it."""

    async def run() -> list[int]:
        async with cluster(real(mixed_spec(block_size=BLOCK, kv_blocks=LARGE), model)) as subject:
            return tokens_of(await subject.run(asked("long")))

    return asyncio.run(run())


def real(spec: ClusterSpec, model: Path) -> ClusterSpec:
    pools = tuple(replace(each, engine=replace(each.engine, threads=1)) for each in spec.pools)
    return replace(spec, model=str(model), executor="torch", pools=pools)


def small(model: Path, workers: int = 3) -> ClusterSpec:
    return real(mixed_spec(workers, block_size=BLOCK, kv_blocks=SMALL), model)


def asked(name: str, prompt: tuple[int, ...] = PROMPT, max_tokens: int = ANSWER) -> Request:
    return Request(name, prompt, SamplingParams(temperature=4.0, seed=7, max_tokens=max_tokens, ignore_eos=True))


def borrower(subject: Cluster) -> Worker:
    (worker,) = [each for each in subject.workers.values() if list(each.engine.remote())]
    return worker


def has_long(subject: Cluster) -> bool:
    return any(list(each.engine.remote()) for each in subject.workers.values())


async def test_the_answer_has_the_tokens_of_one_large_worker(model: Path, alone: list[int]) -> None:
    async with cluster(small(model)) as subject:
        events = await subject.run(asked("long"))
        assert tokens_of(events) == alone and len(alone) == ANSWER
        assert completed(events).attempts == 1
        await subject.settle()
        assert sum(each._stats().pulls.arrived for each in subject.workers.values()) > 0


async def test_prefill_and_decode_workers_lend_to_each_other(model: Path, alone: list[int]) -> None:
    async with cluster(real(split_spec(2, 1, block_size=BLOCK, kv_blocks=SMALL), model)) as subject:
        assert tokens_of(await subject.run(asked("long"))) == alone
        await subject.settle()


async def test_others_are_served_meanwhile(model: Path, alone: list[int]) -> None:
    async with cluster(small(model)) as subject:
        short = [asked(f"short-{number}", SHORT[number:], 30) for number in range(6)]
        long, *answers = await asyncio.gather(subject.run(asked("long")), *map(subject.run, short))
        again = [tokens_of(await subject.run(replace(each, id=f"{each.id}-again"))) for each in short]
        assert tokens_of(long) == alone
        assert [tokens_of(each) for each in answers] == again
        await subject.settle()


async def test_an_answer_that_fills_its_worker_goes_on_in_borrowed_memory(model: Path) -> None:
    request = asked("long", PROMPT[:400], 200)
    async with cluster(real(mixed_spec(block_size=BLOCK, kv_blocks=LARGE), model)) as subject:
        expected = tokens_of(await subject.run(request))
    async with cluster(small(model)) as subject:
        events = await subject.run(request)
        assert tokens_of(events) == expected and len(expected) == 200
        assert completed(events).finish is FinishReason.LENGTH
        await subject.settle()


async def test_a_lender_gets_its_blocks_back_for_its_own_requests(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another worker lends instead: it reads the blocks from the first one, with digests."""
    monkeypatch.setattr("workers.transfer.kv_borrower.RENEW_S", 0.05)
    request = asked("long", PROMPT[:500], 150)
    async with cluster(real(mixed_spec(block_size=BLOCK, kv_blocks=LARGE), model)) as subject:
        expected = tokens_of(await subject.run(request))
    async with cluster(small(model)) as subject:
        running = await subject.begin(request, 5)
        (lender,) = [each for each in subject.workers.values() if len(each.engine.loans)]
        own = Request(
            "own", tuple(7 + 5 * position % 300 for position in range(400)), SamplingParams(seed=1, max_tokens=1)
        )
        assert own.num_tokens // BLOCK > lender.engine.pool.num_free
        assert await lender.warm(own, 0.0, 10.0) > 0
        assert lender.engine.loans.recalled == 1 and not len(lender.engine.loans) and not running.done()
        pairs = {pair.lender: pair for pair in borrower(subject)._stats().borrowed}
        assert pairs[lender.config.name].recalls == 1 and not pairs[lender.config.name].blocks
        assert lender not in [each for each in subject.workers.values() if len(each.engine.loans)]
        events = await running
        assert tokens_of(events) == expected and len(expected) == 150
        assert completed(events).attempts == 1
        await subject.settle()


async def test_blocks_come_back_when_there_is_room(
    model: Path, alone: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers lend. The blocks of the second one come back, with digests, while tokens are computed."""
    monkeypatch.setattr("workers.engine.borrowing.BorrowedBlocks._pays", lambda *_: True)
    async with cluster(small(model)) as subject:
        running = await subject.begin(asked("long"), 5)
        owner = borrower(subject)
        moves = owner.engine._kv.borrowed
        async with asyncio.timeout(20.0):
            while len(list(moves.remote())) < 2:
                await asyncio.sleep(0.001)
            moves._low = 4  # blocks; there is room now
            while len(list(moves.remote())) == 2:
                await asyncio.sleep(0.001)
        assert not running.done() and owner._stats().pulls.arrived == 1
        events = await running
        assert tokens_of(events) == alone and completed(events).attempts == 1
        await subject.settle()


@pytest.mark.parametrize(("max_tokens", "waits"), [(1, False), (3, True)])
async def test_only_decodes_count_as_tokens_that_wait_for_a_lender(
    model: Path, monkeypatch: pytest.MonkeyPatch, max_tokens: int, waits: bool
) -> None:
    learned: list[float] = []
    monkeypatch.setattr(
        "workers.engine.borrowing.BorrowedBlocks.learn_wait", lambda _, seconds: learned.append(seconds)
    )
    async with cluster(small(model)) as subject:
        await subject.run(asked("long", max_tokens=max_tokens))
        await subject.settle()
        assert sum(each._stats().pulls.arrived for each in subject.workers.values()) > 0, "blocks have moved"
        assert bool(learned) == waits


async def test_a_recalled_loan_that_no_worker_takes_costs_another_attempt(
    model: Path, alone: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.transfer.kv_borrower.RENEW_S", 0.05)
    monkeypatch.setattr("workers.engine.loans.RECALL_S", 0.3)
    monkeypatch.setattr("workers.engine.loans.LENDS_AGAIN_S", 0.1)
    async with cluster(small(model, 2)) as subject:
        running = await subject.begin(asked("long"), 5)
        (lender,) = [each for each in subject.workers.values() if len(each.engine.loans)]
        attend = lender._lender.attend

        async def slowly(loan: int, num_tokens: int, query: SpanQuery) -> bytes:
            await asyncio.sleep(0.05)
            return await attend(loan, num_tokens, query)

        lender._lender.attend = slowly  # it does not end before the deadline
        lender.engine.loans.recall(1, asyncio.get_running_loop().time())
        async with asyncio.timeout(20.0):
            while len(lender.engine.loans):
                await asyncio.sleep(0.01)
        lender._lender.attend = attend
        events = await running
        assert tokens_of(events) == alone
        assert completed(events).attempts == 2 and lender.engine.loans.expired == 1
        await subject.settle()


def lender_ends(subject: Cluster) -> None:
    """The lender loses its loans, as after a restart."""
    for each in subject.workers.values():
        for loan in list(each.engine.loans):
            each.engine.loans.repay(loan.number)


def lender_is_silent(subject: Cluster) -> None:
    async def attend(loan: int, num_tokens: int, query: SpanQuery) -> bytes:
        await asyncio.sleep(60.0)
        return b""

    for each in subject.workers.values():
        each._lender.attend = attend


@pytest.mark.parametrize("fails", [lender_ends, lender_is_silent])
async def test_a_lender_that_fails_costs_another_attempt(
    model: Path, alone: list[int], fails: Callable[[Cluster], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.executor.remote_kv.REMOTE_TIMEOUT_S", 0.5)
    async with cluster(small(model)) as subject:
        running = await subject.begin(asked("long"), 5)
        attends = {name: each._lender.attend for name, each in subject.workers.items()}
        fails(subject)
        async with asyncio.timeout(20.0):
            while has_long(subject):
                await asyncio.sleep(0.01)
        for name, each in subject.workers.items():
            each._lender.attend = attends[name]
        events = await running
        assert tokens_of(events) == alone
        assert completed(events).attempts == 2
        await subject.settle()


async def test_a_cancelled_request_leaves_no_loan(model: Path) -> None:
    async with cluster(small(model)) as subject:
        running = await subject.begin(asked("long"), 5)
        owner = borrower(subject)

        def lent() -> dict[str, int]:
            lenders = {name: each.engine.loans for name, each in subject.workers.items()}
            return {name: loans.num_blocks for name, loans in lenders.items() if len(loans)}

        async with asyncio.timeout(20.0):  # a lender knows of a loan before the borrower does
            while {each.lender: each.blocks for each in owner._stats().borrowed} != lent():
                await asyncio.sleep(0.001)
        pairs = {pair.lender: pair for pair in owner._stats().borrowed}
        assert pairs and all(pair.oldest_s > 0 for pair in pairs.values())
        block_bytes = owner._executor.facts.layout.block_bytes
        assert all(pair.num_bytes == pair.blocks * block_bytes for pair in pairs.values())
        running.cancel()
        await asyncio.wait([running])
        await subject.settle()
        assert not any(len(each.engine.loans) for each in subject.workers.values())
        after = owner._stats().borrowed
        assert [(pair.blocks, pair.oldest_s) for pair in after] == [(0, 0.0)] * len(pairs)
        assert not owner._borrower._records._loans


async def test_a_lender_may_refuse_and_another_one_lends(model: Path, alone: list[int]) -> None:
    async with cluster(small(model, 4)) as subject:
        refusing: list[str] = []

        def refuses(worker: Worker) -> None:
            async def borrow(ticket: TransferTicket, loan: int, held_tokens: int) -> int:
                refusing.append(worker.config.name)
                raise LoanRefused("no blocks are left", "no-room")

            worker._lender.borrow = borrow

        refuses(subject.workers["mixed-1"])
        assert tokens_of(await subject.run(asked("long"))) == alone
        pairs = {pair.lender: pair for each in subject.workers.values() for pair in each._stats().borrowed}
        assert dict(pairs["mixed-1"].refusals) == {"no-room": len(refusing)} and not pairs["mixed-1"].loans
        assert sum(pair.loans for pair in pairs.values()) > 0
        await subject.settle()


async def test_a_request_that_all_workers_together_cannot_hold_is_refused(model: Path) -> None:
    async with cluster(small(model, 2)) as subject:
        with pytest.raises(Unservable, match="has 900 tokens; the workers hold 672 together"):
            await subject.run(asked("long", tuple(3 + 11 * position % 300 for position in range(900))))
        await subject.settle()


async def test_a_request_waits_while_a_new_controller_does_not_know_all_workers(model: Path, alone: list[int]) -> None:
    async with cluster(small(model)) as subject:
        discovery = subject.dispatcher.discovery
        whole = discovery.membership
        for known in (0, 1):  # of three workers
            unknown = (
                structs.replace(each, state=WorkerState.STARTING, capacity_tokens=0)
                for each in whole.view.workers[known:]
            )
            view = replace(whole.view, workers=(*whole.view.workers[:known], *unknown))
            discovery.take(structs.replace(whole, view=view))
            running = asyncio.ensure_future(subject.run(replace(asked("long"), id=f"long-{known}")))
            await asyncio.sleep(0.3)
            assert not running.done(), running.exception()
            discovery.take(whole)
            assert tokens_of(await running) == alone
        await subject.settle()


async def test_a_loan_whose_borrower_is_gone_expires(model: Path) -> None:
    async with cluster(small(model)) as subject:
        running = await subject.begin(asked("long"), 5)
        stopped = borrower(subject)
        assert stopped._borrower._renewal is not None
        stopped._borrower._renewal.cancel()
        stopped.engine.borrowed.take_repaid = list  # gives nothing back
        running.cancel()
        await asyncio.wait([running])
        await subject.settle(timeout_s=2 * subject.workers["mixed-0"].config.transfer.lease_s + 2.0)
        assert sum(each.engine.loans.expired for each in subject.workers.values()) >= 1
