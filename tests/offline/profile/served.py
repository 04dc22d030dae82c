"""Simulated workers behind a real gRPC server, in this process."""

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from cluster.frontend.servers import Servers
from cluster.runtime.local import LocalRuntime, simulated_worker
from cluster.serving import serve
from cluster.spec import ClusterSpec
from diptych.client import AsyncClient
from tests.cluster.local import split_spec
from workers.costs import LinearCost
from workers.executor.simulated import SimulatedModel
from workers.request import Grammar

COST = LinearCost(1e-3, 2e-5, 3e-8, 1e-4, 2e-7, swap_byte_s=1e-10)


class AnyTokenizer:
    """One character of text per token."""

    has_chat_template = False
    longest_text_bytes: int | None = None
    special_ids: Mapping[str, int] = MappingProxyType({})
    info: Mapping[str, Any] = MappingProxyType({})

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        return tuple(text.encode())

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> tuple[int, ...]:
        raise NotImplementedError

    def token_bytes(self, token: int) -> bytes:
        return b"."

    def check_grammar(self, grammar: Grammar) -> Grammar:
        return grammar

    def load_grammars(self) -> None:
        """Nothing to load."""

    def detokenizer(self, *, skip_special_tokens: bool = True, keep: Collection[int] = ()) -> "AnyTokenizer":
        return self

    def push(self, tokens: Sequence[int]) -> str:
        return "." * len(tokens)

    def flush(self) -> str:
        return ""


def spec(**engine: int) -> ClusterSpec:
    """With budgets like a small real worker's."""
    made = split_spec(
        backends=("simulated",), **({"kv_blocks": 1030, "max_batch_tokens": 256, "max_running": 32} | engine)
    )
    return replace(made, gateway=replace(made.gateway, grpc_port=0))


@asynccontextmanager
async def served(
    spec: ClusterSpec, cost: LinearCost = COST, model: SimulatedModel | None = None
) -> AsyncIterator[tuple[AsyncClient, LocalRuntime]]:
    runtime = LocalRuntime(lambda order: simulated_worker(order, cost, model or SimulatedModel()))
    serving = await serve(spec, runtime=runtime, make_server=lambda context: Servers(context, AnyTokenizer))
    try:
        async with AsyncClient(serving.endpoint) as client:
            await client.wait_ready(10.0)
            yield client, runtime
    finally:
        await serving.close()
