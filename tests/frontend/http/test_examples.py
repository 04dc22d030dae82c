"""The examples as a person runs them, and a client that knows only what reflection tells; against real workers.

`ray-job.sh` is run by `tests/ray/test_jobs.py`, `helm-values.yaml` is rendered by `tests/helm`, `laptop.yaml` is the
default cluster.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from cluster.frontend.servers import Servers
from cluster.frontend.text import TextDelta
from cluster.runtime.local import LocalRuntime
from cluster.serving import serve
from diptych.client import AsyncClient, answer_of
from diptych.retry import Retry
from kvtransfer.open import SharedMemory
from tests.cluster.local import split_spec
from tests.frontend.grpc.relay import relayed
from tests.model.tiny import write_tiny_llama
from workers.build import build_worker
from workers.config import EngineConfig
from workers.model.tokenizer import ModelTokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
ENGINE = EngineConfig(block_size=8, kv_blocks=96, max_batch_tokens=64, max_running=8, threads=1)


@dataclass(frozen=True)
class Running:
    endpoint: str
    url: str


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    model = str(write_tiny_llama(tmp_path_factory.mktemp("examples") / "tiny"))
    made, shared = split_spec(), SharedMemory()
    pools = tuple(replace(pool, engine=ENGINE) for pool in made.pools)
    gateway = replace(made.gateway, grpc_port=0, http_port=0)
    spec = replace(made, model=model, executor="torch", pools=pools, gateway=gateway)
    runtime = LocalRuntime(lambda order: build_worker(order.config, heartbeat_s=order.heartbeat_s, shared=shared))
    serving = await serve(
        spec, runtime=runtime, make_server=lambda context: Servers(context, partial(ModelTokenizer, Path(model)))
    )
    try:
        async with AsyncClient(serving.endpoint) as client:
            await client.wait_ready(20.0)
        yield Running(serving.endpoint, serving.http_urls[0])
    finally:
        await serving.close()


async def printed(name: str, running: Running) -> str:
    """What the example prints when its cluster is this one."""
    source = (EXAMPLES / name).read_text()
    assert "127.0.0.1:50051" in source or "127.0.0.1:8000" in source
    source = source.replace("127.0.0.1:50051", running.endpoint).replace("http://127.0.0.1:8000", running.url)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", source, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


@pytest.mark.parametrize("name", ["client.py", "openai_client.py"])
async def test_the_example_works_on_both_servers(name: str, running: Running) -> None:
    async with AsyncClient(running.endpoint) as client:
        asked = client.chat([("user", "Why is the sea salty?")], max_tokens=64, temperature=0.0)
        expected = answer_of([event async for event in asked])
    assert await printed(name, running) == expected.text + "\n"


async def test_the_blocking_example_works(running: Running) -> None:
    async with AsyncClient(running.endpoint) as client:
        expected = await client.complete("The sea is", max_tokens=32, temperature=0.8, seed=7)
        batch = [await client.complete(text, max_tokens=8, temperature=0.0) for text in ("One, two,", "Red, green,")]
    received = await printed("blocking_client.py", running)
    assert received.startswith(expected.text + "\n")
    assert sorted(received.splitlines()[-2:]) == [f"{index} {answer.text!r}" for index, answer in enumerate(batch)]


async def test_a_client_with_reflection_alone_works(running: Running) -> None:
    """As grpcurl does."""

    def ask() -> list[dict[str, Any]]:
        with grpc.insecure_channel(running.endpoint, [("grpc.enable_http_proxy", 0)]) as channel:
            pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
            method = pool.FindServiceByName("diptych.v1.InferenceService").FindMethodByName("Generate")
            document = {"text": "The sea is", "sampling": {"maxTokens": 5, "temperature": 0}}
            request = ParseDict(document, GetMessageClass(method.input_type)(), descriptor_pool=pool)
            call = channel.unary_stream(
                f"/{method.containing_service.full_name}/{method.name}",
                request_serializer=type(request).SerializeToString,
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
            return [MessageToDict(message, descriptor_pool=pool) for message in call(request, timeout=20.0)]

    messages = await asyncio.to_thread(ask)
    async with AsyncClient(running.endpoint) as client:
        expected = await client.complete("The sea is", max_tokens=5, temperature=0.0)
    assert "accepted" in messages[0] and messages[-1]["completed"]["finishReason"] == "FINISH_REASON_LENGTH"
    assert "".join(each["delta"].get("text", "") for each in messages if "delta" in each) == expected.text


async def test_a_stream_that_is_cut_twice_equals_the_undisturbed_one(running: Running) -> None:
    """Drawn with a seed by real workers; what is asked for anew is drawn alike."""
    asked: dict[str, Any] = {"max_tokens": 96, "temperature": 1.0, "seed": 11, "ignore_eos": True, "logprobs": 0}
    async with AsyncClient(running.endpoint) as client:
        undisturbed = await client.complete("The sea is", **asked)
    heard = []
    async with (
        relayed(running.endpoint) as relay,
        AsyncClient(relay.endpoint, retry=Retry(wait_s=0.01)) as client,
    ):
        async for event in client.generate("The sea is", **asked):
            heard.append(event)
            if isinstance(event, TextDelta) and sum(isinstance(each, TextDelta) for each in heard) in (2, 9):
                relay.cut()
        assert relay.num_connections == 3
    answer = answer_of(heard)
    assert (answer.text, answer.output.tokens) == (undisturbed.text, undisturbed.output.tokens)
    assert answer.output.first_position == 0 and len(answer.output.logprobs) == 96
