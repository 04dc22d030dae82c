"""The program behind `hosted`: serves clusters in this process until its input ends, and prints their endpoints.

Its argument is a file with a pickled pair: "ray", "local" or "server", and the cluster specs. All clusters share one
Ray. "local" runs everything in this process; "server" is the gRPC server alone, over a stub dispatcher.
"""

import asyncio
import pickle
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from benchmarks.shutdown import wait_for_shutdown
from benchmarks.stub_gateway import StubDispatcher
from cluster.frontend.context import GatewayContext
from cluster.frontend.servers import open_servers
from cluster.serving import serve
from cluster.spec import ClusterSpec
from diptych.view import ModelView

VOCABULARY, CONTEXT = 1000, 4096


async def host(runtime: str, specs: list[ClusterSpec]) -> None:
    async with AsyncExitStack() as clusters:
        for spec in specs:
            endpoint = await (_open_stub(spec, clusters) if runtime == "server" else _open(spec, runtime, clusters))
            print(f"open {spec.name} {endpoint}", flush=True)
        print("all open", flush=True)
        await wait_for_shutdown()


async def _open(spec: ClusterSpec, runtime: str, clusters: AsyncExitStack) -> str:
    serving = await serve(
        spec, make_server=open_servers, runtime=runtime, progress=lambda line: print(line, flush=True)
    )
    clusters.push_async_callback(serving.close)
    return serving.endpoint


async def _open_stub(spec: ClusterSpec, clusters: AsyncExitStack) -> str:
    model = ModelView(spec.model, CONTEXT, VOCABULARY)
    server = open_servers(GatewayContext("server", spec, model, StubDispatcher(model)))
    clusters.push_async_callback(server.close, 0.0)
    return await server.open()


if __name__ == "__main__":
    asyncio.run(host(*pickle.loads(Path(sys.argv[1]).read_bytes())))
