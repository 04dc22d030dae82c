"""Collectors that speak HTTP, sample, are away or hang; and migrations and ends that a served cluster rarely has."""

import asyncio
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from cluster.observe.ledger import LatencyLedger, now_ns
from cluster.observe.otlp import Spans
from cluster.observe.trace_context import set_trace_headers, trace_headers
from cluster.serving import GatewayService
from cluster.spec import SpecError
from cluster.spec_file import parse_spec
from diptych.history import RequestTrace
from diptych.view import ModelView
from tests.observe.spans.collector import Collector, over_grpc, over_http
from workers.request import FinishReason, Request, SamplingParams

MS = 1_000_000
ROOMY = {"name": "mixed", "role": "mixed"}
WAYS = [("grpc", over_grpc), ("http/protobuf", over_http)]


def spans_to(endpoint: str, **tracing: Any) -> Spans:
    document = {"model": "tiny", "pools": [ROOMY], "tracing": {"otlp_endpoint": endpoint} | tracing}
    return Spans(parse_spec(document), "gateway-7")


def trail(request_id: str = "one", **changed: Any) -> RequestTrace:
    parts = (("admission", 1 * MS), ("route", 2 * MS), ("prefill_compute", 10 * MS))
    ledger = LatencyLedger(parts, (("decode_compute", 40 * MS),), 13 * MS, 53 * MS)
    arrived_ns = now_ns() - 60 * MS
    names: dict[str, Any] = {"prefill_worker": "prefill-0", "decode_worker": "decode-0"}
    counts: dict[str, Any] = {"prompt_tokens": 3, "cached_tokens": 0, "output_tokens": 5, "attempts": 1}
    made = RequestTrace(request_id, "default", "completed", "", arrived_ns, ledger, "", 0, **counts, **names)
    return replace(made, **changed)


def request(request_id: str = "one") -> Request:
    return Request(request_id, (1, 2, 3), SamplingParams(max_tokens=5))


@pytest.mark.parametrize(("protocol", "collecting"), WAYS)
async def test_spans_arrive_by_both_protocols_and_the_rest_on_close(
    protocol: str, collecting: Callable[[], Any]
) -> None:
    with collecting() as collector:
        spans = spans_to(collector.endpoint, otlp_protocol=protocol)
        spans.send(trail(), request(), FinishReason.LENGTH)
        await spans.close()  # long before the library would send by itself
        span = collector.request("one")
    assert span.end_ns - span.begin_ns == 53 * MS
    names = [(each.name, each.attributes.get("diptych.worker")) for each in collector.children(span)]
    expected = [("admission", None), ("route", None), ("prefill_compute", "prefill-0"), ("decode_compute", "decode-0")]
    assert names == expected


async def test_a_decode_that_moved_is_cut_where_it_did() -> None:
    with over_grpc() as collector:
        spans = spans_to(collector.endpoint)
        made = trail()
        at_ns = made.arrived_ns + 30 * MS
        spans.send(replace(made, moves=((at_ns, "decode-1"),)), request(), FinishReason.LENGTH)
        await spans.close()
        span = collector.request("one")
    decodes = [each for each in collector.children(span) if each.name == "decode_compute"]
    assert [each.attributes["diptych.worker"] for each in decodes] == ["decode-0", "decode-1"]
    assert decodes[0].end_ns == decodes[1].begin_ns == span.events[0][1]
    assert span.events[0][0] == "move" and span.events[0][2] == {"diptych.worker": "decode-1"}


@pytest.mark.parametrize("outcome", ["refused", "failed", "deadline", "invalid"])
async def test_an_error_span_has_the_message(outcome: str) -> None:
    with over_grpc() as collector:
        spans = spans_to(collector.endpoint)
        nothing = LatencyLedger((), (), 0, 0)
        lost = trail(outcome=outcome, detail="no room", ledger=nothing, phase="route", open_ns=5 * MS, output_tokens=0)
        spans.send(lost, request(), None)
        await spans.close()
        span = collector.request("one")
    assert (span.code, span.status, span.attributes["error.type"]) == (2, "no room", outcome)
    assert "gen_ai.latency.time_to_first_token" not in span.attributes
    [open_part] = collector.children(span)
    assert open_part.name.startswith("route") and open_part.end_ns - open_part.begin_ns == 5 * MS


async def sampled(collector: Collector, ratio: float, parent: str) -> int:
    """How many of 200 requests have a span."""
    spans = spans_to(collector.endpoint, sample_ratio=ratio)
    set_trace_headers([("traceparent", parent)] if parent else [])
    for index in range(200):
        spans.send(trail(f"{ratio}-{index}"), request(), None)
    await spans.close()
    return len(collector.among(lambda each: each.attributes.get("gen_ai.request.id", "").startswith(f"{ratio}-")))


async def test_a_share_is_sampled_and_callers_override_it() -> None:
    with over_grpc() as collector:
        assert await sampled(collector, 0.0, "") == 0
        assert 60 < await sampled(collector, 0.5, "") < 140  # 1 of 10^8 runs has less or more
        assert await sampled(collector, 1.0, "") == 200
    with over_grpc() as collector:
        assert await sampled(collector, 0.0, f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01") == 200


async def test_an_unreachable_collector_delays_no_request_and_memory_is_bounded() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        spans = spans_to(f"http://127.0.0.1:{nobody.getsockname()[1]}")
        for index in range(3000):
            spans.send(trail(str(index)), request(), None)
        async with asyncio.timeout(30):
            await spans.close()


@pytest.mark.full
async def test_a_hanging_collector_does_not_delay_the_close() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        each_way = [spans_to(endpoint, otlp_protocol=protocol) for protocol, _ in WAYS]
        for spans in each_way:
            spans.send(trail(), request(), None)
        async with asyncio.timeout(30):
            await asyncio.gather(*(spans.close() for spans in each_way))


async def test_a_failure_to_write_spans_ends_no_request(caplog: pytest.LogCaptureFixture) -> None:
    with over_grpc() as collector:
        spans = spans_to(collector.endpoint)
        spans.send(trail(moves=(("never", "decode-1"),)), request(), None)
        spans.send(trail("two"), request("two"), None)
        await spans.close()
        assert collector.request("two")
    assert "could not send spans of this request" in caplog.text


async def test_a_gateway_that_cannot_open_stops_its_span_sender() -> None:
    def no_door(context: Any) -> Any:
        raise SpecError("the certificate is gone")

    with over_grpc() as collector:
        document = {"model": "tiny", "pools": [ROOMY], "tracing": {"otlp_endpoint": collector.endpoint}}
        service = GatewayService("gateway-7", parse_spec(document), cast(Any, None), no_door)
        for _ in range(3):  # as whoever serves tries again
            with pytest.raises(SpecError):
                await service.open([ModelView("tiny", 64, 256)], 0)
        senders = [each.name for each in threading.enumerate() if "Otel" in each.name]
        assert not senders


async def test_trace_headers_belong_to_the_requests_task() -> None:
    async def serve(parent: str) -> str:
        set_trace_headers([("traceparent", parent), ("cookie", "secret")])
        await asyncio.sleep(0)
        return await asyncio.create_task(inner())

    async def inner() -> str:
        assert set(trace_headers()) == {"traceparent"}
        return trace_headers()["traceparent"]

    assert await asyncio.gather(serve("a"), serve("b")) == ["a", "b"]
    assert await asyncio.create_task(asyncio.sleep(0, trace_headers())) == {}


@pytest.mark.parametrize(
    ("tracing", "words"),
    [
        ({"otlp_endpoint": "collector:4317"}, "tracing: otlp_endpoint 'collector:4317' is no address of a collector"),
        ({"otlp_endpoint": "grpc://collector:4317"}, "write http://HOST:PORT, or https:// for TLS"),
        ({"otlp_protocol": "thrift"}, "otlp_protocol 'thrift' is not one of grpc, http/protobuf"),
        ({"sample_ratio": 1.5}, "sample_ratio is 1.5; it must lie between 0 and 1"),
        ({"otlp": "http://collector:4317"}, "tracing.otlp: unknown key; known keys here: otlp_endpoint"),
    ],
)
def test_an_invalid_setting_is_one_line(tracing: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse_spec({"model": "tiny", "pools": [ROOMY], "tracing": tracing})
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_opentelemetry_is_imported_only_if_spans_are_sent() -> None:
    program = (
        "import sys, cluster.serving, cluster.frontend.grpc.server;"
        "print([m for m in sys.modules if 'opentelemetry' in m])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.strip() == "[]"
