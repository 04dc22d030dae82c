"""The baseline of part `frontend`: grpc.aio and FastAPI handlers that send prebuilt messages at a fixed pace.

They send as many messages as Diptych's servers, with the same content, but validate, count and detokenize nothing.
Runs until its input ends: `python -m benchmarks.bare_servers PERIOD_S`.
"""

import asyncio
import json
import socket
import sys
from collections.abc import AsyncGenerator
from typing import Any

import grpc
import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import StreamingResponse

from benchmarks.shutdown import wait_for_shutdown
from benchmarks.stub_gateway import TEXT, TOKEN, paced
from diptych.v1 import common_pb2, inference_pb2, inference_pb2_grpc

MAX_TOKENS = 512


def _messages() -> list[inference_pb2.GenerateResponse]:
    deltas = (inference_pb2.Delta(text=TEXT, token_ids=[TOKEN], first_position=each) for each in range(MAX_TOKENS))
    return [inference_pb2.GenerateResponse(delta=delta) for delta in deltas]


def _end(count: int) -> inference_pb2.GenerateResponse:
    usage = common_pb2.Usage(prompt_tokens=32, completion_tokens=count)
    reason = common_pb2.FINISH_REASON_LENGTH
    ended = inference_pb2.Completed(finish_reason=reason, usage=usage, attempts=1, ledger=common_pb2.LatencyLedger())
    return inference_pb2.GenerateResponse(completed=ended)


class Handler(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        accepted = inference_pb2.Accepted(request_id="bare", prompt_tokens=32, prefill_worker="none", reason="bare")
        self._begin = inference_pb2.GenerateResponse(accepted=accepted)
        self._deltas = _messages()
        self._ends = [_end(count) for count in range(MAX_TOKENS + 1)]

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        yield self._begin
        async for position in paced(request.sampling.max_tokens, self._period_s):
            yield self._deltas[position]
        yield self._ends[request.sampling.max_tokens]


def _line(choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
    chunk = {"id": "cmpl-bare", "object": "text_completion", "created": 0, "model": "bare", "choices": choices}
    return b"data: " + json.dumps(chunk | {"usage": usage}, separators=(",", ":")).encode() + b"\n\n"


def _choice(text: str, finish: str | None) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}


def _usage(count: int) -> dict[str, Any]:
    details = {"cached_tokens": 0}
    counts = {"prompt_tokens": 32, "completion_tokens": count, "total_tokens": 32 + count}
    return counts | {"prompt_tokens_details": details}


def _application(period_s: float) -> FastAPI:
    app = FastAPI()
    token, end = _line([_choice(TEXT, None)]), _line([_choice("", "length")])
    last = [_line([], _usage(count)) + b"data: [DONE]\n\n" for count in range(MAX_TOKENS + 1)]

    @app.get("/health", response_model=None)
    async def health() -> None:
        """SGLang's router asks for it."""

    @app.post("/v1/completions", response_model=None)
    async def completions(request: Request) -> StreamingResponse:
        count = (await request.json())["max_tokens"]

        async def lines() -> AsyncGenerator[bytes, None]:
            async for _ in paced(count, period_s):
                yield token
            yield end
            yield last[count]

        return StreamingResponse(lines(), media_type="text/event-stream")

    return app


async def serve(period_s: float) -> None:
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Handler(period_s), server)
    endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    config = uvicorn.Config(_application(period_s), http="h11", ws="none", lifespan="off", access_log=False)
    http = uvicorn.Server(config)
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    print(f"open {endpoint} http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    await wait_for_shutdown()
    http.should_exit = http.force_exit = True
    await serving
    await server.stop(0.0)


if __name__ == "__main__":
    asyncio.run(serve(float(sys.argv[1])))
