"""A split cluster of the tiny model with both servers, and a fake server, each in a thread for a whole module."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from cluster.frontend.servers import Servers
from cluster.runtime.local import LocalRuntime
from cluster.serving import serve
from cluster.spec import ClusterSpec
from diptych.client import AsyncClient
from kvtransfer.open import SharedMemory
from tests.cluster.local import split_spec
from tests.model.tiny import write_tiny_llama
from tests.offline.load.in_thread import in_thread
from tests.offline.load.made_up import MadeUp, made_up
from workers.build import build_worker
from workers.config import EngineConfig
from workers.model.tokenizer import ModelTokenizer

ENGINE = EngineConfig(block_size=8, kv_blocks=96, max_batch_tokens=64, max_running=8, threads=1)


@dataclass(frozen=True)
class Served:
    """A real cluster: `grpc` is HOST:PORT, `http` a URL without /v1."""

    grpc: str
    http: str
    model: str


def tiny_spec(model: str) -> ClusterSpec:
    made = split_spec()
    pools = tuple(replace(pool, engine=ENGINE) for pool in made.pools)
    gateway = replace(made.gateway, grpc_port=0, http_port=0)
    return replace(made, name="tiny-split", model=model, executor="torch", pools=pools, gateway=gateway)


@asynccontextmanager
async def _serving(model: str) -> AsyncIterator[Served]:
    shared = SharedMemory()
    runtime = LocalRuntime(lambda order: build_worker(order.config, heartbeat_s=order.heartbeat_s, shared=shared))

    def make_server(context: object) -> Servers:
        return Servers(context, partial(ModelTokenizer, Path(model)))  # type: ignore[arg-type]

    serving = await serve(tiny_spec(model), runtime=runtime, make_server=make_server)
    try:
        async with AsyncClient(serving.endpoint) as client:
            await client.wait_ready(20.0)
        yield Served(serving.endpoint, serving.http_urls[0], model)
    finally:
        await serving.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_llama(tmp_path_factory.mktemp("load") / "tiny"))


@pytest.fixture(scope="module")
def served(tiny: str) -> Iterator[Served]:
    with in_thread(_serving(tiny)) as there:
        yield there


@pytest.fixture(scope="module")
def server() -> Iterator[MadeUp]:
    """A hundred requests a second and no more: five at once, each for 50 ms."""
    with in_thread(made_up(slots=5, service_s=0.05)) as there:
        yield there
