"""How the leader handles a rank's frames, silence and disconnection; the test plays the rank."""

import asyncio
import gc
import re
from collections.abc import AsyncIterator

import msgspec
import pytest

from kvtransfer.layout import KVLayout
from kvtransfer.rpc.frames import FrameStream, Kind, pack_header
from kvtransfer.ticket import ShardAddress
from kvtransfer.transport import PullOrder
from workers.engine.step import StepPlan, StepResult
from workers.errors import RankLost
from workers.executor import gang_wire as wire
from workers.executor import remote_rank

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
    """The leader's side of a connection, and the rank's side, which a test controls."""

    async def __aenter__(self) -> "Wire":
        arrived: asyncio.Future[FrameStream] = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: FrameStream(arrived.set_result), "127.0.0.1", 0)
        self.stream = await FrameStream.connect(*self._server.sockets[0].getsockname())
        self.lost: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self.remote = remote_rank.RemoteRank(1, await arrived, self.lost.set_result)
        self._running = asyncio.ensure_future(self.remote.run())
        return self

    def reply(self, number: int, result: object) -> None:
        self.stream.send(Kind.REPLY, number, msgspec.msgpack.encode(result))

    async def __aexit__(self, *_: object) -> None:
        await self.remote.close()
        await self._running
        await self.stream.close()
        self._server.close()


SHARD = ShardAddress(1, KVLayout("m", 1, 1, 8, 8), 4, ())
STEP = StepResult(1, (5,), (None,), ((),), 0.0)


def frame(kind: int, number: int, body: object) -> bytes:
    data = msgspec.msgpack.encode(body)
    return pack_header(kind, number, len(data)) + data


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (pack_header(Kind.MESSAGE, 0, 3) + b"abc", "broke the protocol"),
        (pack_header(Kind.MESSAGE, 0, 1 << 40), "broke the protocol: .* exceeds the limit"),
        (b"\x02\x00", "disconnected"),
        (frame(Kind.REPLY, 99, STEP), "broke the protocol: .* number 99, which is not expected"),
        (frame(Kind.REPLY, 2, SHARD), "broke the protocol: ValidationError"),
        (frame(Kind.MESSAGE, 0, wire.Settled(99)), "broke the protocol: KeyError: 99"),
        (
            frame(Kind.CALL, 1, wire.CALLS["execute"](StepPlan(1, ()))),
            "broke the protocol: .* rank does not call execute",
        ),
        (frame(Kind.HANDSHAKE, 0, None), "broke the protocol: .* kind 1"),
    ],
    ids=["garbage", "too large", "cut off", "unknown call", "another reply", "unknown pull", "a call", "a handshake"],
)
async def test_frames_that_no_rank_sends_lose_the_rank(sent: bytes, reason: str) -> None:
    async with asyncio.timeout(SOON_S), Wire() as rank:
        opening = asyncio.ensure_future(rank.remote.open())
        await asyncio.sleep(0)
        rank.reply(1, SHARD)
        await opening
        step, read = (
            rank.remote.execute(StepPlan(1, ())),
            rank.remote.pull(PullOrder("nobody", (1,), (4,), 0, 8, (), 5.0)),
        )
        rank.stream._wire.write(sent)
        rank.stream._wire.write_eof()
        assert re.search(f"^rank 1 {reason}", str(await rank.lost))
        for call in (step, read.done, rank.remote.execute(StepPlan(2, ()))):
            with pytest.raises(RankLost, match=r"^rank 1 "):
                await call
        await read.settled


async def test_a_reply_to_a_cancelled_call_is_dropped_and_a_second_reply_is_an_error() -> None:
    async with asyncio.timeout(SOON_S), Wire() as rank:
        step = rank.remote.execute(StepPlan(1, ()))
        step.cancel()
        rank.stream.send(Kind.ERROR, 1, msgspec.msgpack.encode({"error": "ValueError", "reason": "no call waits"}))
        other = rank.remote.execute(StepPlan(2, ()))
        rank.reply(2, STEP)
        assert (await other).tokens == (5,)
        rank.reply(2, STEP)
        assert "number 2, which is not expected" in str(await rank.lost)


async def test_a_rank_that_is_silent_from_the_first_moment_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_rank, "OPEN_SILENT_S", 2.0)
    async with asyncio.timeout(SOON_S), Wire() as rank:
        with pytest.raises(RankLost, match=r"rank 1 was silent for 2 s: its process is stopped"):
            await rank.remote.open()
