"""Opening, closing, health, headers, and clients that leave: the server as such."""

import asyncio
import json
import os
import pickle
import socket
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from click.testing import CliRunner

from cluster.cli import main
from cluster.frontend import http
from cluster.frontend.http.fields import FIELDS, IGNORED
from cluster.frontend.servers import Servers, open_servers
from cluster.runtime.runtime_errors import RuntimeUnavailable
from cluster.spec import GatewaySpec, SpecError
from cluster.spec_file import parse_spec
from diptych.client import AsyncClient
from diptych.errors import DiptychError
from diptych.view import WorkerState
from tests.frontend.grpc.fake import FakeDispatcher, gateway_context, view
from tests.frontend.http.opened import Clients, opened
from tests.frontend.tokenizers import ByteTokenizer
from workers.request import SLO

ROOT = Path(__file__).resolve().parents[3]
ASK = {"prompt": "hello", "max_tokens": 4}


async def test_health_is_the_process_and_ready_follows_the_workers(there: Clients, dispatcher: FakeDispatcher) -> None:
    assert [(await there.http.get(path)).status_code for path in ("/health", "/ready")] == [200, 200]
    dispatcher.view = view(WorkerState.STARTING, revision=2)
    assert [(await there.http.get(path)).status_code for path in ("/health", "/ready")] == [200, 503]
    dispatcher.view = view(WorkerState.READY, revision=3)
    assert (await there.http.get("/ready")).json() == {"status": "ready"}


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models"])
async def test_probes_may_use_head_requests(there: Clients, path: str) -> None:
    head, whole = await there.http.head(path), await there.http.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == whole.headers["content-length"] != "0"


async def test_a_head_request_shows_that_the_server_is_not_ready(there: Clients, dispatcher: FakeDispatcher) -> None:
    dispatcher.view = view(WorkerState.STARTING, revision=2)
    assert (await there.http.head("/ready")).status_code == 503


async def test_the_version_is_returned(there: Clients) -> None:
    assert (await there.http.get("/version")).json() == {"version": version("diptych")}


async def test_models_are_listed_with_a_trailing_slash(there: Clients) -> None:
    listed, again = await there.http.get("/v1/models"), await there.http.get("/v1/models/")
    assert again.json() == listed.json() and listed.json()["object"] == "list"


async def test_streams_turn_off_proxy_buffering(there: Clients) -> None:
    headers = [
        (await there.http.post("/v1/completions", json=ASK | {"stream": stream})).headers for stream in (True, False)
    ]
    assert [each.get("x-accel-buffering") for each in headers] == ["no", None]


async def test_metrics_are_those_of_grpc(there: Clients) -> None:
    answer = await there.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=1.0.0")
    assert answer.text == await there.grpc.metrics()
    assert "diptych_requests_total" in answer.text or "# TYPE diptych_requests" in answer.text


@pytest.mark.parametrize("stream", [False, True])
async def test_headers_have_the_request_id_and_the_predictions(there: Clients, stream: bool) -> None:
    answer = await there.http.post("/v1/completions", json=ASK | {"stream": stream}, headers={"x-request-id": "mine"})
    assert answer.headers["x-request-id"] == "mine"
    assert answer.headers["x-diptych-predicted-ttft-ms"] == "500.000"
    assert "x-diptych-predicted-tpot-ms" not in answer.headers  # nothing is known
    unnamed = await there.http.post("/v1/completions", json=ASK)
    assert unnamed.json()["id"] == f"cmpl-{unnamed.headers['x-request-id']}"


async def test_headers_set_slo_tenant_session_and_deadline(there: Clients, dispatcher: FakeDispatcher) -> None:
    headers = {
        "x-diptych-slo-class": "interactive",
        "x-diptych-ttft-ms": "250",
        "x-diptych-tpot-ms": "12.5",
        "x-diptych-tenant": "alice",
        "x-diptych-session": "one",
        "x-diptych-timeout-ms": "60000",
    }
    answer = await there.http.post("/v1/completions", json=ASK, headers=headers)
    assert answer.status_code == 200
    (request,) = dispatcher.requests
    assert request.slo == SLO(0.25, 0.0125, "interactive")
    assert (request.tenant, request.session) == ("alice", "one")
    assert dispatcher.deadlines[0] is not None and 59 < dispatcher.deadlines[0] <= 60


async def test_a_stream_starts_once_workers_are_chosen(there: Clients, dispatcher: FakeDispatcher) -> None:
    dispatcher.hold = asyncio.Event()
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 3}
    async with there.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert dispatcher.running and not dispatcher.produced
        dispatcher.hold.set()
        lines = [line async for line in answer.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    first = json.loads(lines[0].removeprefix("data: "))["choices"][0]
    assert first["delta"] == {"role": "assistant", "content": "a"} and first["finish_reason"] is None


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_the_end_of_each_answer_is_sent_when_it_ends(
    there: Clients, dispatcher: FakeDispatcher, path: str
) -> None:
    dispatcher.script = lambda request: b"x" * (3 if request.id.endswith("#1") else 40)
    dispatcher.step_s = 0.01
    prompt = ASK if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    answer = await there.http.post(path, json=prompt | {"max_tokens": 40, "n": 2, "stream": True})
    pieces = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    message = [(choice["index"], choice["finish_reason"]) for piece in pieces for choice in piece["choices"]]
    assert [index for index, finish in message if finish] == [1, 0]
    assert (0, None) in message[message.index((1, "length")) :], "the other went on"
    for index in (0, 1):
        assert [finish for place, finish in message if place == index][-1] == "length", "nothing follows"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_ignored_fields_pass_and_are_documented(there: Clients, path: str) -> None:
    prompt = {"prompt": "hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    answer = await there.http.post(path, json=prompt | {"max_tokens": 4} | {name: {"a": 1} for name in IGNORED})
    assert answer.status_code == 200, answer.text
    page = (ROOT / "docs" / "http.md").read_text()
    assert all(f"`{name}`" in page for name in IGNORED)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
async def test_unsupported_fields_with_default_values_pass(there: Clients, path: str) -> None:
    off = dict.fromkeys(FIELDS, None) | {
        "echo": False,
        "suffix": "",
        "guided_choice": [],
        "chat_template_kwargs": {},
        "function_call": "none",
        "add_generation_prompt": True,
        "add_special_tokens": None,
    }
    body = ASK if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    assert (await there.http.post(path, json=body | off)).status_code == 200


async def test_tokens_are_counted_with_the_tools(there: Clients, dispatcher: FakeDispatcher) -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": tools}
    counted = (await there.http.post("/tokenize", json=body)).json()["tokens"]
    _ = [event async for event in there.grpc.chat([("user", "hi")], tools=tools, max_tokens=1)]
    assert tuple(counted) == dispatcher.requests[0].prompt
    without = (await there.http.post("/tokenize", json=body | {"tool_choice": "none"})).json()["tokens"]
    assert len(without) < len(counted)


async def test_special_tokens_can_be_left_out() -> None:
    class Begins(ByteTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
            return (0,) * add_special_tokens + super().encode(text)

    dispatcher = FakeDispatcher()
    async with opened(dispatcher, Begins) as (there, _):
        for given, first in (({}, (0, 104)), ({"add_special_tokens": False}, (104, 105))):
            message = await there.http.post("/tokenize", json={"prompt": "hi"} | given)
            assert tuple(message.json()["tokens"])[:2] == first
            for prompt in ("hi", ["hi"]):
                await there.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1} | given)
                assert dispatcher.requests[-1].prompt[:2] == first


async def test_a_message_may_be_empty_and_an_assistants_null(there: Clients, dispatcher: FakeDispatcher) -> None:
    messages = [
        {"role": "system", "content": ""},
        {"role": "user", "content": "hi", "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": None},
        {"role": "user", "content": []},
    ]
    answer = await there.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
    assert answer.status_code == 200
    assert bytes(dispatcher.requests[0].prompt) == b"<system>\n<user>hi\n<assistant>\n<user>\n"


async def test_with_tool_choice_none_the_model_sees_no_tools(there: Clients, dispatcher: FakeDispatcher) -> None:
    tool = {"type": "function", "function": {"name": "look"}}
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool], "max_tokens": 1}
    assert (await there.http.post("/v1/chat/completions", json=body | {"tool_choice": "none"})).status_code == 200
    assert bytes(dispatcher.requests[-1].prompt).startswith(b"<user>")


@pytest.mark.parametrize("prompt", ["hello", ["hello", "there"]])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_may_disconnect_while_it_waits(
    there: Clients, dispatcher: FakeDispatcher, prompt: object, stream: bool
) -> None:
    dispatcher.hold = asyncio.Event()
    body = ASK | {"prompt": prompt, "stream": stream, "n": 2}
    asking = asyncio.create_task(there.http.post("/v1/completions", json=body))
    async with asyncio.timeout(30.0):
        while len(dispatcher.running) < (2 if prompt == "hello" else 4):
            await asyncio.sleep(0.005)
        asking.cancel()
        while dispatcher.running or (await there.grpc.status()).active_requests:
            await asyncio.sleep(0.005)


async def test_the_failure_of_one_prompt_ends_all(there: Clients, dispatcher: FakeDispatcher) -> None:
    dispatcher.hold = asyncio.Event()
    answer = await there.http.post("/v1/completions", json=ASK | {"prompt": ["hello", "x" * 5000, "there"]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert not dispatcher.running and not (await there.grpc.status()).active_requests


async def test_close_lets_running_requests_finish_on_both_servers(dispatcher: FakeDispatcher) -> None:
    dispatcher.step_s = 0.02
    async with opened(dispatcher) as (there, servers):
        asking = [
            asyncio.create_task(there.http.post("/v1/completions", json=ASK | {"max_tokens": 20})),
            asyncio.create_task(there.grpc.complete("hello", max_tokens=20)),
        ]
        while len(dispatcher.running) < 2:
            await asyncio.sleep(0.005)
        await servers.close(10.0)
        by_http, by_grpc = await asyncio.gather(*asking)
        assert by_http.json()["choices"][0]["text"] == by_grpc.text  # type: ignore[attr-defined]


async def test_a_draining_server_fails_probes_and_refuses_new_requests(
    dispatcher: FakeDispatcher,
) -> None:
    dispatcher.hold = asyncio.Event()
    async with opened(dispatcher) as (there, servers):
        asking = asyncio.create_task(there.http.post("/v1/completions", json=ASK))
        while not dispatcher.running:
            await asyncio.sleep(0.005)
        closing = asyncio.create_task(servers.close(10.0))
        await asyncio.sleep(0)
        assert (await there.http.get("/ready")).status_code == 503
        assert (await there.http.get("/health")).status_code == 200
        refused = await there.http.post("/v1/completions", json=ASK)
        assert (refused.status_code, refused.headers["connection"]) == (503, "close")
        assert refused.headers["retry-after"] and "try another one" in refused.text
        dispatcher.hold.set()
        await closing
        assert (await asking).status_code == 200


async def test_an_http_stream_that_is_cut_does_not_take_the_reason_from_grpc_calls(
    dispatcher: FakeDispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slowly HTTP connections end, calls are cut with the reason before gRPC's own limit."""
    monkeypatch.setattr("cluster.frontend.http.server.CUT_S", 2.0)
    dispatcher.hold = asyncio.Event()
    async with opened(dispatcher) as (there, servers):
        by_http = asyncio.create_task(there.http.post("/v1/completions", json=ASK | {"stream": True}))
        by_grpc = asyncio.create_task(there.grpc.complete("hi", max_tokens=4))
        while len(dispatcher.running) < 2:
            await asyncio.sleep(0.005)
        await servers.close(0.1)
        assert "gateway_closed" in (await by_http).text
        with pytest.raises(DiptychError) as cut:
            await by_grpc
        assert (cut.value.code, cut.value.reason) == ("UNAVAILABLE", "GATEWAY_CLOSED")


@pytest.mark.parametrize("stream", [False, True])
async def test_close_cancels_requests_after_the_grace_period(dispatcher: FakeDispatcher, stream: bool) -> None:
    dispatcher.hold = asyncio.Event()
    async with opened(dispatcher) as (there, servers):
        asking = asyncio.create_task(there.http.post("/v1/completions", json=ASK | {"stream": stream}))
        while not dispatcher.running:
            await asyncio.sleep(0.005)
        async with asyncio.timeout(20.0):
            await servers.close(0.2)
        assert not dispatcher.running
        assert "the gateway was closed" in (await asking).text


async def test_close_does_not_wait_for_idle_or_silent_connections(dispatcher: FakeDispatcher) -> None:
    async with opened(dispatcher) as (there, servers):
        assert (await there.http.get("/health")).status_code == 200
        url = there.http.base_url
        _, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: here\r\ncontent-length: 10\r\n\r\n{")
        await asyncio.sleep(0.05)
        async with asyncio.timeout(20.0):
            await servers.close(0.1)
        writer.close()


async def test_a_port_in_use_raises_a_clear_error(dispatcher: FakeDispatcher) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        servers = Servers(gateway_context(dispatcher, http_port=port), ByteTokenizer)
        with pytest.raises(OSError, match=rf"127\.0\.0\.1:{port} \(.*\); choose another gateway\.http_port"):
            await servers.open()


async def test_without_a_port_there_is_no_http(dispatcher: FakeDispatcher) -> None:
    servers = Servers(gateway_context(dispatcher), ByteTokenizer)
    await servers.open()
    assert servers.http_url == ""
    await servers.close(0.0)


def test_a_missing_extra_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(http, "find_spec", lambda name: None)
    with pytest.raises(RuntimeUnavailable, match="pip install 'diptych\\[http\\]'"):
        Servers(gateway_context(FakeDispatcher(), http_port=0), ByteTokenizer)
    Servers(gateway_context(FakeDispatcher()), ByteTokenizer)  # nobody asked for HTTP
    result = CliRunner().invoke(main, ["serve", "--port", "0", "--http-port", "0"])
    assert result.exit_code != 0
    assert result.stderr.strip() == (
        "Error: gateway.http_port is set, but fastapi and uvicorn cannot be imported; "
        "pip install 'diptych[http]', or leave http_port out"
    )


def test_an_http_port_in_use_is_reported_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(main, ["serve", "--port", "0", "--http-port", port])
    assert result.exit_code != 0 and "choose another port with --http-port" in result.stderr


@pytest.mark.parametrize(
    ("gateway", "message"),
    [
        ({"http_port": 70000}, "http_port is 70000; it must be between 0 (any free port) and 65535"),
        ({"http_port": -1}, "http_port is -1"),
        ({"http_port": 50051}, "http_port (50051) and grpc_port (50051) are the same for a gateway"),
        ({"http_port": 50052, "replicas": 2}, "http_port (50052) and grpc_port (50051) are the same for a gateway"),
        ({"http_prot": 8000}, "unknown key; did you mean 'http_port'?"),
    ],
)
def test_an_invalid_port_is_refused(gateway: dict[str, int], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec({"model": "m", "pools": [{"name": "m", "role": "mixed"}], "gateway": gateway})
    assert message in str(caught.value)


def test_the_ports_of_a_specification() -> None:
    assert GatewaySpec().http_port is None
    spec = parse_spec({"model": "m", "pools": [{"name": "m", "role": "mixed"}], "gateway": {"http_port": 8000}})
    assert spec.gateway.http_port == 8000


async def test_the_readme_example_works(there: Clients, dispatcher: FakeDispatcher) -> None:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, str(ROOT / "examples" / "openai_client.py"), f"{str(there.http.base_url).rstrip('/')}/v1"),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"NO_PROXY": "127.0.0.1"},
    )
    async with asyncio.timeout(60):
        message, _ = await child.communicate()
    assert child.returncode == 0 and message.decode().startswith("abcdefghijklmnopqrstuvwxyzabc")
    assert dispatcher.requests[0].slo == SLO(2.0, None, "interactive")


def test_the_server_factory_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(open_servers)) is open_servers


async def test_a_grpc_client_of_the_http_server_is_told_which_address_to_give(there: Clients) -> None:
    port = there.http.base_url.port
    for endpoint, advice in (
        (f"127.0.0.1:{port}", "speaks HTTP; give the port of gRPC"),
        (f"http://127.0.0.1:{port}", "is no address of gRPC; write HOST:PORT"),
    ):
        with pytest.raises(DiptychError, match=advice):
            async with AsyncClient(endpoint) as client:
                await client.complete("hello")
