"""Adds a gateway to a running cluster, in the caller's process.

It gets the specification from the controller, and ends with the controller, because the next cluster of the same name
may be different. Knows no runtime; the caller finds the controller.
"""

import asyncio
import contextlib
import logging
from dataclasses import dataclass

from cluster.control.supervision import KEEP_ALIVE_S, ORPHAN_AFTER_S
from cluster.frontend.context import ServerFactory
from cluster.runtime.interface import ServiceHandle
from cluster.runtime.runtime_errors import RuntimeUnavailable, WorkerGone
from cluster.serving import GatewayService
from cluster.spec import ClusterSpec
from diptych.view import ModelView
from diptych.watchdog import patient_timeout

logger = logging.getLogger(__name__)

POLL_S = 5.0
SpecAndModels = tuple[ClusterSpec, tuple[ModelView, ...]]


@dataclass(frozen=True, slots=True)
class JoinedGateway:
    """Owned by the caller of `join`, who closes its `service`."""

    service: GatewayService
    controller: ServiceHandle
    endpoint: str
    http_url: str

    async def wait_orphaned(self) -> None:
        """Wait until the controller is lost for good. A restarted controller answers again in time."""
        with contextlib.suppress(TimeoutError):
            async with patient_timeout(ORPHAN_AFTER_S) as silence:
                while True:
                    try:
                        await self.controller.call("spec_and_models", 0.0)
                        silence.reset()
                    except WorkerGone as error:
                        logger.debug("the controller does not answer: %s", error)
                    except Exception:  # raised by the controller, so it is alive
                        logger.exception("the controller failed")
                        silence.reset()
                    await asyncio.sleep(KEEP_ALIVE_S)


async def spec_and_models(controller: ServiceHandle, timeout_s: float) -> SpecAndModels:
    """Of the cluster, once workers have loaded the models. Raises `RuntimeUnavailable`."""
    clock = asyncio.get_running_loop().time
    deadline_s, reason = clock() + timeout_s, "no worker has loaded the model"
    while (left_s := deadline_s - clock()) > 0:
        try:
            found: SpecAndModels | None = await controller.call("spec_and_models", min(POLL_S, left_s))
            if found is not None:
                return found
        except WorkerGone as error:
            reason = f"the controller does not answer ({error})"
            await asyncio.sleep(min(1.0, left_s))
    raise RuntimeUnavailable(f"{reason} within {timeout_s:.0f} s; see the output of `diptych serve`")


async def join(
    name: str, spec: ClusterSpec, models: tuple[ModelView, ...], controller: ServiceHandle, make_server: ServerFactory
) -> JoinedGateway:
    """An open gateway of this name, on the ports of the spec. Raises OSError for a port in use."""
    service = GatewayService(name, spec, controller, make_server)
    endpoint = await service.open(models, spec.gateway.grpc_port, spec.gateway.http_port)
    return JoinedGateway(service, controller, endpoint, await service.http_url())
