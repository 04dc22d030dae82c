"""Two models in one cluster, each with its own tokenizer and template, answer as they do in clusters of their own."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio
from openai import NotFoundError

from cluster.frontend.servers import open_servers
from cluster.offline.plan.request import PlanError
from cluster.offline.plan.running import observed
from cluster.offline.profile.measure import measure
from cluster.runtime.local import LocalRuntime
from cluster.serving import serve
from cluster.spec import ClusterSpec
from diptych.errors import DiptychError
from diptych.history import Window
from diptych.view import WorkerState
from kvtransfer.open import SharedMemory
from tests.cluster.local import Cluster, split_spec
from tests.frontend.http.opened import Clients, clients
from tests.model.tiny import CHAT_TEMPLATE, write_tiny_llama
from workers.build import build_worker
from workers.config import EngineConfig
from workers.errors import ModelError
from workers.model.store import resolve
from workers.profiles.profile_errors import ProfileError
from workers.request import SLO

pytestmark = pytest.mark.asyncio(loop_scope="module")
ENGINE = EngineConfig(block_size=8, kv_blocks=96, max_batch_tokens=64, max_running=8, threads=1)
GREEDY: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0}
MESSAGES = [{"role": "user", "content": "Why is the sea salty?"}]
ASKS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "The sea is", **GREEDY, "logprobs": 1},
    "/v1/chat/completions": {"messages": MESSAGES, **GREEDY},
    "/v1/responses": {"input": "Why is the sea salty?", "max_output_tokens": 8, "temperature": 0.0},
    "/v1/messages": {"messages": MESSAGES, **GREEDY},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/tokenize": {"messages": MESSAGES},
    "/detokenize": {"tokens": [70, 75, 82]},
}
CHANGING = ("id", "created", "created_at", "completed_at")


@dataclass
class Subject:
    both: Clients
    alone: dict[str, Clients]  # by model
    runtime: LocalRuntime


def split(model: str, prefix: str = "") -> ClusterSpec:
    made = split_spec()
    pools = tuple(replace(pool, name=prefix + pool.name, model=model, engine=ENGINE) for pool in made.pools)
    gateway = replace(made.gateway, grpc_port=0, http_port=0)
    return replace(made, model=model, executor="torch", pools=pools, gateway=gateway)


@asynccontextmanager
async def served(spec: ClusterSpec) -> AsyncIterator[tuple[Clients, LocalRuntime]]:
    shared = SharedMemory()
    runtime = LocalRuntime(lambda order: build_worker(order.config, heartbeat_s=order.heartbeat_s, shared=shared))
    serving = await serve(spec, runtime=runtime, make_server=open_servers)
    try:
        async with clients(serving.http_urls[0], serving.endpoint) as there:
            await there.grpc.wait_ready(20.0)
            yield there, runtime
    finally:
        await serving.close()


def other_model(kind: str, folder: Path) -> str:
    if kind == "tiny":
        write_tiny_llama(folder, seed=1, vocab_size=300, context_length=256)
        file = folder / "tokenizer_config.json"
        template = CHAT_TEMPLATE.replace("<|im_start|>", "~~")
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
        return str(folder)
    try:
        resolve("smollm2-135m")
    except ModelError as error:
        pytest.skip(f"the SmolLM2 model cannot be had here: {error}")
    return "smollm2-135m"


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=["tiny", pytest.param("smollm2", marks=[pytest.mark.model, pytest.mark.full])],
)
async def subject(request: Any, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Subject]:
    folder = tmp_path_factory.mktemp("models")
    one = str(write_tiny_llama(folder / "tiny"))
    other = other_model(request.param, folder / "other")
    both = replace(split(one), pools=(*split(one).pools, *split(other, "other-").pools))
    async with AsyncExitStack() as stack:
        there, runtime = await stack.enter_async_context(served(both))
        alone = {model: (await stack.enter_async_context(served(split(model))))[0] for model in (one, other)}
        yield Subject(there, alone, runtime)


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def settled(subject: Subject) -> AsyncIterator[None]:
    """After each test every block is free again."""
    yield
    await Cluster([], subject.runtime, None).settle()  # type: ignore[arg-type]


def lasting(value: Any) -> Any:
    """Without what differs between two answers to one request."""
    if isinstance(value, dict):
        return {name: lasting(each) for name, each in value.items() if name not in CHANGING}
    return [lasting(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("path", ASKS)
async def test_each_answers_as_in_a_cluster_of_its_own(subject: Subject, path: str) -> None:
    received = []
    for model, alone in subject.alone.items():
        body = {"model": model, **ASKS[path]}
        here, there = [await each.http.post(path, json=body) for each in (subject.both, alone)]
        assert here.status_code == there.status_code == 200, here.text
        assert lasting(here.json()) == lasting(there.json())
        received.append(lasting(here.json()))
    assert received[0] != received[1] or path == "/detokenize", "the models differ"


async def test_a_stream_is_that_of_the_model(subject: Subject) -> None:
    for model, alone in subject.alone.items():
        ask: Any = {"model": model, "messages": MESSAGES, **GREEDY}
        whole = await alone.openai.chat.completions.create(**ask)
        chunks = [chunk async for chunk in await subject.both.openai.chat.completions.create(**ask, stream=True)]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
        assert {chunk.model for chunk in chunks} == {model}


async def test_a_large_body_goes_to_its_model(subject: Subject) -> None:
    messages = [{"role": "user", "content": "x" * 5000}]
    for model in subject.alone:
        answer = await subject.both.http.post("/tokenize", json={"model": model, "messages": messages})
        expected = await subject.alone[model].http.post("/tokenize", json={"model": model, "messages": messages})
        assert answer.json() == expected.json()


async def test_the_conversation_of_a_response_goes_on_with_another_model(subject: Subject) -> None:
    one, other = subject.alone
    ask = {"input": "hello", "max_output_tokens": 2}
    first = (await subject.both.http.post("/v1/responses", json=ask | {"model": one})).json()
    more = ask | {"model": other, "previous_response_id": first["id"]}
    second = await subject.both.http.post("/v1/responses", json=more)
    assert second.status_code == 200 and second.json()["model"] == other


async def test_grpc_routes_by_model(subject: Subject) -> None:
    for model, alone in subject.alone.items():
        for prompt in ("The sea is", "The sea is " * 500):  # the second is decoded in another process
            try:
                expected = (await alone.grpc.complete(prompt, max_tokens=4, temperature=0.0)).text
            except DiptychError as error:
                with pytest.raises(DiptychError, match="maximum context length") as refused:
                    await subject.both.grpc.complete(prompt, max_tokens=4, temperature=0.0, model=model)
                assert str(refused.value) == str(error)
            else:
                received = await subject.both.grpc.complete(prompt, max_tokens=4, temperature=0.0, model=model)
                assert received.text == expected


@pytest.mark.parametrize("path", ASKS)
async def test_an_unknown_or_missing_model_is_refused_with_the_served_ones(subject: Subject, path: str) -> None:
    for asked in ({"model": "huge"}, {}):
        answer = await subject.both.http.post(path, json=asked | ASKS[path])
        assert answer.status_code == 404
        assert all(repr(model) in answer.json()["error"]["message"] for model in subject.alone)


async def test_grpc_refuses_an_unknown_model(subject: Subject) -> None:
    for model in ("huge", ""):
        for prompt in ("hi", "hi " * 3000):
            with pytest.raises(DiptychError, match=r"several are served here|not served here"):
                await subject.both.grpc.complete(prompt, model=model)
    with pytest.raises(NotFoundError):
        await subject.both.openai.completions.create(model="huge", prompt="hi")


async def test_the_models_are_listed(subject: Subject) -> None:
    listed = (await subject.both.http.get("/v1/models")).json()["data"]
    assert [each["id"] for each in listed] == list(subject.alone)
    for each in listed:
        assert lasting(each) == lasting((await subject.alone[each["id"]].http.get("/v1/models")).json()["data"][0])
    info = await subject.both.http.get("/tokenizer_info", params={"model": listed[1]["id"]})
    assert info.json() == (await subject.alone[listed[1]["id"]].http.get("/tokenizer_info")).json()
    assert (await subject.both.http.get("/tokenizer_info")).status_code == 404


async def test_only_workers_of_one_model_are_linked(subject: Subject) -> None:
    view = (await subject.both.grpc.status()).view
    assert [model.name for model in view.models] == list(subject.alone)
    assert {pool.name: pool.model for pool in view.pools} == {
        prefix + name: model
        for prefix, model in zip(("", "other-"), subject.alone, strict=True)
        for name in ("prefill", "decode")
    }
    assert {worker.state for worker in view.workers} == {WorkerState.READY} and len(view.workers) == 4
    pairs = {(link.owner, link.reader) for link in view.links}
    assert pairs == {("prefill-0", "decode-0"), ("other-prefill-0", "other-decode-0")} and not view.unlinked


async def test_metrics_have_the_model(subject: Subject) -> None:
    text = await subject.both.grpc.metrics()
    for model, pool in zip(subject.alone, ("prefill", "other-prefill"), strict=True):
        assert f'diptych_pool_workers{{gateway="gateway-0",model="{model}",pool="{pool}"}} 1.0' in text
    assert text.count("# TYPE diptych_pool_workers gauge") == 1
    alone = await next(iter(subject.alone.values())).grpc.metrics()
    assert 'diptych_pool_workers{gateway="gateway-0",pool="prefill"} 1.0' in alone, "one model: no label"


async def test_plans_and_profiles_take_one_model(subject: Subject) -> None:
    view = (await subject.both.grpc.status()).view
    with pytest.raises(PlanError, match=r"several models .* and a plan takes one"):
        observed(view, Window(), cast(Any, None), SLO(), 0.9)  # it is refused before the profile is read
    with pytest.raises(ProfileError, match=r"several models .* and a profile takes one"):
        await measure(subject.both.grpc, lambda *told: None)


async def test_a_pool_says_which_models_prompt_is_warmed(subject: Subject) -> None:
    warmed = await subject.both.grpc.warm("The sea is salty and wide. " * 3, pool="other-prefill")
    assert [each.worker for each in warmed] == ["other-prefill-0"] and warmed[0].tokens
    with pytest.raises(DiptychError, match="does not say which model"):
        await subject.both.grpc.warm("The sea is salty and wide.")
