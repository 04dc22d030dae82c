"""Workers and services as Ray actors. `ray_start` joins or starts Ray.

Actors are named, detached and restartable, so that no process owns all others: workers survive a controller's crash,
and a restarted controller finds them by name. The server kills all of them at the end, or the controller does if the
server is gone. Each worker has its own placement group.

`gc.freeze` keeps what a process has loaded out of garbage collections. A full one would stop all streams, for
0.1 s in a gateway and 0.2 s in a worker.
"""

import asyncio
import contextlib
import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.runtime.interface import ServiceHandle, WorkerHandle, WorkerOrder, WorkerStub
from cluster.runtime.logs import configure_logging
from cluster.runtime.placement import Node, bundle, listed, selectors, shortage, would_fit
from cluster.runtime.ray_ranks import RayRanks, on_this_node, rank_options
from cluster.runtime.rpc_stub import CALL_TIMEOUT_S, RpcAddress, RpcStub
from cluster.runtime.runtime_errors import NoAnswer, RuntimeUnavailable, WorkerGone
from cluster.runtime.sessions import withdraw
from cluster.spec import LogSpec
from diptych.watchdog import patient_timeout
from workers.stats import WorkerInfo

logger = logging.getLogger(__name__)

NAMESPACE = "diptych"
UNFIT_TIMEOUT_S = 1.0
NAME_FREE_TIMEOUT_S, NAME_FREE_LOOK_S = 5.0, 0.02  # Ray has no event for a name that is free again


async def answer_of(reference: Any, timeout_s: float, call: str = "") -> Any:
    """A call's result. Raises what the method raised, or `WorkerGone` if there is no answer.

    `call`: the call, for the error message.
    """
    try:
        async with patient_timeout(timeout_s):
            return await reference
    except RayTaskError as error:
        raise error.cause if isinstance(error.cause, Exception) else error from None
    except RayError as error:
        logger.debug("no answer %s", call, exc_info=error)
        raise WorkerGone(_reason(error)) from None
    except TimeoutError:
        raise NoAnswer(f"no answer {f'of {call} ' * bool(call)}within {timeout_s:.1f} s") from None


def _reason(error: RayError) -> str:
    if isinstance(error, ActorUnavailableError):
        return "its process ended, or cannot be reached"
    if isinstance(error, RayActorError):
        return "its process ended"
    return str(error).strip().splitlines()[0]


class _WorkerActor:
    """The process of one worker. When it dies, Ray restarts it as a new worker with a new incarnation."""

    def __init__(self, order: WorkerOrder, logs: LogSpec) -> None:
        # Here, because processes that only start workers would load numpy and the transports for nothing.
        from workers.build import build_worker
        from workers.rpc_server import WorkerRpcServer

        configure_logging(logs, order.config.name)
        config = on_this_node(order.config)
        self._host, self._secret = config.transfer.host, config.secret.encode()
        self._server = build_worker(config, heartbeat_s=order.heartbeat_s, launcher=RayRanks(order, logs))
        self._rpc = WorkerRpcServer(self._server.incarnation, self._secret, self._server.worker)
        self._listening: asyncio.Task[int] | None = None

    async def incarnation(self) -> str:
        return self._server.incarnation

    async def load(self) -> None:
        """Load ahead of `start`, which raises the errors."""
        with contextlib.suppress(Exception):
            await self._server.open()

    async def start(self) -> WorkerInfo:
        worker = await self._server.open()
        gc.freeze()
        return await worker.info()

    async def listen(self, incarnation: str) -> RpcAddress:
        """Where gateways connect. Raises `WorkerClosed` if this is another incarnation."""
        self._server.worker(incarnation)
        if self._listening is None:
            self._listening = asyncio.ensure_future(self._rpc.start(self._host))
        return RpcAddress(self._host, await self._listening, self._secret)

    async def close(self) -> None:
        await self._server.close()
        await self._rpc.close()


class _ServiceActor:
    """The process of one service."""

    def __init__(self, name: str, logs: LogSpec, factory: Callable[..., Any], *args: Any) -> None:
        configure_logging(logs, name)
        self._factory = factory
        self._args = args
        self._target: Any = None
        self._called: set[str] = set()

    async def node(self) -> str:
        """The Ray id of its node."""
        node: str = ray.get_runtime_context().get_node_id()
        return node

    async def call(self, method: str, *args: Any) -> Any:
        if self._target is None:  # on the event loop, where it may start tasks
            self._target = self._factory(*self._args)
        answer = await getattr(self._target, method)(*args)
        if method not in self._called:  # the first call loads modules
            self._called.add(method)
            gc.freeze()
        return answer


@dataclass(frozen=True)
class RayWorker:
    """A handle to a worker's actor; can be sent between processes. Ray starts the worker and knows its address."""

    name: str
    actor: Any
    dead_after_s: float

    def at(self, incarnation: str) -> WorkerStub:
        locate = partial(self._locate, incarnation)
        return cast(WorkerStub, RpcStub(self.name, incarnation, locate))

    async def _locate(self, incarnation: str) -> RpcAddress:
        address: RpcAddress = await answer_of(self.actor.listen.remote(incarnation), CALL_TIMEOUT_S)
        return address

    async def start(self) -> WorkerInfo:
        answer = answer_of(self.actor.start.remote(), timeout_s=24 * 3600.0)  # bounded by the caller's start timeout
        info: WorkerInfo = await answer
        return info


@dataclass(frozen=True)
class RayService:
    """A handle to a service's actor."""

    name: str
    actor: Any

    async def call(self, method: str, *args: Any, timeout_s: float = 30.0) -> Any:
        return await answer_of(self.actor.call.remote(method, *args), timeout_s, f"{self.name} to {method!r}")


@dataclass(frozen=True)
class RayRuntime:
    """Has only names, so that it can be pickled. `owns_ray`: this process started the local Ray.

    `logs`: of the actors. `session_file`: lets other commands find this Ray; empty: there is none.
    """

    cluster: str
    owns_ray: bool = False
    logs: LogSpec = field(default_factory=LogSpec)
    session_file: str = ""
    name: str = "ray"

    async def prestart(self, order: WorkerOrder) -> None:
        if self.owns_ray:  # on other Rays a node may have to join first, and names may be taken
            worker = await self.start_worker(order)
            assert isinstance(worker, RayWorker)
            worker.actor.load.remote()

    async def start_worker(self, order: WorkerOrder) -> WorkerHandle:
        name = f"{self.cluster}/{order.config.name}"
        with contextlib.suppress(ValueError):  # the actor exists after `prestart`, and after a controller's crash
            return cast(WorkerHandle, RayWorker(name, ray.get_actor(name, NAMESPACE), order.dead_after_s))
        group = await self._place(name, order)
        options: dict[str, Any] = {
            "name": name,
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "max_restarts": -1,
            "max_concurrency": 10_000,
            **rank_options(order, group, 0),
        }
        actor = ray.remote(_WorkerActor).options(**options).remote(order, self.logs)
        return cast(WorkerHandle, RayWorker(name, actor, order.dead_after_s))

    async def _place(self, name: str, order: WorkerOrder) -> PlacementGroup:
        parallel, resources = order.config.parallel, order.resources
        if self.owns_ray and not would_fit(resources, parallel, _nodes()):
            raise _no_room(order)  # no node will join
        group = _existing_group(name) or placement_group(
            [bundle(resources)] * parallel.world_size,
            strategy=parallel.placement.upper(),
            name=name,
            lifetime="detached",
            bundle_label_selector=selectors(resources, parallel),
        )
        try:
            async with asyncio.timeout(order.place_timeout_s):
                await group.ready()
        except asyncio.CancelledError:
            remove_placement_group(group)
            raise
        except RayError as error:  # it was removed
            raise WorkerGone(str(error).strip().splitlines()[0]) from None
        except TimeoutError:
            remove_placement_group(group)
            raise _no_room(order) from None
        return group

    async def restart_worker(self, order: WorkerOrder, handle: WorkerHandle, incarnation: str) -> WorkerHandle:
        """Ray restarts actors that died. Kill the actor if it still has this `incarnation`, or does not answer."""
        assert isinstance(handle, RayWorker)
        try:
            async with asyncio.timeout(UNFIT_TIMEOUT_S):
                unhealthy = await handle.actor.incarnation.remote() == incarnation
        except RayActorError:
            unhealthy = False  # dead: Ray restarts it
        except TimeoutError:
            unhealthy = True
        if unhealthy:
            ray.kill(handle.actor, no_restart=False)
        return handle

    async def stop_worker(self, handle: WorkerHandle, grace_s: float) -> None:
        assert isinstance(handle, RayWorker)
        with contextlib.suppress(WorkerGone):
            await answer_of(handle.actor.close.remote(), grace_s)
        ray.kill(handle.actor)
        with contextlib.suppress(ValueError):
            remove_placement_group(ray.util.get_placement_group(handle.name))
        await _wait_until_free(handle.name)

    async def start_service(self, name: str, factory: Callable[..., Any], *args: Any) -> ServiceHandle:
        """Runs on the server's node, where clients expect its ports. Ray ignores soft affinity at 0 CPUs."""
        here = ray.get_runtime_context().get_node_id()
        options: dict[str, Any] = {
            "name": f"{self.cluster}/{name}",
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "max_restarts": -1,
            "max_concurrency": 10_000,
            "num_cpus": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=False),
        }
        try:
            actor = ray.remote(_ServiceActor).options(**options).remote(name, self.logs, factory, *args)
        except ValueError:
            raise RuntimeUnavailable(
                f"a cluster called {self.cluster!r} is already served on this Ray; "
                "stop it first, or give this one another name"
            ) from None
        return RayService(name, actor)

    async def restart_service(self, handle: ServiceHandle) -> ServiceHandle:
        assert isinstance(handle, RayService)
        ray.kill(handle.actor, no_restart=False)
        return handle

    async def stop_service(self, handle: ServiceHandle) -> None:
        assert isinstance(handle, RayService)
        ray.kill(handle.actor)

    async def end_all(self) -> None:
        """Kill every actor and remove every placement group of this cluster, the controller last."""
        prefix = f"{self.cluster}/"
        names = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
        ours = sorted(
            (name for name in names if name.startswith(prefix)), key=lambda name: name == f"{prefix}controller"
        )
        for name, group in ray.util.placement_group_table().items():
            if group["name"].startswith(prefix) and group["state"] != "REMOVED":
                logger.debug("removing placement group %s of %s", name, self.cluster)
                remove_placement_group(ray.util.get_placement_group(group["name"]))
        for name in ours:
            with contextlib.suppress(ValueError):
                ray.kill(ray.get_actor(name, NAMESPACE))

    async def close(self) -> None:
        await self.end_all()
        if self.owns_ray:
            withdraw(self.session_file)
            await asyncio.to_thread(ray.shutdown)


def _nodes() -> list[Node]:
    return [Node(node["Resources"], node["Labels"]) for node in ray.nodes() if node["Alive"]]


def _no_room(order: WorkerOrder) -> RuntimeUnavailable:
    return RuntimeUnavailable(
        f"no room for {order.config.name}: {shortage(order.resources, order.config.parallel, _nodes())}; free in the "
        f"whole cluster are {{{listed(ray.available_resources())}}}; lower pools[].parallel or pools[].resources, or "
        "add nodes (an autoscaler: look at its node types and max_workers, and at health.place_timeout_s)"
    )


def _existing_group(name: str) -> PlacementGroup | None:
    """The placement group that a crashed controller left; an autoscaler may be starting a node for it."""
    try:
        group: PlacementGroup = ray.util.get_placement_group(name)
    except ValueError:
        return None
    return None if ray.util.placement_group_table(group).get("state") == "REMOVED" else group


async def _wait_until_free(name: str) -> None:
    """Wait until a dead actor's name is free, so that the next worker is not mistaken for it. Has a time limit."""
    with contextlib.suppress(ValueError):
        for _ in range(int(NAME_FREE_TIMEOUT_S / NAME_FREE_LOOK_S)):
            ray.get_actor(name, NAMESPACE)  # raises when there is none
            await asyncio.sleep(NAME_FREE_LOOK_S)
        logger.warning("Ray still knows %s, %.0f s after it was killed", name, NAME_FREE_TIMEOUT_S)
