"""The program of each measured process, which ends with its input. Prints the port of its service.

python -m benchmarks.control_plane.measured_process workers
python -m benchmarks.control_plane.measured_process controller SPEC_FILE HOST_PORT...
python -m benchmarks.control_plane.measured_process gateway NAME CONTROLLER_PORT
"""

import asyncio
import gc
import pickle
import random
import sys
import time
from pathlib import Path

from msgspec import structs

from benchmarks.control_plane.calls import RemoteService, listen
from benchmarks.control_plane.worker_host import HostRuntime, WorkerHost
from benchmarks.shutdown import wait_for_shutdown
from cluster.control.client import ControllerClient
from cluster.control.controller import Controller
from cluster.dispatch.dispatcher import Dispatcher
from cluster.join import spec_and_models
from cluster.policy.policy import open_policy
from cluster.policy.routing.router import PlacementQuery
from cluster.spec import ClusterSpec
from diptych.view import WorkerState
from workers.request import SLO, Request, SamplingParams

PROMPT_TOKENS = 256
START_S = 600.0


def load(spec_file: str) -> ClusterSpec:
    spec = pickle.loads(Path(spec_file).read_bytes())
    assert isinstance(spec, ClusterSpec)
    return spec


class MeasuredGateway:
    """A gateway's dispatcher without servers."""

    def __init__(self, name: str, controller_port: int) -> None:
        self._name = name
        self._controller = RemoteService(controller_port)
        self._dispatcher: Dispatcher | None = None

    async def open(self) -> None:
        spec, (model,) = await spec_and_models(self._controller, START_S)
        calls = ControllerClient(self._controller, self._name, spec.transfer.read_timeout_s, decides=False)
        self._spec = spec
        self._dispatcher = Dispatcher(spec, model, calls, self._name)
        await self._dispatcher.start()

    async def ready(self) -> int:
        """How many workers it sees as ready."""
        if self._dispatcher is None:
            return 0
        return sum(each.state is WorkerState.READY for each in self._dispatcher.discovery.routing_view().workers)

    async def decide(self, rounds: int, fresh: float) -> tuple[list[float], list[float]]:
        """CPU seconds of pictures, and of decisions with them, while a share of the workers has new statistics."""
        assert self._dispatcher is not None, "the gateway is open"
        discovery, source = self._dispatcher.discovery, random.Random(1)
        policy, clients = open_policy(self._spec, seed=1), list(discovery.clients.values())
        gc.freeze()  # as the process of a gateway does
        pictures, decisions, clock = list[float](), list[float](), asyncio.get_running_loop().time
        for number in range(rounds):
            for client in source.sample(clients, round(fresh * len(clients))):
                client.stats = structs.replace(client.stats, queued_tokens=source.randrange(4000))
                client.touched()
            prompt = tuple(source.choices(range(1, 1000), k=PROMPT_TOKENS))
            request = Request(f"r{number}", prompt, SamplingParams(max_tokens=64), SLO(ttft_s=2.0, tpot_s=0.1))
            begun_s = time.thread_time()
            view = discovery.routing_view()
            seen_s = time.thread_time()
            placed = policy.choose(PlacementQuery(view, request, discovery.sent(), now_s=clock()))
            decisions.append(time.thread_time() - begun_s)
            pictures.append(seen_s - begun_s)
            assert placed is not None, "workers are ready"
            await asyncio.sleep(0)
        return pictures, decisions


async def main(kind: str, args: list[str]) -> None:
    if kind == "workers":
        host = WorkerHost()
        print(f"its port is {await listen(lambda: host)}", flush=True)
    elif kind == "controller":
        controller = Controller(load(args[0]), HostRuntime([int(port) for port in args[1:]]), "a-secret")
        print(f"its port is {await listen(lambda: controller)}", flush=True)
    else:
        gateway = MeasuredGateway(args[0], int(args[1]))
        opening = asyncio.ensure_future(gateway.open())
        opening.add_done_callback(lambda done: done.cancelled() or done.result())
        print(f"its port is {await listen(lambda: gateway)}", flush=True)
    await wait_for_shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2:]))
