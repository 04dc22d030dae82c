"""On Ray: a draining worker migrates its running answers, over real processes and sockets."""

import asyncio
from pathlib import Path

import pytest

from cluster.events import Accepted
from diptych.client import AsyncClient
from tests.ray.served import laptop, served
from workers.executor.simulated import simulated_token

pytestmark = [pytest.mark.full, pytest.mark.ray, pytest.mark.timeout(300)]

COST = {"step_s": 0.015, "decode_row_s": 0.0005, "prefill_token_s": 0.0001}
PROMPT = [5, 6, 7] * 20


async def test_a_drained_worker_leaves_while_its_decodes_migrate(tmp_path: Path) -> None:
    document = laptop(executor="simulated", elastic={"mode": "off"})
    for pool in document["pools"]:
        pool |= {"resources": {"cpu": 0.1}, "cost": COST, "replicas": 1}
    document["pools"][1]["replicas"] = {"min": 1, "max": 3}
    async with served(document, tmp_path) as subject, AsyncClient(subject.endpoint) as client:
        await client.scale("decode", 2)
        async with asyncio.timeout(60):
            while len([each for each in (await client.status()).view.workers if each.state.value == "ready"]) < 3:
                await asyncio.sleep(0.1)
        flowing, left = asyncio.Event(), asyncio.Event()

        async def stream(name: str) -> list[int]:
            """Stream until some tokens after the worker has left. Simulated tokens follow from the request's name."""
            tokens: list[int] = []
            attempts, behind = set(), 0
            async for event in client.generate(PROMPT, request_id=name, max_tokens=1500):
                if isinstance(event, Accepted):
                    attempts.add(event.attempt)
                tokens.extend(getattr(event, "tokens", ()))
                if len(tokens) > 20:
                    flowing.set()
                behind += left.is_set()
                if behind > 20:
                    break
            assert attempts == {0} and behind > 20
            return tokens

        streams = [asyncio.ensure_future(stream(f"stream-{index}")) for index in range(6)]
        await flowing.wait()
        await client.drain("decode-1")
        async with asyncio.timeout(60):
            while any(each.name == "decode-1" for each in (await client.status()).view.workers):
                await asyncio.sleep(0.1)
        left.set()
        for index, tokens in enumerate(await asyncio.gather(*streams)):
            wanted = [simulated_token(f"stream-{index}/0", len(PROMPT) + n, 1000, (0,)) for n in range(len(tokens))]
            assert tokens == wanted
