"""Warms prompts on workers that prefill, and pins and unpins them there. A worker that fails is part of the answer."""

import asyncio
from collections.abc import Awaitable, Callable, Collection

from cluster.dispatch.worker_client import WorkerClient
from cluster.runtime.interface import WorkerStub
from cluster.runtime.runtime_errors import WorkerGone
from cluster.spec import Role
from diptych.view import CachedPrompt
from workers.errors import InvalidRequest, WorkerError

WARM_TIMEOUT_S = 120.0


async def on_each(
    clients: Collection[WorkerClient], pool: str, call: Callable[[WorkerStub], Awaitable[int]]
) -> tuple[CachedPrompt, ...]:
    """Call all ready workers that prefill, of this pool or of all (""), at the same time; the calls return tokens.

    Raises `InvalidRequest` if there is no such worker.
    """
    chosen = [
        client
        for client in clients
        if client.lost is None and client.view.role is not Role.DECODE and pool in ("", client.view.pool)
    ]
    if not chosen:
        where = f"pool {pool!r}" if pool else "this cluster"
        raise InvalidRequest("pool", f"{where} has no ready worker that prefills")
    return tuple(await asyncio.gather(*(_one(client, call) for client in chosen)))


async def _one(client: WorkerClient, call: Callable[[WorkerStub], Awaitable[int]]) -> CachedPrompt:
    try:
        return CachedPrompt(client.name, await call(client.handle))
    except (WorkerError, WorkerGone) as error:
        return CachedPrompt(client.name, problem=str(error))
