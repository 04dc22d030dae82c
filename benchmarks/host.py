"""The program inside `hosted`: serves clusters in this process until its input ends, telling where their doors are.

Its argument is a JSON file: {"way": "ray" | "local" | "door", "specs": [...]}. All clusters share one Ray. "local" is
everything in this process; "door" is the gRPC door alone, over a dispatcher that answers from memory.
"""

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from benchmarks.ending import told_to_end
from benchmarks.instant import InstantDispatcher
from cluster.frontend.context import GatewayContext
from cluster.frontend.servers import open_servers
from cluster.serving import serve
from cluster.spec import ClusterSpec
from cluster.spec_file import parse_spec
from diptych.view import ModelView

VOCABULARY, CONTEXT = 1000, 4096


async def host(way: str, specs: list[ClusterSpec]) -> None:
    async with AsyncExitStack() as clusters:
        for spec in specs:
            endpoint = await (_open_bare(spec, clusters) if way == "door" else _open(spec, way, clusters))
            print(f"open {spec.name} {endpoint}", flush=True)
        print("all open", flush=True)
        await told_to_end()


async def _open(spec: ClusterSpec, way: str, clusters: AsyncExitStack) -> str:
    serving = await serve(spec, make_server=open_servers, runtime=way, progress=lambda line: print(line, flush=True))
    clusters.push_async_callback(serving.close)
    return serving.endpoint


async def _open_bare(spec: ClusterSpec, clusters: AsyncExitStack) -> str:
    model = ModelView(spec.model, CONTEXT, VOCABULARY)
    door = open_servers(GatewayContext("door", spec, model, InstantDispatcher(model)))
    clusters.push_async_callback(door.close, 0.0)
    return await door.open()


if __name__ == "__main__":
    order = json.loads(Path(sys.argv[1]).read_text())
    asyncio.run(host(order["way"], [parse_spec(each) for each in order["specs"]]))
