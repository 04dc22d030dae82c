"""The gateways of the models that one process serves. Knows their names; knows no request."""

import asyncio
from collections.abc import Sequence

from cluster.frontend.context import GatewayContext, adapter_named, resolve
from cluster.frontend.gateway import Gateway
from cluster.observe.metrics.gateway import Responses
from cluster.spec import ClusterSpec
from diptych.view import ClusterView
from workers.errors import InvalidRequest


class ServedModels:
    """Owned by the gRPC server, and shared with the HTTP server. `gateways`: one per model of the context, in order."""

    def __init__(self, context: GatewayContext, gateways: Sequence[Gateway]) -> None:
        self.context = context
        self.gateways = tuple(gateways)
        self.responses = Responses()
        self._names = [each.model.name for each in context.models]

    def of(self, model: str) -> Gateway:
        """The gateway for a request's `model`, which may be an adapter. Raises `UnknownModel`."""
        adapters: list[str] = []
        for context, gateway in zip(self.context.models, self.gateways, strict=True):
            if model not in self._names and adapter_named(model, context.dispatcher.adapters) is not None:
                return gateway
            adapters += context.dispatcher.adapters
        return self.gateways[self._names.index(resolve(model, self._names, adapters))]

    def of_pool(self, pool: str) -> Gateway:
        """The gateway of the model that this pool serves. Raises `InvalidRequest`."""
        if len(self.gateways) == 1:
            return self.gateways[0]
        for context, gateway in zip(self.context.models, self.gateways, strict=True):
            if pool in [each.name for each in context.spec.pools]:
                return gateway
        pools = ", ".join(each.name for context in self.context.models for each in context.spec.pools)
        raise InvalidRequest("pool", f"{pool!r} does not say which model is meant; give one of {pools}")

    @property
    def has_several(self) -> bool:
        return len(self.gateways) > 1

    @property
    def spec(self) -> ClusterSpec:
        """Of the first model; `gateway` and `metrics` are the same for all."""
        return self.context.spec

    @property
    def max_requests(self) -> int:
        return len(self.gateways) * self.spec.gateway.max_requests

    @property
    def view(self) -> ClusterView:
        return self.context.queries.view

    @property
    def active(self) -> int:
        """Number of running answers."""
        return sum(each.active for each in self.gateways)

    @property
    def traces(self) -> bool:
        """See `Gateway.traces`."""
        return self.gateways[0].traces

    def cancel(self, request_id: str) -> bool:
        """See `Gateway.cancel`."""
        return any([each.cancel(request_id) for each in self.gateways])

    async def close(self) -> None:
        """See `Gateway.close`."""
        await asyncio.gather(*(each.close() for each in self.gateways))
