"""A request's SLO, priority and share, from its class and tenant. Pure; knows no queue."""

from dataclasses import replace

from cluster.spec import ClassSpec, GatewaySpec
from workers.errors import InvalidRequest
from workers.request import SLO, Request

OTHERS = "*"  # all tenants without a share of their own


class Classes:
    """The classes and tenants of one gateway. Owned by its Policy."""

    def __init__(self, gateway: GatewaySpec) -> None:
        self._classes = gateway.classes
        self._tenants = gateway.tenants
        self._is_by_slo = gateway.admission == "slo"
        self._plain = ClassSpec(gateway.slo.ttft_s, gateway.slo.tpot_s)

    def of(self, request: Request) -> ClassSpec:
        """The request's class; without one, the gateway's own SLO."""
        return self._classes.get(request.slo.class_name, self._plain)

    def slo_of(self, request: Request) -> SLO:
        """The request's SLO; missing times are its class's."""
        slo, known = request.slo, self.of(request)
        return replace(
            slo,
            ttft_s=known.ttft_s if slo.ttft_s is None else slo.ttft_s,
            tpot_s=known.tpot_s if slo.tpot_s is None else slo.tpot_s,
        )

    def share(self, request: Request) -> tuple[str, float]:
        """The request's tenant and its share. Without configured shares, all requests are one tenant's."""
        if not self._tenants:
            return OTHERS, 1.0
        name = request.tenant if request.tenant in self._tenants else OTHERS
        return name, self._tenants[name]

    def rejects(self, request: Request) -> bool:
        """Whether the request is refused rather than served late."""
        on_miss = self.of(request).on_miss
        if on_miss is None:
            return request.slo.ttft_s is not None or request.slo.tpot_s is not None
        return on_miss == "reject"

    def resolved(self, request: Request) -> Request:
        """The request with its class's settings. Raises `InvalidRequest` for an unknown class or tenant."""
        self._check_tenant(request)
        slo, known = request.slo, self._classes.get(request.slo.class_name)
        if known is None:
            if self._classes and slo.class_name != "default":
                names = ", ".join(self._classes)
                raise InvalidRequest("slo.class_name", f"is {slo.class_name[:64]!r}; the classes are {names}")
            if not self._is_by_slo:
                return request
            known = self._plain
        resolved = replace(self.slo_of(request), priority=known.priority, is_enforced=self._is_by_slo)
        return replace(request, slo=resolved)

    def _check_tenant(self, request: Request) -> None:
        if not self._tenants or OTHERS in self._tenants or request.tenant in self._tenants:
            return
        names = ", ".join(self._tenants)
        raise InvalidRequest("tenant", f"is {request.tenant[:64]!r}, which has no share; tenants with a share: {names}")
