"""Counts what one token costs a gateway, from the worker client to the bytes on the client's socket.

    call     one entry into a Python function, or one resumption of a coroutine or generator
    wake-up  one resumption of a server's task

Counted is what happens inside `ROOTS`: where a worker's outputs arrive, and the tasks of the servers. C code (grpc,
msgspec, the tokenizer, sockets) has no calls here. A token that ends inside a character has no text, and HTTP sends
nothing for it.

The cluster runs in this process (`runtime="local"`) with modelled workers, the clients in a thread. Run it with
`python -m benchmarks.token_calls [STREAMS]`.
"""

import asyncio
import sys
from collections import Counter
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from benchmarks.frontend import PERIOD_S, PROTOCOLS, served_spec
from benchmarks.stream_load import Ask, grpc_streams, http_streams, steady
from cluster.frontend.servers import open_servers
from cluster.serving import serve
from workers.request import TokensOut

STREAMS, TOKENS = 16, 80
LEAST = 0.05  # calls per token; rarer ones are not listed
ARRIVAL = "_take"
ROOTS = {  # (end of the file's name, function)
    ("cluster/dispatch/worker_client.py", ARRIVAL),
    ("cluster/frontend/grpc/interceptors.py", "behave"),
    ("uvicorn/protocols/http/h11_impl.py", "run_asgi"),
    ("cluster/frontend/http/connection.py", "answer"),
}


class CallCounter:
    """A profile function of the event loop's thread. `counts` grows while `is_on`."""

    def __init__(self) -> None:
        self.is_on = False
        self.counts: Counter[CodeType] = Counter()
        self.tokens = 0  # that arrived
        self.wakeups = 0
        self._depth = 0  # of the calls inside a root
        self._roots: dict[CodeType, bool] = {}

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            code = frame.f_code
            if self._depth or self._is_root(code):
                self._depth += 1
                if self.is_on:
                    self._count(frame, code)
        elif event == "return" and self._depth:
            self._depth -= 1

    def _count(self, frame: FrameType, code: CodeType) -> None:
        self.counts[code] += 1
        if self._depth == 1 and code.co_name != ARRIVAL:
            self.wakeups += 1
        if code.co_name == "on_message" and isinstance(output := frame.f_locals["message"], TokensOut):
            self.tokens += len(output.tokens)

    def _is_root(self, code: CodeType) -> bool:
        if code not in self._roots:
            self._roots[code] = any(code.co_name == name and code.co_filename.endswith(file) for file, name in ROOTS)
        return self._roots[code]


async def counted(counter: CallCounter, streams: AbstractAsyncContextManager[Ask], count: int) -> None:
    """Toggles the counter at the bounds of the interval in which all streams run."""

    def toggle() -> float:
        counter.is_on = not counter.is_on
        return 0.0

    async with streams as ask:
        await steady(ask, toggle, count, TOKENS, PERIOD_S)


async def main(streams: int) -> None:
    serving = await serve(served_spec(), make_server=open_servers, runtime="local", progress=lambda line: None)
    try:
        for protocol in PROTOCOLS:
            counter = CallCounter()
            connected = (
                grpc_streams(serving.endpoint)
                if protocol == "gRPC"
                else http_streams(serving.http_urls[0], uniform_text=False)
            )
            sys.setprofile(counter)
            await asyncio.to_thread(asyncio.run, counted(counter, connected, streams))
            sys.setprofile(None)
            show(protocol, counter)
    finally:
        await serving.close()


def show(protocol: str, counter: CallCounter) -> None:
    tokens = counter.tokens
    calls, wakeups = counter.counts.total() / tokens, counter.wakeups / tokens
    print(f"{protocol}: {calls:.1f} calls and {wakeups:.1f} wake-ups per token, of {tokens} tokens")
    for code, count in counter.counts.most_common():
        if count >= LEAST * tokens:
            place = "/".join(Path(code.co_filename).parts[-3:])
            print(f"  {count / tokens:5.2f}  {code.co_qualname}  {place}:{code.co_firstlineno}")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else STREAMS))
