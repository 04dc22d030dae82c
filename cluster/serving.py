"""Composition: turns a specification into a running cluster.

The only module that puts runtime, controller, dispatchers and servers together. Knows the order of starts and stops;
knows no scheduling and no wire format. Imports controller and dispatcher where it makes them, because the process of
`diptych serve` has neither.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from cluster.control.changes import ServerReport
from cluster.control.client import ControllerClient
from cluster.control.membership import NO_MEMBERSHIP, Membership
from cluster.control.pools import first_orders
from cluster.control.scaling_loop import ScalingPolicy
from cluster.control.supervision import ORPHAN_AFTER_S, Failures, GatewayManager, KeepAlive, supervised
from cluster.frontend.auth import Authenticator
from cluster.frontend.context import ClusterQueries, GatewayContext, Server, ServerFactory
from cluster.runtime.interface import Runtime, ServiceHandle, WorkerOrder
from cluster.runtime.runtime_errors import RuntimeUnavailable, WorkerGone
from cluster.spec import ClusterSpec
from diptych.view import ClusterView, ModelView, WorkerState, WorkerView

if TYPE_CHECKING:
    from cluster.control.controller import Controller
    from cluster.dispatch.dispatcher import Dispatcher
    from cluster.observe.otlp import Spans

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]

CLOSE_GRACE_S = 1.0
SAMPLE_S = 1.0
RESTART_LOOK_S = 0.5  # between two calls to a controller that restarts
FIRST_CALL_S = 120.0  # processes may start slowly, because several read their libraries from disk at once


class GatewayService:
    """One gateway process: a dispatcher for each model behind its servers."""

    def __init__(self, name: str, spec: ClusterSpec, controller: ServiceHandle, make_server: ServerFactory) -> None:
        self._name = name
        self._spec = spec
        self._handle = controller
        self._controller = self._calls()
        self._make_server = make_server
        self._dispatchers: dict[str, Dispatcher] = {}  # by model
        self._queries: ClusterQueries | None = None
        self._server: Server | None = None
        self._spans: list[Spans] = []
        self._endpoint = ""
        self._opening = asyncio.Lock()  # a caller may retry before the first answer
        self._tasks: list[asyncio.Task[None]] = []

    async def check_files(self) -> None:
        """Check that this process can read the certificate and key files. Raises `SpecError`."""
        Authenticator(self._spec.gateway)

    async def prepare(self) -> None:
        """Load what `open` needs. Takes seconds, which pass while the workers load."""
        from cluster.frontend.servers import preload  # imports grpc, which only this process needs

        await asyncio.to_thread(import_module, "cluster.dispatch.dispatcher")
        await asyncio.to_thread(preload, self._spec)

    def _calls(self) -> ControllerClient:
        decides = self._spec.elastic.mode != "off"
        return ControllerClient(self._handle, self._name, self._spec.transfer.read_timeout_s, decides=decides)

    async def open(self, models: Sequence[ModelView], port: int, http_port: int | None = None) -> str:
        """Listen on these ports (0: any free one), unless it already does. Returns the endpoint."""
        async with self._opening:
            if self._server is None:
                await self._open(models, port, http_port)
        return self._endpoint

    async def _open(self, models: Sequence[ModelView], port: int, http_port: int | None) -> None:
        whole = replace(self._spec, gateway=replace(self._spec.gateway, grpc_port=port, http_port=http_port))
        from cluster.dispatch.all_models import AllModels
        from cluster.dispatch.dispatcher import Dispatcher

        contexts, dispatchers, all_spans = [], {}, []
        async with AsyncExitStack() as undo:
            for model in models:
                spec = whole.of_model(model.name)
                if (spans := await _spans(spec, self._name)) is not None:
                    undo.push_async_callback(spans.close)
                    all_spans.append(spans)
                calls = self._calls()  # each remembers the membership that its dispatcher has
                dispatcher = Dispatcher(spec, model, calls, self._name, () if spans is None else (spans,))
                dispatchers[model.name] = dispatcher
                contexts.append(GatewayContext(self._name, spec, model, dispatcher, self._controller))
            context, *others = contexts
            if others:
                context = replace(context, other_models=tuple(others), all_models=AllModels(self._name, dispatchers))
            server = self._make_server(context)
            for dispatcher in dispatchers.values():
                undo.push_async_callback(dispatcher.close)
            await asyncio.gather(*(dispatcher.start() for dispatcher in dispatchers.values()))
            self._endpoint = await server.open()
            undo.pop_all()
        self._queries, self._dispatchers, self._spans = context.queries, dispatchers, all_spans
        self._server = server
        for dispatcher in dispatchers.values():
            if whole.elastic.mode != "off":
                self._supervise(dispatcher, "reporting the load", partial(self._report, dispatcher))
            if whole.gateway.trace_requests:
                self._supervise(dispatcher, "sampling the load", partial(self._sample, dispatcher))

    def _supervise(self, dispatcher: "Dispatcher", task: str, work: Callable[[], Awaitable[None]]) -> None:
        self._tasks.append(asyncio.ensure_future(supervised(task, work, dispatcher.discovery.failures)))

    async def _report(self, dispatcher: "Dispatcher") -> None:
        """Send a load report to the controller. If that fails, the report is lost."""
        await asyncio.sleep(self._spec.elastic.period_s)
        try:
            await self._controller.report(dispatcher.load_reporter.report())
        except WorkerGone as error:
            logger.debug("could not send the load report: %s", error)

    @staticmethod
    async def _sample(dispatcher: "Dispatcher") -> None:
        """Record the workers' load, for traces."""
        dispatcher.history.sample(dispatcher.discovery.routing_view())
        await asyncio.sleep(SAMPLE_S)

    async def http_url(self) -> str:
        assert self._server is not None, "the gateway has not opened"
        return self._server.http_url

    async def view(self) -> ClusterView:
        assert self._queries is not None, "the gateway has not opened"
        return self._queries.view

    async def cancel_requests(self) -> None:
        """Cancel the requests that `close` still waits for."""
        if self._server is not None:
            await self._server.close(0.0)

    async def close(self, grace_s: float) -> None:
        for task in self._tasks:
            task.cancel()
        if self._server is not None:
            await self._server.close(grace_s)
        for dispatcher in self._dispatchers.values():
            await dispatcher.close()
        for spans in self._spans:
            await spans.close()


async def _spans(spec: ClusterSpec, gateway: str) -> "Spans | None":
    """Imports OpenTelemetry only if spans are sent, because that takes half a second."""
    if spec.tracing.otlp_endpoint is None:
        return None
    otlp = await asyncio.to_thread(import_module, "cluster.observe.otlp")
    spans: Spans = otlp.Spans(spec, gateway)
    return spans


class Serving:
    """A running cluster. Owned by the caller of `serve`; `close` stops everything."""

    def __init__(
        self,
        spec: ClusterSpec,
        runtime: Runtime,
        scaling_policy: ScalingPolicy | None = None,
        *,
        gateways: bool = True,
    ) -> None:
        self.spec = spec
        self.runtime = runtime
        self._scaling_policy = scaling_policy
        self._num_gateways = spec.gateway.replicas if gateways else 0
        self.endpoints: list[str] = []
        self.http_urls: list[str] = []
        self._controller: ServiceHandle | None = None
        self._gateways: list[ServiceHandle] = []
        self._preparing: asyncio.Task[None] | None = None
        self._gateway_managers: list[GatewayManager] = []
        self._failures = Failures()
        self._keep_alive: KeepAlive | None = None
        self._closed = asyncio.Event()

    @property
    def endpoint(self) -> str:
        return self.endpoints[0]

    @property
    def controller(self) -> ServiceHandle:
        """Takes changes (`cluster.control.controller.Controller`)."""
        assert self._controller is not None, "the cluster has not opened"
        return self._controller

    async def view(self) -> ClusterView:
        """The first gateway's view."""
        view: ClusterView = await self._gateways[0].call("view")
        return view

    async def wait_closed(self) -> None:
        """Wait for `close`, or until the controller is lost for good."""
        await self._closed.wait()

    async def open(self, make_server: ServerFactory, progress: Progress) -> None:
        spec, secret = self.spec, secrets.token_hex(16)
        # All processes start at once: the workers load while the controller and the gateways start.
        orders = first_orders(spec, secret)
        await self._prestart(orders)
        orphan_after_s = ORPHAN_AFTER_S if self.runtime.name == "ray" else None
        self._controller = await self.runtime.start_service(
            "controller", make_controller, spec, self.runtime, secret, orphan_after_s, self._scaling_policy
        )
        for index in range(self._num_gateways):
            name = f"gateway-{index}"
            self._gateways.append(
                await self.runtime.start_service(name, GatewayService, name, spec, self._controller, make_server)
            )
        if spec.gateway.names_files:
            await asyncio.gather(*(gateway.call("check_files", timeout_s=FIRST_CALL_S) for gateway in self._gateways))
        progress(f"starting {len(orders)} worker{'s' * (len(orders) != 1)}: loading {', '.join(spec.models)}")
        await self._controller.call("start", timeout_s=FIRST_CALL_S)
        restart = self.runtime.restart_service
        self._keep_alive = KeepAlive(self._controller, self._report, self._closed.set, restart, self._failures)
        self._preparing = asyncio.create_task(self._prepare())
        models = await self._ready(progress)
        if spec.adapters:
            from cluster.precheck import read_adapters

            for adapter in await asyncio.to_thread(read_adapters, spec):
                await self._controller.call("load_adapter", adapter)
        await self._preparing
        for index, gateway in enumerate(self._gateways):
            port, http_port = spec.gateway.grpc_port, spec.gateway.http_port
            ports = port and port + index, http_port and http_port + index
            self.endpoints.append(await gateway.call("open", models, *ports, timeout_s=FIRST_CALL_S))
            if http_port is not None:
                self.http_urls.append(await gateway.call("http_url"))
            self._supervise(index, gateway, models)
        membership: Membership = await self._controller.call("members", 0, 1.0)
        for link in membership.view.links:
            progress(
                f"{link.owner} -> {link.reader}: {link.transport}, {link.path}, "
                f"{link.bytes_per_s / 1e9:.2f} GB/s, {link.latency_s * 1e6:.0f} us"
            )

    async def _prestart(self, orders: list[WorkerOrder]) -> None:
        """All at once. After an error none of them goes on, since Ray ends next."""
        try:
            async with asyncio.TaskGroup() as group:
                for order in orders:
                    group.create_task(self.runtime.prestart(order))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _prepare(self) -> None:
        """Let the gateways load what they need. Ignores errors: `open` would raise the same."""
        preparing = (gateway.call("prepare", timeout_s=FIRST_CALL_S) for gateway in self._gateways)
        await asyncio.gather(*preparing, return_exceptions=True)

    async def _ready(self, progress: Progress) -> tuple[ModelView, ...]:
        """Wait for the workers, and report their state changes to `progress`."""
        controller = self._controller
        assert controller is not None
        deadline_s = asyncio.get_running_loop().time() + self.spec.health.start_timeout_s
        shown: dict[str, WorkerView] = {}
        while True:
            models: tuple[ModelView, ...] | None = None
            membership = NO_MEMBERSHIP
            try:
                models = await controller.call("ready", 1.0)
                membership = await controller.call("members", 0, 1.0)
            except WorkerGone:  # it restarts, and `KeepAlive` makes it begin
                if self._closed.is_set():
                    raise
                await asyncio.sleep(RESTART_LOOK_S)
            for view in membership.view.workers:
                before = shown.get(view.name)
                shown[view.name] = view
                if before is None or before.state is not view.state:
                    detail = view.trouble or (f"pid {view.pid}" if view.pid else "")
                    progress(f"{view.name}: {view.state.value}{f' ({detail})' if detail else ''}")
            if models is not None:
                return models
            if asyncio.get_running_loop().time() > deadline_s:
                waiting = ", ".join(
                    f"{view.name} ({view.trouble})" if view.trouble else view.name
                    for view in shown.values()
                    if view.state is not WorkerState.READY
                )
                raise RuntimeUnavailable(
                    f"{waiting} not ready within health.start_timeout_s ({self.spec.health.start_timeout_s:.0f} s)"
                )

    def _supervise(self, index: int, gateway: ServiceHandle, models: tuple[ModelView, ...]) -> None:
        """Supervise the gateway. After a restart it opens on the same ports."""
        port = int(self.endpoints[index].rpartition(":")[2])
        http_port = int(self.http_urls[index].rpartition(":")[2]) if self.http_urls else None
        opening = models, port, http_port
        manager = GatewayManager(f"gateway-{index}", gateway, opening, self.runtime, self._failures)
        self._gateway_managers.append(manager)
        manager.start()

    def _report(self) -> ServerReport:
        return ServerReport(tuple(manager.view for manager in self._gateway_managers), self._failures.counts())

    async def close(self, grace_s: float = CLOSE_GRACE_S) -> None:
        """Close gateways, then workers, then the controller. Kills processes that do not answer.

        Running requests get `grace_s` to finish; `cut` cancels them. Keep-alives to the controller continue meanwhile.
        """
        if self._preparing is not None:
            self._preparing.cancel()
        for manager in self._gateway_managers:
            manager.close()
        await asyncio.gather(*(self._end(gateway, "close", grace_s, grace_s=grace_s) for gateway in self._gateways))
        self._gateways = []  # a call after Ray has ended would start another Ray
        if self._keep_alive is not None:
            self._keep_alive.close()
        if self._controller is not None:
            await self._end(self._controller, "stop")
        await self.runtime.close()
        self._closed.set()

    async def cancel_requests(self) -> None:
        """Cancel the requests that `close` still waits for; their clients get an error."""
        calls = (gateway.call("cancel_requests", timeout_s=CLOSE_GRACE_S) for gateway in self._gateways)
        for error in await asyncio.gather(*calls, return_exceptions=True):
            if error is not None:
                logger.debug("a gateway is already gone: %s", error)

    async def _end(self, service: ServiceHandle, method: str, *args: Any, grace_s: float = 0.0) -> None:
        try:
            await service.call(method, *args, timeout_s=grace_s + 3 * CLOSE_GRACE_S)
        except WorkerGone as error:
            logger.warning("a service did not close in time: %s", error)
        await self.runtime.stop_service(service)


def make_controller(
    spec: ClusterSpec,
    runtime: Runtime,
    secret: str,
    orphan_after_s: float | None,
    scaling_policy: ScalingPolicy | None = None,
) -> "Controller":
    from cluster.control.controller import Controller
    from cluster.policy.scaling.elastic import elastic_policy

    elastic = elastic_policy(spec) if spec.elastic.mode != "off" else None
    return Controller(spec, runtime, secret, orphan_after_s=orphan_after_s, scaling_policy=scaling_policy or elastic)


async def serve(
    spec: ClusterSpec,
    *,
    make_server: ServerFactory,
    runtime: str | Runtime = "ray",
    progress: Progress = lambda line: None,
    scaling_policy: ScalingPolicy | None = None,
    gateways: bool = True,
) -> Serving:
    """Start a cluster. On an error, stop everything that was started.

    `scaling_policy`: used if `elastic` is on; None: `cluster.policy.scaling.elastic`. Without `gateways`, they join
    later (`cluster.join`). Raises `RuntimeUnavailable`, `workers.errors.ModelError`, or OSError for a port in use.
    """
    if spec.loads_models:
        from cluster.precheck import with_block_sizes

        spec = await asyncio.to_thread(with_block_sizes, spec)
    serving = Serving(spec, await open_runtime(spec, runtime, progress), scaling_policy, gateways=gateways)
    try:
        await serving.open(make_server, progress)
    except BaseException:
        progress("closing")
        await serving.close(0.0)
        raise
    return serving


async def open_runtime(spec: ClusterSpec, runtime: str | Runtime, progress: Progress) -> Runtime:
    """The runtime of this name; "ray" joins the cluster of RAY_ADDRESS, or starts one here."""
    if not isinstance(runtime, str):
        return runtime
    if runtime == "local":
        from cluster.runtime.local import LocalRuntime

        return LocalRuntime()
    if runtime == "ray":
        from cluster.runtime.sessions import settle_auth

        settle_auth()
        from cluster.runtime.ray_start import open_ray

        return await open_ray(spec, progress)
    raise RuntimeUnavailable(f"runtime {runtime!r} is neither ray nor local")
