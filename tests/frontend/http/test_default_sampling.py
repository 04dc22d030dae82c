"""What a model's makers recommend is drawn with, by both servers, unless the request says otherwise."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.frontend.servers import Servers
from cluster.runtime.local import LocalRuntime
from cluster.serving import serve
from kvtransfer.open import SharedMemory
from tests.frontend.grpc.fake import MODEL, FakeDispatcher
from tests.frontend.http.opened import clients, opened
from tests.frontend.http.test_openai_client import spec
from tests.model.tiny import write_tiny_llama
from workers.build import build_worker
from workers.model.tokenizer import ModelTokenizer
from workers.request import SamplingParams

RECOMMENDED = {"temperature": 0.2, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1}
LEARNED = replace(MODEL, default_sampling=tuple(RECOMMENDED.items()))
CHAT = [("user", "hello")]


def drawn_with(sampling: SamplingParams) -> dict[str, float]:
    return {name: getattr(sampling, name) for name in RECOMMENDED}


async def test_both_servers_use_the_recommended_sampling_by_default(dispatcher: FakeDispatcher) -> None:
    async with opened(dispatcher, model=LEARNED) as (there, _):
        await there.grpc.complete("hello", max_tokens=1)
        _ = [event async for event in there.grpc.chat(CHAT, max_tokens=1)]
        for path, body in (
            ("/v1/completions", {"prompt": "hello"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ):
            assert (await there.http.post(path, json=body | {"max_tokens": 1})).status_code == 200
    assert [drawn_with(request.sampling) for request in dispatcher.requests] == [RECOMMENDED] * 4


async def test_request_fields_override_the_recommended_sampling(dispatcher: FakeDispatcher) -> None:
    async with opened(dispatcher, model=LEARNED) as (there, _):
        await there.grpc.complete("hello", max_tokens=1, temperature=0.0, top_k=0)
        body = {"prompt": "hello", "max_tokens": 1, "temperature": 0, "top_k": -1}
        assert (await there.http.post("/v1/completions", json=body)).status_code == 200
    said = RECOMMENDED | {"temperature": 0.0, "top_k": 0}
    assert [drawn_with(request.sampling) for request in dispatcher.requests] == [said] * 2


async def test_the_list_of_models_has_the_default_sampling(dispatcher: FakeDispatcher) -> None:
    async with opened(dispatcher, model=LEARNED) as (there, _):
        (model,) = (await there.http.get("/v1/models")).json()["data"]
    assert model["default_sampling_params"] == RECOMMENDED


@pytest.mark.parametrize("said", [{}, {"temperature": 1.5}])
async def test_generation_config_sets_the_sampling_of_real_workers(tmp_path: Path, said: dict[str, float]) -> None:
    folder = write_tiny_llama(tmp_path / "tiny")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **RECOMMENDED}))
    shared = SharedMemory()
    runtime = LocalRuntime(lambda order: build_worker(order.config, heartbeat_s=order.heartbeat_s, shared=shared))

    def server(context: object) -> Servers:
        return Servers(context, lambda: ModelTokenizer(folder))  # type: ignore[arg-type]

    serving = await serve(spec(str(folder)), runtime=runtime, make_server=server)
    try:
        async with clients(serving.http_urls[0], serving.endpoint) as there:
            await there.grpc.wait_ready(20.0)
            asked = {"max_tokens": 16, "seed": 3, "ignore_eos": True}
            left_open = await there.grpc.complete("The sea", **asked, **said)  # type: ignore[arg-type]
            spelled = await there.grpc.complete("The sea", **asked, **(RECOMMENDED | said))  # type: ignore[arg-type]
            neutral = dict.fromkeys(("temperature", "top_p", "repetition_penalty"), 1.0) | {"top_k": 0, "min_p": 0.0}
            plain = await there.grpc.complete("The sea", **asked, **neutral)  # type: ignore[arg-type]
    finally:
        await serving.close()
    assert left_open.output.tokens == spelled.output.tokens != plain.output.tokens
