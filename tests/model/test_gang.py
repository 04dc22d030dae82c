"""A gang gives the results of one rank, reports which rank failed and why, and leaves nothing behind."""

import asyncio
import gc
import os
import signal
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from msgspec import structs

from kvtransfer.errors import DigestMismatch, PeerLost, PeerRefused, TransferError
from kvtransfer.open import SharedMemory
from kvtransfer.rpc import connection
from kvtransfer.rpc.frames import FrameStream, Kind
from kvtransfer.rpc.handshake import ListenerHandshake
from kvtransfer.transport import PullOrder, Read
from tests.kvtransfer.frame_server import served
from tests.model.rank_processes import FORKS, MOMENTS, Fate, ProcessRanks, ended, lead
from tests.model.tiny import write_tiny_llama
from workers.config import EngineConfig, ParallelConfig, TransferConfig, WorkerConfig
from workers.engine.executor import SpanQuery
from workers.engine.step import Chunk, Draw, StepPlan, StepResult
from workers.errors import ModelError, RankLost, WorkerError
from workers.executor import gang as gang_module
from workers.executor import rank as rank_module
from workers.executor import remote_rank
from workers.executor.gang import GangExecutor, open_gang
from workers.executor.kv_pool import KVPool
from workers.executor.rank import ModelPart, Rank
from workers.executor.rank_loader import open_solo
from workers.executor.rank_server import RankTasks, serve_rank
from workers.executor.rank_spec import RankSpec, Rendezvous
from workers.executor.remote_rank import RemoteRank
from workers.model.folder import ModelFolder
from workers.request import SamplingParams

PROMPT = tuple(range(10, 31))
BLOCKS = (4, 2, 9)
SCORED = SamplingParams(temperature=0, logprobs=2, prompt_logprobs=1)


@pytest.fixture(scope="module")
def nine_heads(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    path = tmp_path_factory.mktemp("gang") / "model"
    return ModelFolder(str(path), write_tiny_llama(path, num_layers=3, hidden_size=72, num_heads=9, num_kv_heads=3))


def config(tensor: int, pipeline: int, **engine: Any) -> WorkerConfig:
    sizes = EngineConfig(**{"block_size": 8, "kv_blocks": 16, "max_batch_tokens": 64, "threads": 1, **engine})
    parallel = ParallelConfig(tensor, pipeline)
    transfer = TransferConfig(backends=("memory", "tcp"), host="127.0.0.1")
    return WorkerConfig("w", "pool", "tiny", sizes, parallel, transfer, secret="of the test")


async def open_tasks(folder: ModelFolder, tensor: int, pipeline: int, **engine: Any) -> GangExecutor:
    shared = SharedMemory()
    launcher = RankTasks(lambda _: folder, shared)
    return await open_gang(config(tensor, pipeline, **engine), folder, "w-1", launcher, shared)


def plans() -> list[StepPlan]:
    """A scored prompt in two chunks, with another prompt and two pooled ones; then a decode."""
    first = Chunk("a/0", PROMPT[:9], 0, BLOCKS[:2], None, targets=PROMPT[1:10], num_top=1)
    rest = Chunk("a/0", PROMPT[9:], 9, BLOCKS, Draw(SCORED, 0, 21), targets=PROMPT[10:], num_top=1)
    other = Chunk("b/0", PROMPT[5:12], 0, (7,), Draw(replace(SCORED, temperature=0.9, seed=5), 5, 7))
    mean = Chunk("c/0", PROMPT[:6], 0, (10,), Draw(SCORED, 0, 6), targets=PROMPT[1:6], pooling="mean")
    last = Chunk("d/0", PROMPT[:4], 0, (11,), Draw(SCORED, 0, 4), pooling="last")
    return [
        StepPlan(1, (first,)),
        StepPlan(2, (rest, mean, other, last)),
        StepPlan(3, (Chunk("a/0", (5,), 21, BLOCKS, Draw(SCORED, 0, 22)),), copies=((7, 6),)),
    ]


def close_to(found: object, expected: object) -> bool:
    """Equal but for the last digits of floats."""
    if isinstance(expected, float):
        return isinstance(found, float) and abs(found - expected) < 1e-4
    if isinstance(expected, tuple) and isinstance(found, tuple):
        return len(found) == len(expected) and all(map(close_to, found, expected))
    return found == expected


@pytest.mark.grid(keep=3)
@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (3, 1), (1, 2), (1, 3), (2, 2), (5, 1)])
async def test_a_gang_gives_the_results_of_one_rank(nine_heads: ModelFolder, tensor: int, pipeline: int) -> None:
    solo = await open_solo(config(1, 1), nine_heads, "s-1", SharedMemory())
    gang = await open_tasks(nine_heads, tensor, pipeline)
    assert gang.depth == pipeline and gang.facts == solo.facts
    shards = gang.shards()
    assert [shard.rank for shard in shards] == list(range(tensor * pipeline))
    # All plans at once: each rank takes them in order, the stages of a pipeline at the same time.
    expected = [await solo.execute(plan) for plan in plans()]
    found = await asyncio.gather(*(gang.execute(plan) for plan in plans()))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.tokens == theirs.tokens and ours.number == theirs.number
        for each, wanted in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert (each is None) == (wanted is None)
            assert each is None or wanted is None or close_to((each.chosen, each.top), (wanted.chosen, wanted.top))
        scores = [[one.chosen for one in chunk] for chunk in ours.prompt_logprobs]
        assert scores == [[pytest.approx(one.chosen, abs=1e-4) for one in chunk] for chunk in theirs.prompt_logprobs]
        assert [len(each) for each in ours.pooled] == [len(each) for each in theirs.pooled]
        for mine, theirs_sums in zip(ours.pooled, theirs.pooled, strict=True):
            for one, other in zip(mine, theirs_sums, strict=True):
                np.testing.assert_allclose(np.frombuffer(one, np.float32), np.frombuffer(other, np.float32), atol=1e-4)
    assert [len(each) for each in expected[1].pooled] == [0, 1, 0, 1]
    assert 0.0 <= gang.bubble_share < 1.0
    await gang.close()
    await solo.close()


async def test_a_model_too_small_for_the_ranks_is_refused_before_any_rank_starts(nine_heads: ModelFolder) -> None:
    class NoRanks:
        def launch(self, specs: Sequence[RankSpec]) -> Sequence[Awaitable[object]]:
            raise AssertionError("ranks were started")

        async def end(self) -> None:
            """There are no ranks."""

    for tensor, pipeline, reason in ((1, 4, "3 layers"), (10, 1, "9 attention heads")):
        with pytest.raises(ModelError, match=reason):
            await open_gang(config(tensor, pipeline), nine_heads, "w-1", NoRanks())


async def test_a_rank_that_cannot_open_is_named_and_nothing_is_left(nine_heads: ModelFolder, tmp_path: Path) -> None:
    async with asyncio.timeout(30):
        broken = ModelFolder("broken", write_tiny_llama(tmp_path / "m", num_layers=3, num_heads=9, num_kv_heads=3))
        (broken.path / "model.safetensors").write_bytes(b"damaged")
        shared = SharedMemory()
        with pytest.raises(ModelError, match=r"rank 1: .*truncated"):
            await open_gang(config(1, 2), nine_heads, "w-1", RankTasks(lambda _: broken, shared), shared)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("w")]


class Doomed(RankTasks):
    """Ranks that a test can end at will."""

    def kill(self, index: int) -> None:
        self._tasks[index].cancel()


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "in a step"])
async def test_a_lost_rank_fails_the_gang(nine_heads: ModelFolder, busy: bool) -> None:
    shared = SharedMemory()
    launcher = Doomed(lambda _: nine_heads, shared)
    gang = await open_gang(config(1, 3), nine_heads, "w-1", launcher, shared)
    steps = [asyncio.ensure_future(gang.execute(plan)) for plan in plans()] if busy else []
    launcher.kill(0)
    async with asyncio.timeout(10):
        error = await gang.failure()
    assert isinstance(error, RankLost) and "rank 1" in str(error)
    with pytest.raises(RankLost):
        await gang.execute(plans()[0])
    async with asyncio.timeout(20):
        await asyncio.gather(*steps, return_exceptions=True)
        await gang.close()


async def test_a_step_that_ends_after_its_gang_is_lost_has_no_result(
    nine_heads: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPUs an aborted sum leaves any numbers, and no error."""
    compute, execute = rank_module.compute, RemoteRank.execute
    may_end, replies = threading.Event(), list[Awaitable[StepResult]]()

    def late(part: ModelPart, pool: KVPool, plan: StepPlan, *more: Any) -> StepResult:
        done = compute(part, pool, plan, *more)
        assert "rank-0" not in threading.current_thread().name or may_end.wait(SOON_S)
        return done

    def noted(remote: RemoteRank, plan: StepPlan) -> "asyncio.Future[StepResult]":
        replies.append(reply := execute(remote, plan))
        return reply

    async with asyncio.timeout(SOON_S):
        gang = await open_tasks(nine_heads, 2, 1)
        monkeypatch.setattr(rank_module, "compute", late)
        monkeypatch.setattr(RemoteRank, "execute", noted)
        step = asyncio.ensure_future(gang.execute(plans()[0]))
        await asyncio.sleep(0)
        await replies[0]
        gang._connections.lost(RankLost("rank 1 ended"))
        may_end.set()
        with pytest.raises(RankLost, match="rank 1 ended"):
            await step
        await gang.close()


async def test_a_lost_gang_is_aborted_beside_the_event_loop(
    nine_heads: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL may take as long as a step."""
    close, threads = ModelPart.close, list[threading.Thread]()

    def noted(part: ModelPart) -> None:
        threads.append(threading.current_thread())
        close(part)

    monkeypatch.setattr(ModelPart, "close", noted)
    async with asyncio.timeout(SOON_S):
        gang = await open_tasks(nine_heads, 2, 1)
        gang._connections.lost(RankLost("rank 1 ended"))
        await gang.failure()
        await gang.close()
    assert threads and threading.current_thread() not in threads


async def test_a_gang_refuses_queries_that_do_not_fit_and_reports_a_lost_rank(nine_heads: ModelFolder) -> None:
    shared = SharedMemory()
    launcher = Doomed(lambda _: nine_heads, shared)
    gang = await open_gang(config(2, 1, kv_blocks=32), nine_heads, "w-1", launcher, shared)
    blocks, token = tuple(range(2, 18)), bytes(9 * 8 * 4)
    state = await gang.attend(blocks, SpanQuery(2, (0, 9), 0, 128, token))
    assert len(state) == 9 * 10 * 4
    for query in (
        SpanQuery(3, (0, 9), 0, 128, token),
        SpanQuery(0, (0, 10), 0, 128, bytes(10 * 8 * 4)),
        SpanQuery(0, (4, 4), 0, 128, token),
        SpanQuery(0, (0, 9), 0, 128, token[4:]),
        SpanQuery(0, (0, 9), 0, 128, token, state[4:]),
        SpanQuery(0, (0, 9), 0, 127, token),
    ):
        with pytest.raises(TransferError):
            await gang.attend(blocks, query)
    launcher.kill(0)
    await gang.failure()
    with pytest.raises(PeerLost, match="rank"):
        await gang.attend(blocks, SpanQuery(2, (0, 9), 0, 128, token))
    await gang.close()


async def test_a_caller_without_the_secret_is_turned_away(nine_heads: ModelFolder) -> None:
    """An unknown rank that connects first is refused, and the real rank joins."""

    class Intruded(RankTasks):
        def launch(self, specs: Sequence[RankSpec]) -> Sequence[Awaitable[object]]:
            strange = replace(specs[0], config=replace(specs[0].config, secret="guessed"))
            self.unknown_rank = asyncio.ensure_future(serve_rank(strange, lambda _: nine_heads))
            return super().launch(specs)

    shared = SharedMemory()
    launcher = Intruded(lambda _: nine_heads, shared)
    gang = await open_gang(config(2, 1), nine_heads, "w-1", launcher, shared)
    async with asyncio.timeout(10):
        with pytest.raises(PeerRefused, match="secret"):
            await launcher.unknown_rank
    assert (await gang.execute(plans()[0])).number == 1
    await gang.close()


# ---- what happens when something fails -------------------------------------------------------------------------------

SOON_S = 25.0  # far below the bounds of collectives (100 s) and of loading, far above what it takes


def traces() -> set[object]:
    """Compute threads and sockets of this process, and shared memory; other processes may be opening gangs too."""
    threads = {thread.name for thread in threading.enumerate() if thread.name.startswith(("w/", "w_"))}
    sockets = {each.laddr for each in psutil.Process().net_connections("inet")}
    return {*threads, *sockets, *Path("/dev/shm").glob("diptych-*")}


@pytest.fixture(autouse=True)
async def nothing_is_left() -> AsyncIterator[None]:
    unseen: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: unseen.append(str(context)))
    before = traces()
    yield
    gc.collect()
    await asyncio.sleep(0)
    assert not unseen
    ended_s = loop.time()
    while (left := traces() - before) and loop.time() - ended_s < SOON_S:  # the ranks of a lost gang may exit later
        gc.collect()
        await asyncio.sleep(0.02)
    assert not left


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter timeouts than in production."""
    monkeypatch.setattr(gang_module, "JOIN_TIMEOUT_S", 2.0)
    monkeypatch.setattr(gang_module, "GREET_TIMEOUT_S", 2.0)
    monkeypatch.setattr(remote_rank, "OPEN_SILENT_S", 2.0)
    monkeypatch.setattr(remote_rank, "SILENT_S", 2.0)
    monkeypatch.setattr(remote_rank, "CLOSE_TIMEOUT_S", 1.0)


def an_order() -> PullOrder:
    return PullOrder("nobody", (1,), (4,), 0, 8, (), 5.0)


@pytest.mark.grid(keep=6)
@pytest.mark.parametrize(
    ("moment", "how"),
    [(moment, signal.SIGKILL) for moment in MOMENTS]
    + [(moment, signal.SIGSTOP) for moment in ("join", "meet", "in a step", "close")],
    ids=str,
)
async def test_a_rank_process_may_die_at_any_moment(
    nine_heads: ModelFolder, impatient: None, moment: str, how: signal.Signals
) -> None:
    """The leader notices, every call fails with one line that names a rank, and all processes end."""
    launcher = ProcessRanks(nine_heads, Fate(2, moment, how))
    shape = (3, 1) if how == signal.SIGKILL else (1, 3)
    during_opening = moment in MOMENTS[: MOMENTS.index("in a step")]
    async with asyncio.timeout(SOON_S):
        if during_opening:
            silent = (moment, how) == ("join", signal.SIGSTOP)
            with pytest.raises(RankLost, match=r"ranks \[2\] did not join within 2 s" if silent else "rank") as lost:
                await open_gang(config(*shape), nine_heads, "w-1", launcher)
            assert "\n" not in str(lost.value)
        else:
            gang = await open_gang(config(*shape), nine_heads, "w-1", launcher)
            if moment == "in a step":
                with pytest.raises(RankLost, match=r"rank [12]"):
                    await asyncio.gather(*(gang.execute(plan) for plan in plans()))
            if moment == "in a pull":
                read = gang.pull(an_order())
                with pytest.raises((RankLost, PeerLost)):
                    await read.done
                await read.settled
            if moment != "close":
                assert "rank 2" in str(await gang.failure()) or moment == "in a step"
                with pytest.raises(RankLost):
                    await gang.execute(plans()[0])
            await gang.close()
        await asyncio.gather(*(ended(process) for process in launcher.processes))


@pytest.mark.grid
@pytest.mark.parametrize("shape", [(2, 2), (3, 1), (1, 3)], ids=str)
async def test_a_rank_that_raises_in_a_step_wakes_the_others(
    nine_heads: ModelFolder, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]
) -> None:
    compute = rank_module.compute

    def failing(part: ModelPart, pool: KVPool, plan: StepPlan, *more: Any) -> StepResult:
        if plan.number == 1 and threading.current_thread().name.startswith("w/rank-1"):
            raise RuntimeError("no memory left\non this device")
        return compute(part, pool, plan, *more)

    monkeypatch.setattr(rank_module, "compute", failing)
    async with asyncio.timeout(SOON_S):
        gang = await open_tasks(nine_heads, *shape)
        with pytest.raises(WorkerError, match=r"^rank 1: RuntimeError: no memory left$"):
            await asyncio.gather(*(gang.execute(plan) for plan in plans()))
        assert "no memory left" in str(await gang.failure())
        await gang.close()


@pytest.mark.grid
@pytest.mark.parametrize("shape", [(2, 1), (1, 2)], ids=str)
async def test_ticks_grow_while_a_step_makes_progress_and_stop_when_a_rank_hangs(
    nine_heads: ModelFolder, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]
) -> None:
    compute, hanging, go_on = rank_module.compute, threading.Event(), threading.Event()

    def hangs(part: ModelPart, pool: KVPool, plan: StepPlan, *more: Any) -> StepResult:
        if plan.number == 2 and threading.current_thread().name.startswith("w/rank-1"):
            hanging.set()
            go_on.wait(SOON_S)
        return compute(part, pool, plan, *more)

    monkeypatch.setattr(rank_module, "compute", hangs)
    monkeypatch.setattr(connection, "KEEPALIVE_S", 0.02)
    async with asyncio.timeout(SOON_S):
        gang = await open_tasks(nine_heads, *shape)
        first, second, _ = plans()
        before = gang.ticks, gang._others[0].ticks
        await gang.execute(first)
        while gang._others[0].ticks == before[1]:
            await asyncio.sleep(0.01)
        assert gang.ticks > before[0]
        step = asyncio.ensure_future(gang.execute(second))
        while not hanging.is_set():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)  # rank 0 comes to where it waits for rank 1
        still = gang.ticks
        await asyncio.sleep(0.3)
        assert gang.ticks == still
        go_on.set()
        await step
        while gang._others[0].ticks <= before[1]:
            await asyncio.sleep(0.01)
        while gang.ticks <= still:  # rank 1 reports it with its next message
            await asyncio.sleep(0.01)
        await gang.close()


@pytest.mark.grid(keep=2)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("when", ["loading", "idle", "in a step"])
async def test_ranks_end_when_their_leader_does(nine_heads: ModelFolder, how: signal.Signals, when: str) -> None:
    """Also when a third rank, for which they wait, is stopped."""
    ours, theirs = FORKS.Pipe()
    leader = FORKS.Process(target=lead, args=(config(1, 3), nine_heads, theirs, when == "in a step"), daemon=True)
    leader.start()
    launcher = ProcessRanks(nine_heads, Fate(2, "load", signal.SIGSTOP) if when == "loading" else None, 2.0)
    try:
        async with asyncio.timeout(SOON_S):
            endings = launcher.launch(await asyncio.to_thread(ours.recv))
            first, second = (asyncio.ensure_future(ending) for ending in endings)
            if when != "loading":
                assert await asyncio.to_thread(ours.recv) == "open"
            assert leader.pid is not None
            os.kill(leader.pid, how)
            await first
            if when == "loading":
                launcher.processes[1].kill()
            await second
    finally:
        leader.kill()
        await launcher.end()
        leader.join()


async def test_an_opening_that_is_given_up_ends_its_ranks(nine_heads: ModelFolder) -> None:
    launcher = ProcessRanks(nine_heads, Fate(1, "load", signal.SIGSTOP))
    opening = asyncio.ensure_future(open_gang(config(2, 1), nine_heads, "w-1", launcher))
    async with asyncio.timeout(SOON_S):
        while not launcher.processes or psutil.Process(launcher.processes[0].pid).status() != psutil.STATUS_STOPPED:
            await asyncio.sleep(0.02)
        opening.cancel()
        await asyncio.wait([opening])
        assert opening.cancelled()
        await ended(launcher.processes[0])


async def test_ranks_listen_on_their_host_only_and_the_port_closes_after_opening(nine_heads: ModelFolder) -> None:
    class EarlyConnections(ProcessRanks):
        def launch(self, specs: Sequence[RankSpec]) -> Sequence[Awaitable[object]]:
            self.leader = (specs[0].leader_host, specs[0].leader_port)
            self.connections = [asyncio.ensure_future(asyncio.open_connection(*self.leader)) for _ in range(5)]
            return super().launch(specs)

    launcher = EarlyConnections(nine_heads)
    async with asyncio.timeout(SOON_S):
        gang = await open_gang(config(2, 2), nine_heads, "w-1", launcher)
        for opening in launcher.connections:
            reader, writer = await opening
            await reader.read()  # a greeting, then the end of the stream
            writer.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*launcher.leader)
        for pid in (os.getpid(), *(process.pid for process in launcher.processes)):
            listening = [each for each in psutil.Process(pid).net_connections("inet") if each.status == "LISTEN"]
            assert {each.laddr.ip for each in listening} <= {"127.0.0.1"}
        await gang.close()
        await asyncio.gather(*(ended(process) for process in launcher.processes))


async def test_unauthenticated_connections_keep_no_rank_out(
    nine_heads: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gang_module, "MAX_UNAUTHENTICATED", 4)

    class EarlyConnections(RankTasks):
        def launch(self, specs: Sequence[RankSpec]) -> Sequence[Awaitable[object]]:
            self._tasks = [asyncio.ensure_future(self._behind_a_crowd(spec)) for spec in specs]
            return self._tasks

        async def _behind_a_crowd(self, spec: RankSpec) -> None:
            crowd = [await asyncio.open_connection(spec.leader_host, spec.leader_port) for _ in range(40)]
            async with asyncio.timeout(gang_module.GREET_TIMEOUT_S / 2):  # by the bound, not by their deadline
                for reader, _ in crowd[:-6]:
                    await reader.read()
            await serve_rank(spec, self._find, self._shared)

    shared = SharedMemory()
    async with asyncio.timeout(SOON_S):
        gang = await open_gang(config(2, 1), nine_heads, "w-1", EarlyConnections(lambda _: nine_heads, shared), shared)
        await gang.close()


async def test_a_leader_without_the_secret_is_refused(nine_heads: ModelFolder) -> None:
    async def lie(stream: FrameStream) -> None:
        handshake = ListenerHandshake("gang", b"guessed")
        stream.send(Kind.HANDSHAKE, 0, handshake.hello)
        await stream.receive_handshake()
        stream.send(Kind.HANDSHAKE, 0, handshake.welcome())
        await stream.ended

    server = await served(lie)
    spec = RankSpec(config(2, 1), "w-1", Rendezvous(1, "127.0.0.1", 1), *server.sockets[0].getsockname())
    async with asyncio.timeout(SOON_S):
        with pytest.raises(PeerRefused, match=r"the leader at .* don't share one secret"):
            await serve_rank(spec, lambda _: nine_heads)
    server.close()
    await asyncio.sleep(0.05)


async def test_all_ranks_compute_the_same_plans_in_order_even_if_callers_leave(
    nine_heads: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, computed = rank_module.compute, defaultdict[str, list[int]](list)

    def noted(part: ModelPart, pool: KVPool, plan: StepPlan, *more: Any) -> StepResult:
        computed[threading.current_thread().name].append(plan.number)
        return compute(part, pool, plan, *more)

    async with asyncio.timeout(SOON_S):
        gang = await open_tasks(nine_heads, 2, 2)
        monkeypatch.setattr(rank_module, "compute", noted)
        calls = [
            asyncio.ensure_future(gang.execute(structs.replace(plans()[0], number=number))) for number in range(30)
        ]
        await asyncio.sleep(0)
        for call in calls[::3]:
            call.cancel()
        await asyncio.wait(calls)
        assert [call.result().number for call in calls if not call.cancelled()] == [n for n in range(30) if n % 3]
        await gang.close()
    assert list(computed.values()) == [list(range(30))] * 4


async def test_a_pull_settles_when_it_has_settled_on_every_rank(
    nine_heads: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: dict[int, Read] = {}

    def pull(self: Rank, order: PullOrder) -> Read:
        loop = asyncio.get_running_loop()
        reads[self.shard().rank] = Read(loop.create_future(), loop.create_future())
        return reads[self.shard().rank]

    monkeypatch.setattr(Rank, "pull", pull)
    async with asyncio.timeout(SOON_S):
        shared = SharedMemory()
        launcher = Doomed(lambda _: nine_heads, shared)
        gang = await open_gang(config(1, 3), nine_heads, "w-1", launcher, shared)
        for lost in (False, True):
            reads.clear()
            read = gang.pull(an_order())
            while len(reads) < 3:
                await asyncio.sleep(0)
            if lost:
                launcher.kill(1)
                with pytest.raises(RankLost, match="rank 2"):
                    await read.done
            else:
                reads[1].done.set_exception(DigestMismatch("other bytes"))
                with pytest.raises(DigestMismatch):
                    await read.done
            for rank in (1, 2, 0):
                await asyncio.sleep(0.02)
                assert not read.settled.done(), "the leader's own rank still reads"
                if not reads[rank].done.done():
                    reads[rank].done.cancel()
                reads[rank].settled.set_result(None)
            await read.settled
        await gang.close()


async def test_a_new_address_of_a_pool_is_reported(nine_heads: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    shard, moved = Rank.shard, (("memory", b"elsewhere"),)
    async with asyncio.timeout(SOON_S):
        gang = await open_tasks(nine_heads, 2, 1)
        monkeypatch.setattr(Rank, "shard", lambda self: replace(shard(self), transports=moved))
        while gang.shards()[1].transports != moved:
            await asyncio.sleep(0.02)
        await gang.close()
