"""Changes to a cluster over gRPC and on the command line: what is passed on, what is refused, and how it is told."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner, Result
from msgspec import structs

from cluster.cli import main
from cluster.control.changes import ChangeError, ChangeRefused, ControllerUnavailable, StaleRevision, UnknownMember
from cluster.frontend.grpc.server import GrpcServer
from cluster.spec import Role
from diptych.client import AsyncClient
from diptych.errors import DiptychError
from diptych.shapes import Shape
from diptych.v1 import admin_pb2, admin_pb2_grpc
from diptych.view import Adapter, CachedPrompt, Decision, DecisionRecord, PoolView, WorkerState
from tests.frontend.grpc.fake import FakeDispatcher, gateway_context, view
from tests.frontend.tokenizers import ByteTokenizer

FLIPPED = DecisionRecord(Decision("flip", "TTFT is 3.1 of its SLO", "decode-1", Role.PREFILL), 12.5, "done")
GROWN = DecisionRecord(Decision("grow", "both [over] 2.0", pool="decode"), 1.0, "failed: no room")


class FakeOperator:
    """Notes what it is asked; `error` is raised instead."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []
        self.error: ChangeError | None = None
        self.taken: tuple[DecisionRecord, ...] = (FLIPPED, GROWN)

    async def flip(self, worker: str, role: Role, revision: int) -> int:
        return self._done("flip", worker, role, revision)

    async def drain(self, worker: str, revision: int, deadline_s: float) -> int:
        return self._done("drain", worker, revision, deadline_s)

    async def scale(self, pool: str, replicas: int, revision: int) -> int:
        return self._done("scale", pool, replicas, revision)

    async def load_adapter(self, adapter: Adapter, revision: int) -> int:
        return self._done("load_adapter", adapter, revision)

    async def unload_adapter(self, name: str, revision: int) -> int:
        return self._done("unload_adapter", name, revision)

    async def decisions(self) -> tuple[DecisionRecord, ...]:
        return self.taken

    async def decision_counts(self) -> tuple[tuple[str, str, int], ...]:
        return (("flip", "done", 3), ("grow", "failed", 1))

    def _done(self, *asked: object) -> int:
        self.asked.append(asked)
        if self.error is not None:
            raise self.error
        return 41 + len(self.asked)


def changed_view() -> FakeDispatcher:
    """Its decode worker prefills."""
    dispatcher, seen = FakeDispatcher(), view()
    flipped = tuple(
        type(each)(**{name: getattr(each, name) for name in each.__struct_fields__} | {"role": Role.PREFILL})
        for each in seen.workers
    )
    pools = (PoolView("prefill", Role.PREFILL, 1, 1, 1), PoolView("decode", Role.DECODE, 2, 1, 4))
    dispatcher.view = replace(seen, workers=flipped, pools=pools)
    return dispatcher


@pytest.fixture
def operator() -> FakeOperator:
    return FakeOperator()


@pytest.fixture
async def client(operator: FakeOperator) -> AsyncIterator[AsyncClient]:
    server = GrpcServer(replace(gateway_context(changed_view()), operator=operator), ByteTokenizer)
    async with AsyncClient(await server.open()) as client:
        yield client
    await server.close(0)


async def test_changes_reach_the_operator_with_the_revision(client: AsyncClient, operator: FakeOperator) -> None:
    assert await client.flip("decode-0", Role.MIXED, revision=7) == 42
    assert await client.drain("decode-0") == 43
    assert await client.drain("decode-0", deadline_s=2.5, revision=8) == 44
    assert await client.scale("decode", 3) == 45
    assert operator.asked == [
        ("flip", "decode-0", Role.MIXED, 7),
        ("drain", "decode-0", 0, 0.0),
        ("drain", "decode-0", 8, 2.5),
        ("scale", "decode", 3, 0),
    ]


async def test_status_has_pools_and_decisions(client: AsyncClient) -> None:
    found = await client.status()
    assert found.view.pools == (PoolView("prefill", Role.PREFILL, 1, 1, 1), PoolView("decode", Role.DECODE, 2, 1, 4))
    assert found.decisions == (FLIPPED, GROWN)


async def test_metrics_have_decisions_and_roles(client: AsyncClient) -> None:
    lines = (await client.metrics()).splitlines()
    for line in (
        'diptych_elastic_decisions_total{gateway="gateway-0",kind="flip",outcome="done"} 3.0',
        'diptych_elastic_decisions_total{gateway="gateway-0",kind="grow",outcome="failed"} 1.0',
        'diptych_worker_role{gateway="gateway-0",role="prefill",worker="decode-0"} 1.0',
    ):
        assert line in lines


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (StaleRevision("revision 3 was expected, but the cluster is at 5"), "ABORTED", "STALE_REVISION"),
        (UnknownMember("no worker 'x'; there are a, b"), "NOT_FOUND", "UNKNOWN_MEMBER"),
        (ChangeRefused("0 ready workers would prefill"), "FAILED_PRECONDITION", "CHANGE_REFUSED"),
        (ControllerUnavailable("the controller does not answer"), "UNAVAILABLE", "NO_CONTROLLER"),
    ],
)
async def test_refused_changes_have_a_code_a_reason_and_a_message(
    client: AsyncClient, operator: FakeOperator, error: ChangeError, code: str, reason: str
) -> None:
    operator.error = error
    for change in (client.flip("x", Role.MIXED), client.drain("x"), client.scale("x", 1)):
        with pytest.raises(DiptychError) as caught:
            await change
        assert (caught.value.code, caught.value.reason, caught.value.message) == (code, reason, str(error))


async def test_invalid_changes_are_refused_before_the_operator_is_called(
    client: AsyncClient, operator: FakeOperator
) -> None:
    with pytest.raises(DiptychError) as caught:
        await client.drain("decode-0", deadline_s=-1.0)
    assert (caught.value.code, caught.value.field) == ("INVALID_ARGUMENT", "deadline")
    for change, field in (
        (client.drain("decode-0", deadline_s=1e11), "deadline"),
        (client.scale("decode", 2**32 - 1), "replicas"),
        (client.scale("x" * 100_000, 1), "pool"),
        (client.drain("x" * 100_000), "worker"),
        (client.flip("x" * 100_000, Role.MIXED), "worker"),
        (client.measure("x" * 100_000, Shape((), 1, 4), 1), "worker"),
        (client.trace(last_s=-1.0), "last"),
    ):
        with pytest.raises(DiptychError) as caught:
            await change
        assert (caught.value.code, caught.value.field) == ("INVALID_ARGUMENT", field)
        assert len(caught.value.message) < 300
    async with grpc.aio.insecure_channel(client.endpoint, options=[("grpc.enable_http_proxy", 0)]) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await admin_pb2_grpc.AdminServiceStub(channel).FlipWorker(admin_pb2.FlipWorkerRequest(worker="decode-0"))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not operator.asked


async def test_prompts_are_warmed_pinned_and_unpinned_as_asked() -> None:
    dispatcher = FakeDispatcher()
    server = GrpcServer(gateway_context(dispatcher), ByteTokenizer)
    async with AsyncClient(await server.open()) as client:
        warmed = await client.warm("a system prompt", pin_s=3600.0, pool="both", tenant="bank")
        assert warmed == (CachedPrompt("prefill-0", 15), CachedPrompt("prefill-1", 0, "both, 3600 s"))
        (asked,) = dispatcher.requests
        assert (asked.prompt, asked.tenant) == (tuple(b"a system prompt"), "bank") and asked.sampling.max_tokens == 1
        assert asked.sampling.seed is not None, "workers do not draw one"
        assert (await client.warm("x"))[1].problem == ", 0 s"
        assert await client.unpin("a system prompt") == (CachedPrompt("prefill-0", 15),)
        assert await client.unpin() == (CachedPrompt("prefill-0", 0),)
        for pin_s in (0.0, -1.0, 1e9):
            with pytest.raises(DiptychError) as caught:
                await client.warm("x", pin_s=pin_s)
            assert (caught.value.code, caught.value.field) == ("INVALID_ARGUMENT", "pin")
        with pytest.raises(DiptychError, match="prompt"):
            await client.warm("")
    await server.close(0)


def test_the_command_warms_each_line_of_a_file_and_stops_at_a_refusal(
    served: tuple[str, FakeOperator], tmp_path: Path
) -> None:
    file = tmp_path / "prompts"
    file.write_text('plain text\n\n"two\\nlines"\n')
    result = CliRunner().invoke(main, ["cache", "drop", str(file), "--endpoint", served[0]])
    assert result.exit_code == 0 and result.stdout.splitlines() == [
        'prefill-0: 10 tokens unpinned: "plain text"',
        'prefill-0: 9 tokens unpinned: "two\\nlines"',
    ]
    result = CliRunner().invoke(main, ["cache", "drop", "--endpoint", served[0]])
    assert result.stdout == 'prefill-0: 0 tokens unpinned: "all pins"\n'
    result = CliRunner().invoke(main, ["cache", "warm", str(file), "--pin", "60", "--endpoint", served[0]])
    assert result.exit_code == 1 and result.stderr == "Error: prefill-1: , 60 s\n"
    file.write_text('"no end\n')
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    result = CliRunner().invoke(main, ["cache", "warm", str(binary), "--endpoint", served[0]])
    assert result.exit_code == 1 and "the file of prompts is not UTF-8 text" in result.output
    result = CliRunner().invoke(main, ["cache", "warm", str(file), "--endpoint", served[0]])
    assert result.exit_code == 1 and result.stderr.startswith("Error: line 1 is no JSON string")


async def test_a_gateway_without_a_controller_says_so() -> None:
    server = GrpcServer(gateway_context(FakeDispatcher()), ByteTokenizer)
    async with AsyncClient(await server.open()) as client:
        with pytest.raises(DiptychError, match="no controller"):
            await client.scale("decode", 2)
        assert (await client.status()).decisions == ()
    await server.close(0)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, FakeOperator]]:
    """A server in another thread, for commands that have a loop of their own."""
    operator, loop = FakeOperator(), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def open_server() -> tuple[GrpcServer, str]:
        server = GrpcServer(replace(gateway_context(changed_view()), operator=operator), ByteTokenizer)
        return server, await server.open()

    server, endpoint = asyncio.run_coroutine_threadsafe(open_server(), loop).result(10)
    yield endpoint, operator
    asyncio.run_coroutine_threadsafe(server.close(0), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def run(endpoint: str, *arguments: str) -> Result:
    return CliRunner().invoke(main, [*arguments, "--endpoint", endpoint])


def test_commands_change_the_cluster_and_print_the_revision(served: tuple[str, FakeOperator]) -> None:
    endpoint, operator = served
    operator.asked.clear()
    received = run(endpoint, "flip", "decode-1", "prefill", "--revision", "9")
    assert (received.exit_code, received.stdout) == (0, "decode-1: role set to prefill (revision 42)\n")
    received = run(endpoint, "drain", "decode-1", "--deadline", "5")
    assert received.stdout == "decode-1: draining, stops when it is empty (revision 43)\n"
    received = run(endpoint, "scale", "decode", "3")
    assert received.stdout == "decode: target set to 3 workers (revision 44)\n"
    assert operator.asked == [
        ("flip", "decode-1", Role.PREFILL, 9),
        ("drain", "decode-1", 0, 5.0),
        ("scale", "decode", 3, 0),
    ]


def test_a_refused_change_is_one_line(served: tuple[str, FakeOperator]) -> None:
    endpoint, operator = served
    operator.error = StaleRevision("revision 3 was expected, but the cluster is at 5")
    received = run(endpoint, "scale", "decode", "3", "--revision", "3")
    operator.error = None
    assert received.exit_code == 1 and received.stdout == ""
    assert received.stderr == "Error: revision 3 was expected, but the cluster is at 5 (ABORTED)\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("flip", "decode-1", "both"), "'prefill', 'decode', 'mixed'"),
        (("scale", "decode", "-1"), "No such option"),
        (("scale", "decode", "many"), "not a valid integer"),
        (("drain", "decode-1", "--deadline", "0"), "x>0"),
    ],
)
def test_bad_arguments_are_named(served: tuple[str, FakeOperator], arguments: tuple[str, ...], words: str) -> None:
    received = run(served[0], *arguments)
    assert received.exit_code == 2 and words in received.stderr


def test_the_status_shows_roles_pools_and_decisions(served: tuple[str, FakeOperator]) -> None:
    shown = run(served[0], "status").stdout
    assert "prefill (pool: decode)" in shown and "revision 1" in shown
    assert "decode-1 -> prefill" in shown and "TTFT is 3.1 of its SLO" in shown
    assert "failed: no room" in shown and "both [over] 2.0" in shown
    received = json.loads(run(served[0], "status", "--json").stdout)
    assert received["pools"][1] == {
        "name": "decode",
        "role": "decode",
        "wanted": 2,
        "min_replicas": 1,
        "max_replicas": 4,
        "model": "",
    }
    assert received["decisions"][0] == {
        "kind": "flip", "reason": "TTFT is 3.1 of its SLO", "worker": "decode-1", "role": "prefill", "pool": "",
        "age_s": 12.5, "outcome": "done",
    }  # fmt: skip


async def test_status_shows_what_a_worker_waits_for_and_its_last_error() -> None:
    dispatcher, seen = FakeDispatcher(), view(WorkerState.STARTING)
    waiting = structs.replace(seen.workers[1], waits_for="{CPU: 1, decode: 1}", detail="no room for decode-0")
    dispatcher.view = replace(seen, workers=(seen.workers[0], waiting))
    server = GrpcServer(gateway_context(dispatcher), ByteTokenizer)
    endpoint = await server.open()
    async with AsyncClient(endpoint) as client:
        first, second = (await client.status()).view.workers
    await server.close(0)
    assert (first.trouble, second.waits_for) == ("", "{CPU: 1, decode: 1}")
    assert second.trouble == "waits for a node: {CPU: 1, decode: 1}; no room for decode-0"


@pytest.mark.parametrize("command", ["flip", "drain", "scale"])
def test_help_of_changes_has_an_example(command: str) -> None:
    assert f"diptych {command} " in CliRunner().invoke(main, [command, "--help"]).stdout.partition("Example:")[2]
