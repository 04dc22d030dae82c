"""What the leader makes of a rank's frames, of its silence and of its end: the rank is in the hands of the test."""

import asyncio
import gc
from collections.abc import AsyncIterator

import msgspec
import pytest

from kvtransfer.control_wire import Channel
from kvtransfer.layout import KVLayout
from kvtransfer.ticket import ShardAddress
from kvtransfer.transport import PullOrder
from workers.engine.step import StepPlan
from workers.errors import RankLost
from workers.executor import gang_wire as wire
from workers.executor import remote_rank
from workers.executor.rank import RankStep

SOON_S = 25.0


@pytest.fixture(autouse=True)
async def no_exception_is_lost() -> AsyncIterator[None]:
    unseen: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(str(context)))
    yield
    gc.collect()
    await asyncio.sleep(0)
    assert not unseen


class Wire:
    """The leader's end of a rank, and the rank's end in the hands of a test."""

    async def __aenter__(self) -> "Wire":
        arrived: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()
        self._server = await asyncio.start_server(lambda *ends: arrived.set_result(Channel(*ends)), "127.0.0.1", 0)
        self.reader, self.writer = await asyncio.open_connection(*self._server.sockets[0].getsockname())
        self.lost: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self.remote = remote_rank.RemoteRank(1, await arrived, self.lost.set_result)
        return self

    def say(self, *frames: msgspec.Struct) -> None:
        for frame in frames:
            data = msgspec.msgpack.encode(frame)
            self.writer.write(len(data).to_bytes(4, "big") + data)

    async def __aexit__(self, *_: object) -> None:
        await self.remote.close()
        self.writer.close()
        self._server.close()


SHARD = ShardAddress(1, KVLayout("m", 1, 1, 8, 8), 4, ())


@pytest.mark.parametrize(
    ("bytes_", "reason"),
    [
        (b"\x00\x00\x00\x03abc", "sent what no rank of a gang sends"),
        (b"\xff\xff\xff\xff", "exceeds the limit"),
        (b"\x00\x00", "hung up"),
        (wire.Stepped(99, RankStep((), (), (), 0.0)), "sent what no rank of a gang sends: KeyError: 99"),
        (wire.Settled(99), "KeyError: 99"),
        (wire.Opened(SHARD), "InvalidStateError"),
        (wire.Execute(1, StepPlan(1, ())), "sent what no rank of a gang sends"),
    ],
    ids=["garbage", "too large", "cut off", "unknown call", "unknown pull", "opened twice", "another's frame"],
)
async def test_frames_that_no_rank_sends_lose_the_rank(bytes_: bytes | msgspec.Struct, reason: str) -> None:
    async with asyncio.timeout(SOON_S), Wire() as rank:
        opening = asyncio.ensure_future(rank.remote.open())
        rank.say(wire.Opened(SHARD))
        await opening
        step, read = (
            rank.remote.execute(StepPlan(1, ())),
            rank.remote.pull(PullOrder("nobody", (1,), (4,), 0, 8, (), 5.0)),
        )
        if isinstance(bytes_, bytes):
            rank.writer.write(bytes_)
            rank.writer.write_eof()
        else:
            rank.say(bytes_)
        assert reason in str(await rank.lost)
        for call in (step, read.done, rank.remote.execute(StepPlan(2, ()))):
            with pytest.raises(RankLost, match=r"^rank 1 "):
                await call
        await read.settled


async def test_an_answer_to_a_caller_who_has_gone_is_dropped_and_a_second_one_is_not() -> None:
    async with asyncio.timeout(SOON_S), Wire() as rank:
        step = rank.remote.execute(StepPlan(1, ()))
        step.cancel()
        rank.say(wire.failed(1, ValueError("nobody hears this")), wire.Alive())
        other = rank.remote.execute(StepPlan(2, ()))
        rank.say(wire.Stepped(2, RankStep((5,), (None,), (), 0.0)))
        assert (await other).tokens == (5,)
        rank.say(wire.Stepped(2, RankStep((6,), (None,), (), 0.0)))
        assert "KeyError: 2" in str(await rank.lost)


async def test_a_rank_that_is_silent_from_the_first_moment_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_rank, "OPEN_SILENT_S", 2.0)
    async with asyncio.timeout(SOON_S), Wire() as rank:
        with pytest.raises(RankLost, match=r"rank 1 was silent for 2 s: its process is stopped"):
            await rank.remote.open()
