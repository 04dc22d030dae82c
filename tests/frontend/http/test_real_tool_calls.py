"""Tool calls of real workers with SmolLM2 and Hermes' format: a required call is one, streamed or not, and its result
goes back. The model is too small to choose well; what it writes is enforced.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
import pytest_asyncio

from benchmarks.clients.__main__ import TEMPLATE
from benchmarks.clients.snippets import placed, snippets
from cluster.frontend.servers import Servers, load_tokenizer
from cluster.runtime.local import LocalRuntime
from cluster.serving import serve
from cluster.spec import ClusterSpec, GatewaySpec, PoolSpec, Role
from kvtransfer.open import SharedMemory
from tests.frontend.http.opened import Clients, clients
from workers.build import build_worker
from workers.config import EngineConfig
from workers.errors import ModelError
from workers.model.store import resolve

pytestmark = [pytest.mark.model, pytest.mark.full, pytest.mark.asyncio(loop_scope="module")]
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Weather of a city", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
QUESTION: Any = {"role": "user", "content": "What is the weather in Paris?"}
ENGINE = EngineConfig(block_size=16, kv_blocks=128, max_batch_tokens=256, max_running=4, threads=1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def there(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Clients, str, str]]:
    try:
        model = resolve("smollm2-135m").path
    except ModelError as error:
        pytest.skip(f"the SmolLM2 model cannot be had here: {error}")
    folder = tmp_path_factory.mktemp("tools") / "smollm2"
    folder.mkdir()
    for each in model.iterdir():
        if each.name != "chat_template.jinja":
            (folder / each.name).symlink_to(each)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    pools = tuple(PoolSpec(role.value, role, engine=ENGINE) for role in (Role.PREFILL, Role.DECODE))
    spec = ClusterSpec(str(folder), pools, gateway=GatewaySpec(grpc_port=0, http_port=0))
    shared = SharedMemory()
    runtime = LocalRuntime(lambda order: build_worker(order.config, heartbeat_s=order.heartbeat_s, shared=shared))
    serving = await serve(
        spec, runtime=runtime, make_server=lambda context: Servers(context, partial(load_tokenizer, str(folder), 2048))
    )
    try:
        async with clients(serving.http_urls[0], serving.endpoint) as found:
            await found.grpc.wait_ready(60.0)
            yield found, str(folder), serving.endpoint
    finally:
        await serving.close()


async def answer(
    there: tuple[Clients, str, str], stream: bool, **fields: Any
) -> tuple[list[tuple[str, str]], str | None]:
    """The calls, and why it ended."""
    found, model, _ = there
    ask = {"model": model, "messages": [QUESTION], "tools": TOOLS, "temperature": 0.0, "max_tokens": 80} | fields
    if not stream:
        (choice,) = (await found.openai.chat.completions.create(**ask)).choices
        calls = choice.message.tool_calls or ()
        assert choice.message.content is None
        return [(each.function.name, each.function.arguments) for each in calls], choice.finish_reason
    calls, reason = [], None
    async for chunk in await found.openai.chat.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            assert not choice.delta.content
            for each in choice.delta.tool_calls or ():
                if each.function.name:
                    calls.append((each.function.name, ""))
                calls[-1] = (calls[-1][0], calls[-1][1] + (each.function.arguments or ""))
            reason = reason or choice.finish_reason
    return calls, reason


@pytest.mark.parametrize("name", ["weather", "now"])
async def test_a_named_tool_is_called_once_with_arguments_of_its_schema(
    there: tuple[Clients, str, str], name: str
) -> None:
    named = {"type": "function", "function": {"name": name}}
    calls, reason = await answer(there, False, tool_choice=named)
    assert [each for each, _ in calls] == [name] and reason == "tool_calls"
    arguments = json.loads(calls[0][1])
    assert set(arguments) == ({"city", "unit"} if name == "weather" else set())
    assert await answer(there, True, tool_choice=named) == (calls, reason)


async def test_required_calls_are_calls_streamed_or_not(there: tuple[Clients, str, str]) -> None:
    calls, reason = await answer(there, False, tool_choice="required", parallel_tool_calls=False)
    assert reason == "tool_calls" and len(calls) == 1 and calls[0][0] in ("weather", "now")
    assert await answer(there, True, tool_choice="required", parallel_tool_calls=False) == (calls, reason)


SUNNY: Any = {"type": "object", "properties": {"sunny": {"type": "boolean"}}, "required": ["sunny"]}
SUNNY["additionalProperties"] = False


@pytest.mark.parametrize(("is_strict", "is_call"), [(False, False), (False, True), (True, False)])
async def test_the_model_decides_whether_it_calls_and_both_are_enforced(
    there: tuple[Clients, str, str], is_strict: bool, is_call: bool
) -> None:
    """What an answer begins with is what a bias favors."""
    found, model, _ = there
    begin = await found.http.post("/tokenize", json={"model": model, "prompt": "<" if is_call else "{"})
    function = TOOLS[0]["function"] | {"strict": is_strict}
    wanted = {"type": "json_schema", "json_schema": {"name": "sunny", "schema": SUNNY}}
    ask = {
        "model": model,
        "messages": [QUESTION],
        "tools": [{"type": "function", "function": function}],
        "logit_bias": {str(begin.json()["tokens"][0]): 30},
        "temperature": 0.0,
        "max_tokens": 80,
    }
    asked = await found.http.post("/v1/chat/completions", json=ask | ({} if is_strict else {"response_format": wanted}))
    (choice,) = asked.json()["choices"]
    message = choice["message"]
    if is_call:
        assert set(json.loads(message["tool_calls"][0]["function"]["arguments"])) == {"city", "unit"}, choice
    elif is_strict:
        assert message["content"] and "tool_calls" not in message
    else:
        assert choice["finish_reason"] == "stop" and set(json.loads(message["content"])) == {"sunny"}


async def test_a_result_goes_back_to_the_model(there: tuple[Clients, str, str]) -> None:
    found, model, _ = there
    named: Any = {"type": "function", "function": {"name": "weather"}}
    first = await found.openai.chat.completions.create(
        model=model,
        messages=[QUESTION],
        tools=TOOLS,
        tool_choice=named,
        temperature=0.0,
        max_tokens=80,
    )
    message = first.choices[0].message
    assert message.tool_calls
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "22 C, sunny"}
    history: Any = [QUESTION, message.model_dump(exclude_none=True), result]
    last = await found.openai.chat.completions.create(
        model=model,
        messages=history,
        tools=TOOLS,
        temperature=0.0,
        max_tokens=24,
    )
    assert last.choices[0].message.content or last.choices[0].message.tool_calls
    counted = [
        (await found.http.post("/tokenize", json={"messages": each, "tools": TOOLS})).json()["count"]
        for each in (history, history[:1])
    ]
    assert last.usage is not None and last.usage.prompt_tokens == counted[0] > counted[1] + 20


SHOWN = {**snippets("client.md"), **{name: snippets("http.md")[name] for name in ("openai", "anthropic")}}


@pytest.mark.parametrize("library", SHOWN)
async def test_a_snippet_of_the_docs_runs(there: tuple[Clients, str, str], library: str) -> None:
    """`make clients` runs those of libraries that are not here."""
    found, model, endpoint = there
    source = placed(SHOWN[library], str(found.http.base_url), model, endpoint)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", source, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    assert process.returncode == 0 and out, err.decode()
