"""Adapters of a running cluster: from its file, loaded and unloaded by admin calls, named as a request's model."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from cluster.cli.screen import models_text, view_json
from cluster.frontend.context import GatewayContext
from cluster.frontend.servers import Servers, load_tokenizer
from cluster.precheck import check_model
from cluster.runtime.local import LocalRuntime
from cluster.serving import serve
from cluster.spec import ClusterSpec, GatewaySpec, PoolSpec, Role, SpecError
from cluster.spec_file import parse_spec
from diptych.client import AsyncClient
from diptych.errors import DiptychError
from tests.frontend.http.opened import Clients
from tests.frontend.http.opened import clients as clients_of
from tests.model.adapters import merged, write_adapter
from tests.model.tiny import write_tiny_llama
from workers.build import build_worker
from workers.config import EngineConfig, TransferConfig

POOL = PoolSpec("mixed", Role.MIXED, engine=EngineConfig(block_size=8, kv_blocks=96, threads=1))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "base")


def make_server(context: GatewayContext) -> Servers:
    models = [each.model for each in context.models]
    return Servers(context, *(partial(load_tokenizer, model.name, model.context_length) for model in models))


@asynccontextmanager
async def served(base: Path, adapters: dict[str, str], *pools: PoolSpec) -> AsyncIterator[Clients]:
    gateway = GatewaySpec(grpc_port=0, http_port=0)
    spec = ClusterSpec(str(base), (POOL, *pools), transfer=TransferConfig(("tcp",)), gateway=gateway, adapters=adapters)
    runtime = LocalRuntime(lambda order: build_worker(order.config, heartbeat_s=order.heartbeat_s))
    serving = await serve(spec, runtime=runtime, make_server=make_server)
    try:
        async with clients_of(serving.http_urls[0], serving.endpoint) as opened:
            yield opened
    finally:
        await serving.close()


@pytest.fixture
async def clients(base: Path, tmp_path: Path) -> AsyncIterator[Clients]:
    """`sql` comes from the cluster file."""
    async with served(base, {"sql": str(write_adapter(tmp_path / "sql", base, 1))}) as opened:
        yield opened


@pytest.fixture
def client(clients: Clients) -> AsyncClient:
    return clients.grpc


async def text(client: AsyncClient, model: str) -> str:
    return (await client.complete("hello", temperature=0.0, max_tokens=16, ignore_eos=True, model=model)).text


async def test_adapters_are_named_as_models_while_they_are_loaded(
    base: Path, client: AsyncClient, tmp_path: Path
) -> None:
    plain = await text(client, "")
    sql = await text(client, "sql")
    assert sql == await text(client, f"{base}:sql") != plain == await text(client, str(base))
    async with served(merged(base, tmp_path / "sql", tmp_path / "merged"), {}) as other:
        assert await text(other.grpc, "") == sql
    folder = write_adapter(tmp_path / "chat", base, 2)
    await client.load_adapter("chat", str(folder), model=str(base))
    view = (await client.status()).view
    assert [each["name"] for each in view_json(view)["adapters"]] == ["sql", "chat"]
    assert models_text(view).endswith(", adapters sql, chat")
    assert await text(client, "chat") not in (plain, sql)
    await client.unload_adapter("chat")
    with pytest.raises(DiptychError, match=f"model 'chat' is not served here.*{base}', 'sql'") as refused:
        await text(client, "chat")
    assert refused.value.code == "NOT_FOUND"
    assert await text(client, "sql") == sql


async def test_http_names_adapters_as_models(base: Path, clients: Clients) -> None:
    grpc, http = clients.grpc, clients.http
    listed = (await http.get("/v1/models")).json()["data"]
    assert [(each["id"], each["parent"]) for each in listed] == [(str(base), None), ("sql", str(base))]
    assert (await http.get("/v1/models/sql")).json() == listed[1]
    sampling = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True}
    for model, named in ((str(base), str(base)), ("sql", "sql"), (f"{base}:sql", "sql")):
        answer = (await http.post("/v1/completions", json={"model": model, "prompt": "hello", **sampling})).json()
        assert answer["model"] == named
        assert answer["choices"][0]["text"] == await text(grpc, named)
    chat = {"model": "sql", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    response = {"model": "sql", "input": "hello", "max_output_tokens": 4}
    for path, body in (("chat/completions", chat), ("messages", chat), ("responses", response)):
        assert (await http.post(f"/v1/{path}", json=body)).json()["model"] == "sql"
    refused = await http.post("/v1/completions", json={"model": f"{base}:other", "prompt": "hello"})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (404, "model_not_found") and "'sql'" in error["message"]


async def test_of_several_models_each_has_its_own_adapters(base: Path, tmp_path: Path) -> None:
    other = write_tiny_llama(tmp_path / "other", num_layers=3)
    async with served(base, {}, replace(POOL, name="other", model=str(other))) as there:
        with pytest.raises(DiptychError, match="no linear layer for tensor"):
            await there.grpc.load_adapter("deep", str(write_adapter(tmp_path / "deep", other, 1)), model=str(base))
        await there.grpc.load_adapter("deep", str(tmp_path / "deep"), model=str(other))
        deep = await text(there.grpc, "deep")
        assert deep == await text(there.grpc, f"{other}:deep") != await text(there.grpc, str(other))
        with pytest.raises(DiptychError, match="is not served here"):
            await text(there.grpc, f"{base}:deep")


async def test_wrong_loads_change_nothing(base: Path, client: AsyncClient, tmp_path: Path) -> None:
    other = write_adapter(tmp_path / "wide", write_tiny_llama(tmp_path / "wider", hidden_size=64), 1)
    fine = write_adapter(tmp_path / "fine", base, 3)
    before = await client.status()
    for name, path, code, message in (
        ("x", other, "INVALID_ARGUMENT", "path: .*r and this model need .*; was it trained for this model"),
        ("x", tmp_path / "none", "INVALID_ARGUMENT", "path: .*adapter_config.json is missing"),
        ("a:b", fine, "INVALID_ARGUMENT", "name: must be letters, digits"),
        (str(base), fine, "INVALID_ARGUMENT", "name: must be letters, digits"),
        ("sql", fine, "FAILED_PRECONDITION", "'sql' is .*with other content; unload it first"),
    ):
        with pytest.raises(DiptychError, match=message) as refused:
            await client.load_adapter(name, str(path))
        assert refused.value.code == code and "\n" not in str(refused.value)
    with pytest.raises(DiptychError, match="no adapter 'x'; there are sql"):
        await client.unload_adapter("x")
    after = await client.status()
    assert after.view.revision == before.view.revision and after.view.adapters == before.view.adapters


def test_an_adapter_of_the_cluster_file_that_does_not_fit_is_refused_before_anything_starts(
    base: Path, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "dora", base, 1, use_dora=True)
    spec = parse_spec({"model": str(base), "pools": [{"name": "m", "role": "mixed"}], "adapters": {"sql": str(folder)}})
    with pytest.raises(SpecError, match=r"adapters\.sql: .*use_dora True is not supported; supported: False"):
        check_model(spec, base)
    for adapters, message in (({"a b": "x"}, "adapters.a b: the name must be letters"), ({"m": "x"}, "is that of")):
        with pytest.raises(SpecError, match=message):
            parse_spec({"model": "m", "pools": [{"name": "m", "role": "mixed"}], "adapters": adapters})
