"""vLLM's API server over an engine that computes nothing: `PYTHON vllm_stub_server.py PERIOD_S ARGUMENTS`.

Runs in vLLM's environment, so it imports nothing of this tree. Input processing, output processing with detokenization
and the HTTP server are vLLM's own; the engine core, which vLLM runs in another process, is a task here that gives every
request a token each PERIOD_S.
"""

import asyncio
import runpy
import sys
from types import SimpleNamespace
from typing import Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.core_client import EngineCoreClient

PERIOD_S = float(sys.argv[1])
TOKEN = 260


class StubEngineCore:
    """Stands in for `AsyncMPClient`."""

    engine_ranks_managed = (0,)
    resources = SimpleNamespace(engine_dead=False)

    def __init__(self) -> None:
        self._left: dict[str, int] = {}  # request -> tokens to come
        self._work = asyncio.Event()

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def reset_mm_cache_async(self) -> None:
        """It has none."""

    async def add_request_async(self, request: Any) -> None:
        self._left[request.request_id] = request.sampling_params.max_tokens
        self._work.set()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for each in request_ids:
            self._left.pop(each, None)

    async def get_output_async(self) -> EngineCoreOutputs:
        """One step: a token for every request."""
        while not self._left:
            self._work.clear()
            await self._work.wait()
        await asyncio.sleep(PERIOD_S)
        outputs = []
        for request_id, left in list(self._left.items()):
            finish = FinishReason.LENGTH if left <= 1 else None
            outputs.append(EngineCoreOutput(request_id, [TOKEN], finish_reason=finish))
            self._left[request_id] = left - 1
            if finish:
                del self._left[request_id]
        return EngineCoreOutputs(outputs=outputs)

    def get_kv_event_sources(self) -> dict[int, Any]:
        return {}

    def shutdown(self, timeout: float | None = None) -> None:
        self._left.clear()


EngineCoreClient.make_async_mp_client = staticmethod(lambda *_, **__: StubEngineCore())
EngineCoreClient.make_client = staticmethod(lambda *_, **__: StubEngineCore())
sys.argv = sys.argv[:1] + sys.argv[2:]
runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
