"""A request that waits for its turn, as a client and the command line see it; and who may not wait."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Iterator

import pytest
from click.testing import CliRunner

from cluster.cli import main
from cluster.events import Accepted, Event, Queued, Rejected
from cluster.frontend.grpc.server import GrpcServer
from cluster.policy.admission.classes import Classes
from cluster.spec import ClassSpec, GatewaySpec
from diptych.client import AsyncClient
from diptych.errors import DiptychError
from tests.frontend.grpc.fake import FakeDispatcher, gateway_context
from tests.frontend.tokenizers import ByteTokenizer
from workers.request import SLO, Request

QUEUED = Queued("", 2, 1.5, 2.25, "all 4 decode slots of decode-0 are taken")


class Lobby(FakeDispatcher):
    """Lets everybody wait, and knows one class."""

    classes = Classes(GatewaySpec(classes={"interactive": ClassSpec(ttft_s=1.0)}))

    async def generate(
        self, request: Request, *, deadline_s: float | None = None, arrived_ns: int | None = None
    ) -> AsyncGenerator[Event, None]:
        self.classes.resolved(request)
        yield Queued(request.id, 2, 1.5, 2.25, QUEUED.reason)
        async for event in super().generate(request, deadline_s=deadline_s, arrived_ns=arrived_ns):
            yield event


@pytest.fixture
def dispatcher() -> FakeDispatcher:
    return Lobby()


async def test_queued_comes_before_accepted_with_its_predictions(client: AsyncClient) -> None:
    events = [event async for event in client.generate("hello", request_id="mine", max_tokens=3)]
    assert isinstance(events[0], Queued) and isinstance(events[1], Accepted)
    assert events[0] == Queued("mine", 2, 1.5, 2.25, QUEUED.reason)
    answer = await client.complete("hello", request_id="other", max_tokens=3)
    assert answer.queued == Queued("other", 2, 1.5, 2.25, QUEUED.reason) and answer.text == "abc"


async def test_each_of_several_answers_has_its_own_queue_position(client: AsyncClient) -> None:
    events = [event async for event in client.generate("hello", request_id="mine", n=2, max_tokens=1)]
    queued = [event for event in events if isinstance(event, Queued)]
    assert sorted((event.request_id, event.index) for event in queued) == [("mine", 0), ("mine", 1)]


async def test_a_full_queue_is_refused_with_a_retry_time(client: AsyncClient, dispatcher: FakeDispatcher) -> None:
    dispatcher.error = Rejected("the queue of class 'batch' is full (8 of 8); try again", 7.5, "queue-full")
    with pytest.raises(DiptychError) as refused:
        await client.complete("hello", max_tokens=3)
    assert refused.value.code == "RESOURCE_EXHAUSTED" and refused.value.retry_after_s == 7.5


async def test_an_unknown_class_is_refused_with_the_known_ones(client: AsyncClient) -> None:
    with pytest.raises(DiptychError, match="'premium'; the classes are interactive") as refused:
        await client.complete("hello", slo=SLO(class_name="premium"), max_tokens=3)
    assert (refused.value.code, refused.value.field) == ("INVALID_ARGUMENT", "slo.class_name")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def open_server() -> tuple[GrpcServer, str]:
        server = GrpcServer(gateway_context(Lobby()), ByteTokenizer)
        return server, await server.open()

    server, address = asyncio.run_coroutine_threadsafe(open_server(), loop).result(10)
    yield address
    asyncio.run_coroutine_threadsafe(server.close(0), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_the_command_line_prints_why_a_request_is_queued(endpoint: str) -> None:
    result = CliRunner().invoke(main, ["generate", "--raw", "hello", "--max-tokens", "3", "--endpoint", endpoint])
    assert result.stdout == "abc\n"
    assert result.stderr.strip() == (
        "queued behind 2 others (all 4 decode slots of decode-0 are taken); expected to start in 1.5 s, with a "
        "TTFT of 2.2 s"
    )
    result = CliRunner().invoke(
        main, ["generate", "--raw", "hello", "--max-tokens", "3", "--endpoint", endpoint, "--json"]
    )
    assert json.loads(result.stdout)["queued"]["position"] == 2
