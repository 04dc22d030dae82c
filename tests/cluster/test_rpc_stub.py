"""A gateway's connection to a worker in another process: here both ends are in one process, over a real socket."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from benchmarks.outputs_reader import OutputsReader
from cluster.runtime.interface import WorkerStub
from cluster.runtime.rpc_stub import RpcAddress, RpcStub
from cluster.runtime.runtime_errors import NoAnswer, WorkerGone
from tests.engine.driving import request
from workers.build import build_worker
from workers.config import EngineConfig, WorkerConfig
from workers.errors import InvalidRequest, Overloaded, UnknownSequence, WorkerError
from workers.request import TokensOut
from workers.rpc_server import WorkerRpcServer
from workers.server import WorkerServer

SECRET = b"a secret"
CONFIG = WorkerConfig(
    name="w", pool="p", model="m", engine=EngineConfig(block_size=4, kv_blocks=64), executor="simulated", secret="s"
)


@asynccontextmanager
async def served() -> AsyncIterator[tuple[WorkerServer, WorkerRpcServer, RpcAddress]]:
    """A simulated worker that takes no time, and its RPC server."""
    server = build_worker(CONFIG)
    rpc = WorkerRpcServer(server.incarnation, SECRET, server.worker)
    await server.open()
    port = await rpc.start("127.0.0.1")
    try:
        yield server, rpc, RpcAddress("127.0.0.1", port, SECRET)
    finally:
        await server.close()
        await rpc.close()


def stub(server: WorkerServer, address: RpcAddress, incarnation: str = "") -> RpcStub:
    async def locate() -> RpcAddress:
        return address

    return RpcStub("w", incarnation or server.incarnation, locate)


async def answer(reader: OutputsReader, key: str) -> tuple[int, ...]:
    tokens: tuple[int, ...] = ()
    while True:
        for output in (await reader.next()).outputs:
            assert isinstance(output, TokensOut) and output.key == key
            tokens += output.tokens
            if output.finish is not None:
                return tokens


async def test_calls_and_outputs_are_those_of_the_worker() -> None:
    async with served() as (server, _, address):
        remote = stub(server, address)
        worker = cast(WorkerStub, remote)
        await asyncio.gather(*(worker.holds(f"none-{n}") for n in range(100)))  # one connection, many calls
        reader = await OutputsReader.open(worker, "test")
        await worker.generate(request("a", (1, 2, 3), max_tokens=9))
        assert len(await answer(reader, "a/0")) == 9
        assert not await worker.holds("a/0")
        await worker.check()
        await reader.close()
        await remote.disconnect()
        with pytest.raises(WorkerGone, match="this end closed the connection"):
            await worker.holds("a/0")


async def test_a_connection_that_breaks_again_and_again_loses_and_doubles_no_token() -> None:
    async with served() as (server, rpc, address):
        remote: Any = stub(server, address)
        reader = await OutputsReader.open(remote, "test")
        wanted = [request(f"r{n}", (n + 1, 2, 3), max_tokens=60) for n in range(12)]
        outputs: dict[str, list[TokensOut]] = {each.key: [] for each in wanted}
        calls = [asyncio.ensure_future(remote.generate(each)) for each in wanted]
        async with asyncio.timeout(30):
            while any(not of or of[-1].finish is None for of in outputs.values()):
                for output in (await reader.next()).outputs:
                    assert isinstance(output, TokensOut)
                    outputs[output.key].append(output)
                [session] = rpc._sessions.values()
                if session._stream is not None and session.received % 2:
                    session._stream.abort()
            await asyncio.gather(*calls)
        for of in outputs.values():
            positions = [
                position
                for each in of
                for position in range(each.first_position, each.first_position + len(each.tokens))
            ]
            assert positions == list(range(60))
        assert session._connection > 2, "otherwise this proves nothing"
        await reader.close()
        await remote.check()  # it is connected again
        await remote.disconnect()
        async with asyncio.timeout(30.0):
            while rpc._sessions:
                await asyncio.sleep(0.01)


async def test_errors_arrive_with_their_class_and_arguments() -> None:
    async with served() as (server, _, address):
        remote: Any = stub(server, address)
        reader = await OutputsReader.open(remote, "test")
        with pytest.raises(InvalidRequest, match="prompt: is empty") as invalid:
            await remote.generate(request("a", ()))
        assert invalid.value.field == "prompt"
        with pytest.raises(UnknownSequence, match="holds no reservation here"):
            await remote.decode("none", (1,))
        reservation = await remote.reserve(request("b", tuple(range(1, 150))), 1.0)
        assert reservation.key == "b/0" and reservation.num_blocks == 38
        with pytest.raises(Overloaded, match="no decode slot or blocks within") as overloaded:
            await remote.reserve(request("c", tuple(range(1, 150))), 0.0)
        assert overloaded.value.retry_after_s == 1.0

        def broken() -> None:
            raise AssertionError("two owners")

        server.worker().engine.check = broken
        with pytest.raises(AssertionError, match="two owners"):
            await remote.check()

        async def unforeseen(key: str) -> bool:
            raise KeyError(key)

        server.worker().holds = unforeseen
        with pytest.raises(WorkerError, match="KeyError: 'a'"):
            await remote.holds("a")
        await reader.close()
        await remote.disconnect()


async def test_a_worker_that_ends_is_noticed_by_the_calls_that_wait() -> None:
    async with served() as (server, rpc, address):
        remote: Any = stub(server, address)
        reader = await OutputsReader.open(remote, "me")
        await rpc.close()
        with pytest.raises(WorkerGone):
            async with asyncio.timeout(30.0):
                while True:
                    await reader.next()
        with pytest.raises(WorkerGone):
            await remote.holds("a")
        await remote.disconnect()


@pytest.mark.parametrize(
    ("secret", "incarnation", "reason"),
    [(b"another", "", "don't share one secret"), (SECRET, "another", "another has ended")],
)
async def test_a_stranger_or_an_ended_incarnation_is_not_admitted(secret: bytes, incarnation: str, reason: str) -> None:
    async with served() as (server, _, address):
        remote: Any = stub(server, address._replace(secret=secret), incarnation=incarnation)
        for _ in range(2):
            with pytest.raises(WorkerGone, match=reason):
                await remote.holds("a")
        await remote.disconnect()


async def test_a_port_that_nobody_listens_on_and_a_call_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as (server, _, address):
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            remote: Any = stub(server, address._replace(port=unused.getsockname()[1]), incarnation="nobody")
            with pytest.raises(WorkerGone, match="its process ended, or cannot be reached"):
                await remote.holds("a")
        remote = stub(server, address)
        await OutputsReader.open(remote, "test")
        await remote.reserve(request("a", tuple(range(1, 240))), 1.0)
        monkeypatch.setattr("cluster.runtime.rpc_stub.CALL_TIMEOUT_S", -4.9)
        with pytest.raises(NoAnswer, match=r"no answer within 0\.1 s"):
            await remote.reserve(request("b", tuple(range(1, 240))), 5.0)
        await remote.disconnect()


async def test_a_call_that_waits_for_the_connection_fails_when_the_stub_is_disconnected() -> None:
    """It is not cancelled: its caller did not ask for that."""
    asked = asyncio.Event()

    async def locate() -> RpcAddress:
        asked.set()
        await asyncio.get_running_loop().create_future()
        raise AssertionError("never located")

    remote: Any = RpcStub("w", "one", locate)
    waiting = asyncio.ensure_future(remote.holds("a"))
    await asked.wait()
    await remote.disconnect()
    for call in (waiting, remote.holds("a")):
        with pytest.raises(WorkerGone, match="this end closed the connection"):
            await call


async def test_a_stub_that_was_disconnected_before_it_was_used_opens_no_connection() -> None:
    async with served() as (server, _, address):
        remote: Any = stub(server, address)
        await remote.disconnect()
        with pytest.raises(WorkerGone, match="this end closed the connection"):
            await remote.holds("a")


async def test_an_error_whose_arguments_cannot_be_sent_keeps_its_message() -> None:
    async with served() as (server, _, address):
        remote: Any = stub(server, address)

        async def refused(key: str) -> bool:
            raise UnknownSequence(ValueError("no such key"))

        server.worker().holds = refused
        with pytest.raises(WorkerError, match="UnknownSequence: no such key"):
            await remote.holds("a")
        await remote.disconnect()
