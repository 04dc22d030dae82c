"""Tenants and SLOs on the wire: they come through or are refused by name; scores, metrics, the command line."""

import asyncio
import json
import math
import threading
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.cli import main
from cluster.frontend.grpc.server import GrpcServer
from cluster.policy.slo_attainment import Ended
from diptych.client import AsyncClient
from diptych.errors import DiptychError
from diptych.slo import Calibration, ClassScore, Errors, SLOAttainment, SLOCount
from diptych.status import ATTAINMENT
from tests.frontend.grpc.conftest import OpenClient
from tests.frontend.grpc.fake import FakeDispatcher, gateway_context
from tests.frontend.tokenizers import ByteTokenizer
from workers.request import SLO

COUNT = st.integers(0, 2**63)
REAL = st.floats(allow_nan=False)
WORD = st.text(max_size=9)
KEPT = st.builds(SLOCount, COUNT, COUNT)
ERRORS = st.none() | st.builds(Errors, REAL, REAL, REAL)
COUNTS = st.lists(st.tuples(WORD, COUNT), max_size=3).map(tuple)
STANDINGS = st.builds(
    SLOAttainment,
    st.lists(st.builds(ClassScore, WORD, COUNT, KEPT, KEPT, KEPT, ERRORS, ERRORS), max_size=3).map(tuple),
    COUNTS,
    COUNTS,
    st.builds(Calibration, COUNT, REAL, REAL, REAL, REAL),
    queued=st.integers(0, 2**32 - 1),
)


@settings(deadline=None)
@given(STANDINGS)
def test_slo_attainment_survives_encoding(standing: SLOAttainment) -> None:
    message = ATTAINMENT.encode(standing)
    assert ATTAINMENT.decode(type(message).FromString(message.SerializeToString())) == standing


async def test_tenant_and_slo_reach_the_dispatcher(client: AsyncClient, dispatcher: FakeDispatcher) -> None:
    wanted = SLO(0.25, 0.0625, "interactive")
    asked: dict[str, Any] = {"slo": wanted, "tenant": "alice", "max_tokens": 1}
    for events in (client.generate("hi", **asked), client.chat([("user", "hi")], **asked)):
        assert [event async for event in events]
    await client.complete("hi", **asked)
    assert [index async for index, _ in client.batch(["hi"], **asked)] == [0]
    assert [(each.tenant, each.slo) for each in dispatcher.requests] == [("alice", wanted)] * 4
    await client.complete("hi", max_tokens=1)
    assert (dispatcher.requests[-1].tenant, dispatcher.requests[-1].slo) == ("", SLO())


@pytest.mark.parametrize(
    ("slo", "tenant", "field", "words"),
    [
        (SLO(ttft_s=-1.0), "", "slo.time_to_first_token", "is -1 s; it must be above 0"),
        (SLO(ttft_s=0.0), "", "slo.time_to_first_token", "is 0 s; it must be above 0"),
        (SLO(1.0, 0.0), "", "slo.time_per_output_token", "is 0 s; it must be above 0"),
        (SLO(1.0, math.nan), "", "slo.time_per_output_token", "cannot be nan"),
        (SLO(math.inf), "", "slo.time_to_first_token", "cannot be inf"),
        (SLO(class_name="two words"), "", "slo.class_name", "at most 64 visible ASCII characters"),
        (SLO(class_name="x" * 65), "", "slo.class_name", "at most 64 visible ASCII characters"),
        (None, "a\nb", "tenant", "at most 128 visible ASCII characters"),
        (None, "t" * 129, "tenant", "at most 128 visible ASCII characters"),
    ],
)
async def test_an_invalid_slo_is_refused_with_its_field(
    client: AsyncClient, dispatcher: FakeDispatcher, slo: SLO | None, tenant: str, field: str, words: str
) -> None:
    with pytest.raises(DiptychError, match=words) as caught:
        await client.complete("hi", slo=slo, tenant=tenant)
    assert (caught.value.code, caught.value.field) == ("INVALID_ARGUMENT", field)
    assert dispatcher.requests == []


async def test_requests_that_the_server_refuses_are_counted(
    open_client: OpenClient, dispatcher: FakeDispatcher
) -> None:
    client, dispatcher.hold = await open_client(max_requests=1), asyncio.Event()
    async with aclosing(client.generate("hi")) as first:
        await anext(first)
        with pytest.raises(DiptychError, match="1 of 1 requests are in flight"):
            await client.complete("hi", slo=SLO(class_name="batch"))
        received = (await client.status()).slo_attainment
    assert dict(received.refused)["gateway-full"] == 1
    assert [(score.name, score.requests) for score in received.classes] == [("batch", 1)]


async def test_metrics_are_in_prometheus_text_format(client: AsyncClient, dispatcher: FakeDispatcher) -> None:
    dispatcher.count_refusal("batch", "no-room")
    lines = (await client.metrics()).splitlines()
    assert 'diptych_refused_total{gateway="gateway-0",reason="no-room"} 1.0' in lines
    assert 'diptych_length_within_ratio{gateway="gateway-0",prediction="p90"} 0.875' in lines
    assert "# TYPE diptych_slo_requests_total counter" in lines


# ---- the command line --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, FakeDispatcher]]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def open_server() -> tuple[GrpcServer, str, FakeDispatcher]:
        dispatcher = FakeDispatcher()
        fast = Ended("completed", "fast", ttft_s=1.0, tpot_s=0.1, ttft_slo_s=2.0, tpot_slo_s=0.05)
        dispatcher._slo_scores.ended(fast)
        dispatcher._slo_scores.ended(Ended("completed", "fast", after_placement_s=1.5, predicted_ttft_s=1.0))
        dispatcher._slo_scores.ended(Ended("refused", "[bold]", "queue-full"))
        server = GrpcServer(gateway_context(dispatcher), ByteTokenizer)
        return server, await server.open(), dispatcher

    server, address, dispatcher = asyncio.run_coroutine_threadsafe(open_server(), loop).result(10)
    yield address, dispatcher
    asyncio.run_coroutine_threadsafe(server.close(0), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_status_has_slo_attainment(served: tuple[str, FakeDispatcher]) -> None:
    shown = run("status", "--endpoint", served[0]).stdout
    row = next(line.split() for line in shown.splitlines() if " fast " in line)
    assert row == ["fast", "2", *["100.0%", "of", "1"], *["0.0%", "of", "1"], *["0.0%", "of", "1"],
                   *["+50%", "/", "+50%", "/", "+50%"]]  # fmt: skip
    assert "[bold]" in shown and "rejected: 1 queue-full" in shown
    assert "output lengths: 7 scored, 50% within the predicted p50, 88% within p90" in shown


def test_status_as_json_has_the_scores(served: tuple[str, FakeDispatcher]) -> None:
    received = json.loads(run("status", "--endpoint", served[0], "--json").stdout)["slo_attainment"]
    fast = next(score for score in received["classes"] if score["name"] == "fast")
    assert (fast["ttft"], fast["both"]) == ({"settled": 1, "kept": 1}, {"settled": 1, "kept": 0})
    assert fast["ttft_errors"] == {"p10": 0.5, "p50": 0.5, "p90": 0.5} and fast["tpot_errors"] is None
    assert received["refused"]["queue-full"] == 1 and received["lengths"]["error_tokens"] == 12.0


def test_status_and_top_show_the_queued_requests(served: tuple[str, FakeDispatcher]) -> None:
    served[1].queued = 3
    try:
        assert "gateway-0: 0 of at most 256 requests, 3 of them queued" in run("status", "--endpoint", served[0]).stdout
        received = json.loads(run("status", "--endpoint", served[0], "--json").stdout)
        assert received["gateway"]["queued"] == 3
        assert "0 of 256 in flight, 3 queued" in run("top", "--endpoint", served[0]).stdout
    finally:
        served[1].queued = 0


def test_status_prints_metrics(served: tuple[str, FakeDispatcher]) -> None:
    shown = run("status", "--endpoint", served[0], "--metrics").stdout
    assert shown.startswith("# HELP diptych_requests_total") and shown.endswith("\n")


def test_the_command_line_sends_slo_and_tenant(served: tuple[str, FakeDispatcher]) -> None:
    slos = ("--ttft", "1.5", "--tpot", "0.1", "--slo-class", "fast", "--tenant", "alice")
    result = run("generate", "hi", "--endpoint", served[0], "--max-tokens", "2", *slos, "--json")
    assert result.exit_code == 0
    asked = served[1].requests[-1]
    assert (asked.slo, asked.tenant) == (SLO(1.5, 0.1, "fast"), "alice")
    received = json.loads(result.stdout)
    assert (received["predicted_ttft_s"], received["predicted_tpot_s"]) == (0.5, None)
    report = run("generate", "hi", "--endpoint", served[0], "--max-tokens", "2", "--report")
    assert "predicted TTFT 500.0 ms" in report.stderr
    line = run("generate", "hi", "--endpoint", served[0], "--tpot", "0").stderr.strip()
    assert line.startswith("Error: slo.time_per_output_token: is 0 s; it must be above 0") and "\n" not in line
