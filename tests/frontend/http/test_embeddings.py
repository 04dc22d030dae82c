"""Embeddings of real workers are those of transformers, split or not, however prompts are cut; the SDK reads them."""

import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from numpy.typing import NDArray
from openai import BadRequestError
from tokenizers import Tokenizer
from transformers import AutoModel

from cluster.frontend.servers import open_servers
from cluster.runtime.local import LocalRuntime
from cluster.serving import serve
from cluster.spec import ClusterSpec
from kvtransfer.open import SharedMemory
from tests.cluster.local import Cluster, mixed_spec, split_spec
from tests.frontend.grpc.fake import FakeDispatcher
from tests.frontend.http.opened import Clients, clients, opened
from tests.model.families import write_family
from tests.model.tiny import write_tiny_llama
from workers.build import build_worker
from workers.config import EngineConfig
from workers.errors import ModelError
from workers.model.store import resolve

pytestmark = pytest.mark.asyncio(loop_scope="module")
ENGINE = EngineConfig(block_size=8, kv_blocks=160, max_batch_tokens=32, max_running=8, threads=1)
PROMPTS = ["The sea", "x", "A prompt that needs several steps. " * 8, "The sea"]
QWEN3: dict[str, Any] = {"name": "qwen 3", "max_position_embeddings": 512, "hidden_size": 32}
KINDS: dict[str, tuple[ClusterSpec, str, Callable[[Path], Path]]] = {
    "mean, split": (split_spec(), "mean", write_tiny_llama),
    "last, split": (split_spec(), "last", write_tiny_llama),
    "mean, one worker": (mixed_spec(), "mean", write_tiny_llama),
    "last, one worker": (mixed_spec(), "last", write_tiny_llama),
    "last, qwen 3, split": (split_spec(), "last", partial(write_family, **QWEN3)),  # as Qwen3-Embedding
}


@dataclass
class Subject:
    there: Clients
    runtime: LocalRuntime
    folder: Path
    pooling: str

    def expected(self, text: str) -> NDArray[np.float32]:
        """By transformers, in float32."""
        model = AutoModel.from_pretrained(self.folder, dtype=torch.float32)
        with torch.inference_mode():
            states = model(torch.tensor([self.ids(text)])).last_hidden_state[0]
        pooled = states.mean(dim=0) if self.pooling == "mean" else states[-1]
        found: NDArray[np.float32] = (pooled / pooled.norm()).numpy()
        return found

    def ids(self, text: str) -> list[int]:
        found: list[int] = Tokenizer.from_file(str(self.folder / "tokenizer.json")).encode(text).ids
        return found


def spec(made: ClusterSpec, model: str, pooling: str) -> ClusterSpec:
    pools = tuple(replace(each, engine=ENGINE) for each in made.pools)
    gateway = replace(made.gateway, grpc_port=0, http_port=0, pooling=pooling)
    return replace(made, model=model, executor="torch", pools=pools, gateway=gateway)


@asynccontextmanager
async def served(made: ClusterSpec, folder: Path, pooling: str) -> AsyncIterator[Subject]:
    shared = SharedMemory()
    runtime = LocalRuntime(lambda order: build_worker(order.config, heartbeat_s=order.heartbeat_s, shared=shared))
    serving = await serve(spec(made, str(folder), pooling), runtime=runtime, make_server=open_servers)
    try:
        async with clients(serving.http_urls[0], serving.endpoint) as there:
            await there.grpc.wait_ready(20.0)
            yield Subject(there, runtime, folder, pooling)
    finally:
        await serving.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def subject(request: Any, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Subject]:
    made, pooling, write = KINDS[request.param]
    folder = write(tmp_path_factory.mktemp("embeddings") / "tiny")
    async with served(made, folder, pooling) as found:
        yield found


async def embedded(subject: Subject, given: Any, **more: Any) -> list[list[float]]:
    found = await subject.there.openai.embeddings.create(model=str(subject.folder), input=given, **more)
    assert [each.index for each in found.data] == list(range(len(found.data)))
    return [each.embedding for each in found.data]


async def test_embeddings_are_those_of_transformers(subject: Subject) -> None:
    decodes = [each.engine for name, each in subject.runtime.workers.items() if name.startswith("decode")]
    before = [each.stats().steps for each in decodes]
    for _ in range(2):  # the second time most of it is cached
        found = await embedded(subject, PROMPTS)  # the SDK asks for base64
        for text, vector in zip(PROMPTS, found, strict=True):
            np.testing.assert_allclose(vector, subject.expected(text), atol=1e-5)
    assert [each.stats().steps for each in decodes] == before, "embeddings need no decode worker"
    await Cluster([], subject.runtime, None).settle()  # type: ignore[arg-type]


@pytest.mark.model
@pytest.mark.full
@pytest.mark.parametrize("pooling", ["mean", "last"])
async def test_embeddings_of_a_real_model_are_those_of_transformers(pooling: str) -> None:
    try:
        folder = resolve("smollm2-135m").path
    except ModelError as error:
        pytest.skip(f"the SmolLM2 model cannot be had here: {error}")
    async with served(split_spec(), folder, pooling) as subject:
        for text, vector in zip(PROMPTS, await embedded(subject, PROMPTS), strict=True):
            np.testing.assert_allclose(vector, subject.expected(text), atol=1e-5)


async def test_formats_and_token_ids_are_equal(subject: Subject) -> None:
    ((by_text,), (by_ids,), (as_floats,)) = [
        await embedded(subject, PROMPTS[0]),
        await embedded(subject, subject.ids(PROMPTS[0])),
        await embedded(subject, PROMPTS[0], encoding_format="float"),
    ]
    assert by_text == by_ids and np.allclose(by_text, as_floats, atol=1e-7)
    answer = await subject.there.http.post("/v1/embeddings", json={"input": "The sea", "encoding_format": "base64"})
    raw = base64.b64decode(answer.json()["data"][0]["embedding"])
    assert np.allclose(np.frombuffer(raw, "<f4"), by_text, atol=1e-7)
    assert answer.json()["usage"] == {"prompt_tokens": 7, "total_tokens": 7}


async def test_fewer_dimensions_are_the_first_ones(subject: Subject) -> None:
    (whole,), (cut,) = await embedded(subject, "The sea"), await embedded(subject, "The sea", dimensions=8)
    first = np.array(whole[:8])
    np.testing.assert_allclose(cut, first / np.linalg.norm(first), atol=1e-6)
    for wrong in (0, 33):
        with pytest.raises(BadRequestError, match="dimensions"):
            await embedded(subject, "The sea", dimensions=wrong)


async def test_large_inputs_beside_answers(subject: Subject) -> None:
    """A body that is parsed in another process, and steps that compute answers, their log probabilities and pooled
    prompts together.
    """
    many = [f"text {number} " * 20 for number in range(32)]
    asks = [{"prompt": "The sea is", "max_tokens": 8, "temperature": 0.0, "echo": True, "logprobs": 1}] * 4
    alone = (await subject.there.http.post("/v1/completions", json=asks[0])).json()["choices"]
    asking = [asyncio.create_task(subject.there.http.post("/v1/completions", json=ask)) for ask in asks]
    vectors, answers = await embedded(subject, many), [await each for each in asking]
    np.testing.assert_allclose(vectors[7], subject.expected(many[7]), atol=1e-5)
    for answer in answers:
        (choice,), (expected,) = answer.json()["choices"], alone
        assert choice["text"] == expected["text"]
        np.testing.assert_allclose(
            choice["logprobs"]["token_logprobs"][1:], expected["logprobs"]["token_logprobs"][1:], atol=1e-4
        )


async def test_wrong_inputs_are_refused_by_name(subject: Subject) -> None:
    for given, field in (
        ({}, "input"),
        ({"input": ["x", 3]}, "input[1]"),
        ({"input": "x" * 600}, "input"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "x", "zzz": 1}, "zzz"),
        ({"input": ""}, "input"),
        ({"input": [1, -1]}, "input[1]"),
    ):
        answer = await subject.there.http.post("/v1/embeddings", json=given)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text


async def test_models_say_what_they_can_do(subject: Subject) -> None:
    (model,) = (await subject.there.http.get("/v1/models")).json()["data"]
    wanted = {"chat": True, "tool_calls": False, "reasoning": False, "embeddings": True, "structured_output": True}
    assert model["capabilities"] == wanted


async def test_a_model_for_text_makes_no_embeddings() -> None:
    async with opened(FakeDispatcher(), pooling="none") as (there, _):
        answer = await there.http.post("/v1/embeddings", json={"input": "hi"})
        (model,) = (await there.http.get("/v1/models")).json()["data"]
    assert not model["capabilities"]["embeddings"]
    assert answer.status_code == 400 and "gateway.pooling: mean, or last" in answer.json()["error"]["message"]
