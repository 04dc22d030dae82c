"""A local cluster with all there is to measure: two gateways that answer HTTP, a policy, classes, vLLM's names."""

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import httpx2

from cluster.frontend.servers import Servers
from cluster.runtime.interface import WorkerOrder
from cluster.runtime.local import LocalRuntime
from cluster.serving import serve
from cluster.spec import ClassSpec, ClusterSpec, ElasticSpec, HealthSpec, MetricsSpec
from kvtransfer.open import SharedMemory
from tests.cluster.local import FAST, split_spec
from tests.frontend.tokenizers import ByteTokenizer
from workers.build import build_worker
from workers.config import ByteSize, CacheConfig
from workers.server import WorkerServer


class Dots:
    """Simulated workers draw from more tokens than there are bytes."""

    def push(self, tokens: Sequence[int]) -> str:
        return "." * len(tokens)

    def flush(self) -> str:
        return ""


class DotTokenizer(ByteTokenizer):
    def detokenizer(self, *, skip_special_tokens: bool = True, keep: Collection[int] = ()) -> Dots:  # type: ignore[override]
        return Dots()


def spec() -> ClusterSpec:
    """Nobody is given up for being slow: counts are exact on a busy machine, too."""
    plain = split_spec(1, 2)
    cached = [replace(pool, cache=CacheConfig(ByteSize.parse("8MiB"))) for pool in plain.pools]
    classes = {"fast": ClassSpec(ttft_s=60.0, tpot_s=10.0), "hopeless": ClassSpec(ttft_s=1e-9, tpot_s=10.0)}
    return replace(
        plain,
        pools=tuple(cached),
        transfer=replace(plain.transfer, lease_s=60.0, read_timeout_s=60.0),
        health=HealthSpec(heartbeat_s=0.05, dead_after_s=60.0),
        gateway=replace(plain.gateway, replicas=2, grpc_port=0, http_port=0, classes=classes),
        elastic=ElasticSpec("advise"),
        metrics=MetricsSpec("vllm"),
    )


@dataclass(frozen=True)
class Monitored:
    """`urls` of the gateways."""

    urls: list[str]
    http: httpx2.AsyncClient

    @property
    def targets(self) -> list[str]:
        return [url.removeprefix("http://") for url in self.urls]

    async def complete(self, gateway: int, num_prompt: int, num_tokens: int, class_name: str = "default") -> None:
        body = {"prompt": [1 + n % 200 for n in range(num_prompt)], "max_tokens": num_tokens, "temperature": 0}
        headers = {"x-diptych-slo-class": class_name}
        answer = await self.http.post(f"{self.urls[gateway]}/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == num_tokens

    async def exposition(self, gateway: int = 0) -> str:
        return (await self.http.get(f"{self.urls[gateway]}/metrics")).text


@asynccontextmanager
async def monitored() -> AsyncIterator[Monitored]:
    shared = SharedMemory()

    def build(order: WorkerOrder) -> WorkerServer:
        return build_worker(order.config, heartbeat_s=order.heartbeat_s, shared=shared, cost=FAST)

    serving = await serve(
        spec(), runtime=LocalRuntime(build), make_server=lambda context: Servers(context, DotTokenizer)
    )
    try:
        async with httpx2.AsyncClient(trust_env=False, timeout=30.0) as http:
            yield Monitored(serving.http_urls, http)
    finally:
        await serving.close()
