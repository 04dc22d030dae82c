"""Workers in processes of their own, called over the product's RPC as a gateway calls them; without Ray and gRPC."""

import asyncio
import multiprocessing
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

from cluster.runtime.interface import WorkerStub
from cluster.runtime.rpc_stub import RpcAddress, RpcStub
from kvtransfer.ticket import TransferReport
from workers.build import build_worker
from workers.config import WorkerConfig
from workers.executor.warm_up import WARM_UP_S
from workers.request import EngineOutputs, FailedOut, FetchedOut, Output, Request, TicketOut, TokensOut
from workers.rpc_server import WorkerRpcServer

HOST = "127.0.0.1"
SHARED_MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else None  # for models: files without a disk
OPEN_S = WARM_UP_S + 30.0
CLOSE_S = 20.0
ANSWER_S = 30.0
SECRET = secrets.token_hex(16)
SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class Opened:
    """What the process of a worker reports: where it listens, and its pool."""

    incarnation: str
    port: int
    kv_tokens: int
    dtype: str
    seconds: float  # to open


@dataclass(frozen=True, slots=True)
class ServedWorker:
    """A worker in a process of its own."""

    name: str
    stub: WorkerStub
    opened: Opened


@asynccontextmanager
async def served(configs: Sequence[WorkerConfig], left: dict[str, int]) -> AsyncIterator[list[ServedWorker]]:
    """Workers that load at the same time; at the end they close and their processes end.

    `left` gets the bytes of the device that each one holds after that. Raises if one does not open.
    """
    async with AsyncExitStack() as stack:
        opening = [stack.enter_async_context(_served(replace(config, secret=SECRET), left)) for config in configs]
        yield list(await asyncio.gather(*opening))


@asynccontextmanager
async def _served(config: WorkerConfig, left: dict[str, int]) -> AsyncIterator[ServedWorker]:
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=_run, args=(config, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        opened = await _received(ours, OPEN_S, config.name)
        assert isinstance(opened, Opened), opened

        async def locate() -> RpcAddress:
            return RpcAddress(HOST, opened.port, config.secret.encode())

        stub = cast(WorkerStub, RpcStub(config.name, opened.incarnation, locate))
        try:
            yield ServedWorker(config.name, stub, opened)
        finally:
            await stub.disconnect()
        ours.send("close")
        left_bytes = await _received(ours, CLOSE_S, config.name)
        assert isinstance(left_bytes, int)
        left[config.name] = left_bytes
    finally:
        process.kill()
        process.join()
        ours.close()


async def _received(pipe: Connection, limit_s: float, name: str) -> object:
    if not await asyncio.to_thread(pipe.poll, limit_s):
        raise TimeoutError(f"{name} did not report within {limit_s:.0f} s")
    try:
        return pipe.recv()
    except EOFError:
        raise RuntimeError(f"the process of {name} ended; its output says why") from None


def _run(config: WorkerConfig, pipe: Connection) -> None:
    asyncio.run(_serve(config, pipe))


async def _serve(config: WorkerConfig, pipe: Connection) -> None:
    """Until the parent says or ends."""
    import gc

    import torch

    begun = time.monotonic()
    server = build_worker(config)
    rpc = WorkerRpcServer(server.incarnation, config.secret.encode(), server.worker)
    worker = await server.open()
    engine = worker.config.engine
    info = await worker.info()
    layout = info.peer.shards[0].layout
    kv_tokens, seconds = engine.kv_blocks * engine.block_size, time.monotonic() - begun
    pipe.send(Opened(server.incarnation, await rpc.start(HOST), kv_tokens, layout.dtype, seconds))
    told = asyncio.Event()
    asyncio.get_running_loop().add_reader(pipe.fileno(), told.set)
    await told.wait()
    del worker
    await server.close()
    await rpc.close()
    del server, rpc
    gc.collect()
    left_bytes = 0
    if torch.cuda.is_available():
        torch._C._cuda_clearCublasWorkspaces()  # which torch keeps for the process
        left_bytes = torch.cuda.memory_allocated()
    pipe.send(left_bytes)


@dataclass(slots=True)
class TimedTokens:
    """One request's tokens, when each arrived (seconds, monotonic), and how its KV moved."""

    asked_s: float
    tokens: list[int] = field(default_factory=list)
    arrived_s: list[float] = field(default_factory=list)
    report: TransferReport | None = None
    decodes: asyncio.Event = field(default_factory=asyncio.Event)  # set from the second token on

    def add(self, out: TokensOut) -> None:
        assert out.first_position == len(self.tokens), f"{out} after {len(self.tokens)} tokens"
        self.tokens += out.tokens
        self.arrived_s += [time.monotonic()] * len(out.tokens)
        if len(self.tokens) > 1:
            self.decodes.set()

    @property
    def ttft_s(self) -> float:
        return self.arrived_s[0] - self.asked_s

    @property
    def gaps_s(self) -> list[float]:
        """Between tokens, after the first."""
        return [later - earlier for earlier, later in zip(self.arrived_s, self.arrived_s[1:], strict=False)]


class Caller:
    """Subscribed to workers, once for each; drives requests as a dispatcher does. An async context manager."""

    def __init__(self, *workers: ServedWorker) -> None:
        self.workers = workers
        self._name = f"caller of {', '.join(each.name for each in workers)}"
        self._outputs: dict[str, asyncio.Queue[Output]] = {}
        self._subscribing: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Caller":
        for each in self.workers:
            self._subscribing.append(asyncio.ensure_future(each.stub.subscribe(self._name, self._take)))
        for each in self.workers:
            await each.stub.check()
        return self

    async def __aexit__(self, *exc: object) -> None:
        for each in self._subscribing:
            each.cancel()
        await asyncio.gather(*self._subscribing, return_exceptions=True)

    async def split(
        self, request: Request, prefill: ServedWorker, decode: ServedWorker, into: TimedTokens | None = None
    ) -> TimedTokens:
        """Its prompt on one worker, its tokens on another. `into`: where they are seen as they arrive."""
        request, outputs = self._named(request)
        answer = into or TimedTokens(time.monotonic())
        async with asyncio.timeout(ANSWER_S):
            await decode.stub.reserve(request, ANSWER_S)
            await prefill.stub.prefill(request)
            while True:
                match await outputs.get():
                    case TicketOut(_, ticket):
                        await decode.stub.fetch(request.key, ticket)
                    case FetchedOut(_, report):
                        answer.report = report
                    case FailedOut(_, reason):
                        raise AssertionError(f"{request.key}: {reason}")
                    case TokensOut() as out:
                        answer.add(out)
                        if out.prefilled:
                            await decode.stub.decode(request.key, out.tokens)
                        elif out.finish is not None:
                            return answer

    async def alone(self, request: Request, worker: ServedWorker, into: TimedTokens | None = None) -> TimedTokens:
        """All of it on one worker. `into` as for `split`."""
        request, outputs = self._named(request)
        answer = into or TimedTokens(time.monotonic())
        async with asyncio.timeout(ANSWER_S):
            await worker.stub.generate(request)
            while True:
                out = await outputs.get()
                if not isinstance(out, TokensOut):
                    raise AssertionError(f"{request.key}: {out}")
                answer.add(out)
                if out.finish is not None:
                    return answer

    async def cancel(self, key: str) -> None:
        """On all workers."""
        for each in self.workers:
            await each.stub.cancel(key)

    def _named(self, request: Request) -> tuple[Request, asyncio.Queue[Output]]:
        request = replace(request, reply_to=self._name)
        assert request.key not in self._outputs, f"{request.key} was asked before"
        outputs = self._outputs[request.key] = asyncio.Queue()
        return request, outputs

    def _take(self, message: EngineOutputs) -> None:
        for output in message.outputs:
            self._outputs[output.key].put_nowait(output)
