"""Two hundred schemas over HTTP: every answer is valid, streamed as in one piece, also with two answers each."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from cluster.frontend.servers import Servers, load_tokenizer
from cluster.runtime.interface import WorkerOrder
from cluster.runtime.local import LocalRuntime
from cluster.serving import serve
from kvtransfer.open import SharedMemory
from tests.cluster.local import split_spec
from tests.frontend.http.opened import Clients, clients
from tests.model.tiny import write_tiny_llama
from workers.build import build_worker
from workers.server import WorkerServer

SCHEMAS = 200
AT_ONCE = 16


@pytest.fixture
async def there(tmp_path: Path) -> AsyncIterator[Clients]:
    """A prefill and two decode workers with a tiny model."""
    model, shared = write_tiny_llama(tmp_path / "tiny", context_length=1024), SharedMemory()
    plain = split_spec(1, 2, block_size=8, kv_blocks=600, threads=1)
    gateway = replace(plain.gateway, grpc_port=0, http_port=0)
    spec = replace(plain, model=str(model), executor="torch", gateway=gateway)

    def build(order: WorkerOrder) -> WorkerServer:
        return build_worker(order.config, heartbeat_s=order.heartbeat_s, shared=shared)

    load = partial(load_tokenizer, str(model), 1024)
    serving = await serve(spec, runtime=LocalRuntime(build), make_server=lambda context: Servers(context, load))
    try:
        async with clients(serving.http_urls[0], serving.endpoints[0]) as found:
            yield found
    finally:
        await serving.close()


def drawn(source: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema whose answers are short, whatever a model says (a time may have any number of digits)."""
    scalars: list[dict[str, Any]] = [
        {"type": "string", "maxLength": source.randint(1, 5), "pattern": "^[a-zé]*$"},
        {"type": "integer", "minimum": -source.randint(0, 99), "maximum": source.randint(0, 999)},
        {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 4},
        {"enum": source.sample(["red", 3, None, True, "two words", [1], "\u6f22"], source.randint(1, 4))},
        {"type": "boolean"},
        {"const": source.choice(["fixed", 7, None])},
        {"type": "string", "format": source.choice(["date", "ipv4", "uuid"])},
        {"type": ["boolean", "null"]},
    ]
    kinds = ["object", "array", "any", "scalar", "scalar"]
    kind = "object" if depth == 0 else source.choice(kinds if depth < 3 else ["scalar"])
    match kind:
        case "object":
            names = source.sample(["id", "name", "size", "tags", "\u00e9"], source.randint(1, 3))
            needed = [name for name in names if source.random() < 0.7]
            fields = {name: drawn(source, depth + 1) for name in names}
            return {"type": "object", "properties": fields, "required": needed, "additionalProperties": False}
        case "array":
            least = source.randint(0, 2)
            return {"type": "array", "items": drawn(source, depth + 1), "minItems": least, "maxItems": least + 1}
        case "any":
            return {"anyOf": [drawn(source, depth + 1), source.choice(scalars)]}
        case _:
            return source.choice(scalars)


@pytest.mark.full
async def test_every_answer_over_http_is_valid(there: Clients) -> None:
    source, places = random.Random(5), asyncio.Semaphore(AT_ONCE)

    async def check(number: int, schema: dict[str, Any]) -> None:
        body: dict[str, Any] = {
            "model": "",
            "messages": [{"role": "user", "content": f"say {number}"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
            "n": 1 + number % 2,
            "seed": number,
            "max_tokens": 700,
        }
        async with places:
            whole = await there.openai.chat.completions.create(**body)
            texts = [""] * body["n"]
            async for chunk in await there.openai.chat.completions.create(**body, stream=True):
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
        assert [choice.message.content for choice in whole.choices] == texts
        for choice in whole.choices:
            assert choice.finish_reason == "stop", (schema, choice)
            jsonschema.validate(json.loads(choice.message.content), schema, jsonschema.Draft202012Validator)

    async with asyncio.TaskGroup() as group:
        for number in range(SCHEMAS):
            group.create_task(check(number, drawn(source)))
