"""Spans of requests as a collector gets them from a served cluster: they are the ledger, in the caller's trace."""

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import grpc
import pytest
import yaml

from cluster.observe.ledger import PHASES
from diptych.client import AsyncClient, Client
from diptych.errors import DiptychError
from tests.model.tiny import write_tiny_llama
from tests.observe.spans.collector import Collected, Collector, over_grpc

START_S = 60.0
SERVER, INTERNAL, ERROR = 2, 1, 2
ENGINE = {"block_size": 8, "kv_blocks": 96, "max_batch_tokens": 64, "max_running": 8, "threads": 1}
SOON = {"OTEL_BSP_SCHEDULE_DELAY": "100"}  # rather than after five seconds


@dataclass
class Served:
    endpoint: str
    url: str
    collector: Collector


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`diptych serve` as a process, whose gateway sends its spans here."""
    folder = tmp_path_factory.mktemp("spans")
    with over_grpc() as collector:
        document = {
            "name": "traced",
            "model": str(write_tiny_llama(folder / "tiny")),
            "pools": [{"name": role, "role": role, "engine": ENGINE} for role in ("prefill", "decode")],
            "gateway": {"http_port": 0, "routing": "least-loaded", "slo": {"ttft_s": 30.0, "tpot_s": 10.0}},
            "transfer": {"backends": ["tcp"]},
            "tracing": {"otlp_endpoint": collector.endpoint},
        }
        (folder / "cluster.yaml").write_text(yaml.safe_dump(document))
        command = [sys.executable, "-m", "cluster.cli", "serve", "-f", str(folder / "cluster.yaml"), "--port", "0"]
        named = {"OTEL_SERVICE_NAME": "tests", "OTEL_EXPORTER_OTLP_HEADERS": "x-team=spans"}
        log = folder / "log"
        with log.open("w") as errors:
            process = subprocess.Popen(
                [*command, "--runtime", "local"],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | SOON | named | {"PYTHONUNBUFFERED": "1"},
            )
        try:
            assert process.stdout is not None
            overdue = threading.Timer(START_S, process.kill)
            overdue.start()
            ready: dict[str, str] = {}
            for line in process.stdout:
                if line.startswith("ready: "):
                    address = line.split()[1]
                    ready[address.partition(":")[0]] = address
                if len(ready) == 2:
                    break
            overdue.cancel()
            assert len(ready) == 2, log.read_text()
            yield Served(ready["grpc"], ready["http"], collector)
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(START_S) == 0, log.read_text()


class Passing(grpc.aio.UnaryStreamClientInterceptor):
    """As OpenTelemetry's own does: every call carries the trace of whoever calls."""

    def __init__(self, parent: str) -> None:
        self._parent = parent

    async def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        metadata = grpc.aio.Metadata(*(details.metadata or ()), ("traceparent", self._parent))
        return await continuation(details._replace(metadata=metadata), request)


def parent_of(trace: str, sampled: bool = True) -> tuple[str, str]:
    """A `traceparent` and the span that it names."""
    span = secrets.token_hex(8)
    return f"00-{trace}-{span}-{'01' if sampled else '00'}", span


def post(url: str, body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
    asked = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"} | headers)
    with urllib.request.urlopen(asked, timeout=START_S) as answer:
        received: dict[str, Any] = json.load(answer)
        return received


def of_parts(children: Sequence[Collected]) -> list[Collected]:
    return [each for each in children if each.name != "transfer"]


def test_a_request_span_has_the_ledger_as_children(served: Served) -> None:
    with Client(served.endpoint) as client:
        answer = client.complete("the sea is", max_tokens=12, ignore_eos=True, request_id="whole", temperature=0.5)
    span = served.collector.request("whole")
    assert (span.name, span.kind, span.parent, span.code) == ("llm_request", SERVER, "", 0)
    ledger, completed = answer.completed.ledger, answer.completed
    assert span.end_ns - span.begin_ns == ledger.total_ns
    parts = of_parts(served.collector.children(span))
    books = {name: ns for name, ns in ledger.first if ns >= 1000}
    assert {each.name for each in parts} == {name for name, ns in ledger.first + ledger.rest if ns >= 1000}
    assert all(each.kind == INTERNAL and each.name in PHASES for each in parts)
    first = [each for each in parts if each.end_ns <= span.begin_ns + ledger.ttft_ns]
    assert {each.name: each.end_ns - each.begin_ns for each in first} == books
    assert all(one.end_ns <= other.begin_ns for one, other in pairwise(parts))
    places = {each.name: each.attributes.get("diptych.worker") for each in parts}
    assert places["prefill_compute"] == "prefill-0" and places["decode_compute"] == "decode-0"
    assert places["route"] is None
    received = span.attributes
    assert received["gen_ai.usage.prompt_tokens"] == received["gen_ai.usage.input_tokens"] == completed.prompt_tokens
    assert received["gen_ai.usage.completion_tokens"] == received["gen_ai.usage.output_tokens"] == 12
    assert received["gen_ai.latency.time_to_first_token"] == ledger.ttft_ns / 1e9
    assert received["gen_ai.latency.e2e"] == ledger.total_ns / 1e9
    assert received["gen_ai.response.finish_reasons"] == ["length"] and received["gen_ai.request.temperature"] == 0.5
    assert received["diptych.outcome"] == "completed" and received["diptych.transfer_bytes"] > 0
    within = received["gen_ai.latency.time_in_queue"] + received["gen_ai.latency.time_in_model_inference"]
    assert within == pytest.approx(received["gen_ai.latency.e2e"])
    assert span.resource["service.name"] == "tests" and span.resource["service.instance.id"] == "gateway-0"
    assert span.resource["diptych.cluster"] == "traced" and span.headers["x-team"] == "spans"
    text = str(span)
    assert "the sea is" not in text and answer.text not in text


def test_the_kv_transfer_is_a_span_of_the_decode_worker(served: Served) -> None:
    with Client(served.endpoint) as client:
        answer = client.complete("one two three four five six", max_tokens=4, ignore_eos=True, request_id="moved")
    [report] = answer.completed.transfers
    span = served.collector.request("moved")
    [transfer] = [each for each in served.collector.children(span) if each.name == "transfer"]
    assert transfer.attributes == {"diptych.worker": "decode-0"}
    assert transfer.end_ns - transfer.begin_ns <= round(report.elapsed_s * 1e9)


async def test_over_grpc_the_span_belongs_to_the_callers_trace(served: Served) -> None:
    trace = secrets.token_hex(16)
    parent, above = parent_of(trace)
    async with AsyncClient(served.endpoint, interceptors=[Passing(parent)]) as client:
        await client.complete("the sea", max_tokens=4, request_id="called")
    span = await asyncio.to_thread(served.collector.request, "called")
    assert (span.trace, span.parent) == (trace, above)


def test_a_blocking_client_propagates_a_trace(served: Served) -> None:
    trace = secrets.token_hex(16)
    parent, above = parent_of(trace)
    with Client(served.endpoint, interceptors=[Passing(parent)]) as client:
        client.complete("the sea", max_tokens=4, request_id="waited")
    span = served.collector.request("waited")
    assert (span.trace, span.parent) == (trace, above)


@pytest.mark.parametrize("stream", [False, True])
def test_over_http_the_span_belongs_to_the_callers_trace(served: Served, stream: bool) -> None:
    trace = secrets.token_hex(16)
    parent, above = parent_of(trace)
    body = {"prompt": ["the sea", "the land"], "max_tokens": 4, "stream": stream}
    headers = {"content-type": "application/json", "traceparent": parent}
    asked = urllib.request.Request(f"{served.url}/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked, timeout=START_S) as answer:
        answer.read()
    spans = served.collector.wait(lambda each: each.trace == trace and each.name == "llm_request", 2)
    assert [each.parent for each in spans] == [above, above]


def test_parallel_answers_are_spans_of_one_trace(served: Served) -> None:
    trace = secrets.token_hex(16)
    parent, above = parent_of(trace)
    post(f"{served.url}/completions", {"prompt": "the sea", "max_tokens": 4, "n": 3}, {"traceparent": parent})
    spans = served.collector.wait(lambda each: each.trace == trace and each.name == "llm_request", 3)
    assert {each.parent for each in spans} == {above}
    ids = {each.attributes["gen_ai.request.id"].partition("#")[2] for each in spans}
    assert ids == {"0", "1", "2"}


def test_a_caller_without_sampling_has_no_spans(served: Served) -> None:
    quiet, _ = parent_of(secrets.token_hex(16), sampled=False)
    post(f"{served.url}/completions", {"prompt": "the sea", "max_tokens": 2}, {"traceparent": quiet})
    loud, _ = parent_of(secrets.token_hex(16))
    post(f"{served.url}/completions", {"prompt": "the sea", "max_tokens": 2}, {"traceparent": loud})
    served.collector.wait(lambda each: each.trace == loud.split("-")[1])  # spans come in the order of their ends
    assert not served.collector.among(lambda each: each.trace == quiet.split("-")[1])


@pytest.mark.parametrize("header", ["nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "x" * 5000])
def test_an_invalid_trace_header_starts_a_new_trace(served: Served, header: str) -> None:
    name = f"odd-{len(header)}"
    post(
        f"{served.url}/completions",
        {"prompt": "the sea", "max_tokens": 2},
        {"traceparent": header, "x-request-id": name},
    )
    [span] = served.collector.wait(lambda each: each.attributes.get("gen_ai.request.id", "").startswith(name))
    assert span.parent == "" and int(span.trace, 16)


def test_a_request_that_fails_is_a_span_with_an_error(served: Served) -> None:
    with Client(served.endpoint) as client:
        for timeout_s in (
            0.02,
            0.05,
            0.1,
            0.2,
            0.4,
            0.8,
        ):  # too soon to begin ... too late to fail
            with suppress(DiptychError):
                late = f"late-{timeout_s}"
                client.complete("the sea", max_tokens=400, ignore_eos=True, request_id=late, timeout_s=timeout_s)
    failed = "deadline", "failed"
    span = served.collector.wait(lambda each: each.attributes.get("diptych.outcome") in failed)[0]
    assert span.attributes["gen_ai.request.id"].startswith("late-")
    assert span.code == ERROR and span.attributes["error.type"] == span.attributes["diptych.outcome"]


async def test_a_request_that_its_client_cancels_is_no_error(served: Served) -> None:
    async with AsyncClient(served.endpoint) as client:
        stream = client.generate("the sea", max_tokens=90, ignore_eos=True, request_id="left")
        async for _ in stream:
            break
        await stream.aclose()
    span = await asyncio.to_thread(served.collector.request, "left")
    assert span.parent == "", "the trace of a call before stuck to the connection's tasks"
    assert span.attributes["diptych.outcome"] == "cancelled" and span.code == 0 and "error.type" not in span.attributes
