"""Diptych's headers of an HTTP request: SLO, tenant, session, timeout. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from cluster.frontend.gateway import GenerateOptions
from cluster.frontend.grpc.messages import checked_class
from cluster.frontend.http.middleware import RequestName
from workers.errors import InvalidRequest
from workers.request import SLO


@dataclass(frozen=True, slots=True)
class RequestHeaders:
    """`deadline_s` counts from the request's arrival."""

    name: RequestName
    slo: SLO
    tenant: str
    session: str
    deadline_s: float | None

    def options(self, model: str, index: int, num_prompts: int, waited_s: float = 0.0) -> GenerateOptions:
        """Of prompt number `index`. The deadline counts from the request's arrival, `waited_s` ago."""
        unique = self.name.unique
        return GenerateOptions(
            slo=self.slo,
            request_id=f"{unique}.{index}" if num_prompts > 1 else unique,
            client_id=self.name.given,
            deadline_s=None if self.deadline_s is None else self.deadline_s - waited_s,
            session=self.session,
            model=model,
            tenant=self.tenant,
        )


def parse_headers(headers: Mapping[str, str], name: RequestName) -> RequestHeaders:
    """`headers` have lower-case names. Raises `InvalidRequest` with the header's name."""
    class_name = headers.get("x-diptych-slo-class", "") or "default"
    return RequestHeaders(
        name=name,
        slo=SLO(
            _seconds(headers, "x-diptych-ttft-ms"),
            _seconds(headers, "x-diptych-tpot-ms"),
            checked_class(class_name, "x-diptych-slo-class"),
        ),
        tenant=headers.get("x-diptych-tenant", ""),
        session=headers.get("x-diptych-session", ""),
        deadline_s=_seconds(headers, "x-diptych-timeout-ms"),
    )


def _seconds(headers: Mapping[str, str], name: str) -> float | None:
    given = headers.get(name)
    if given is None:
        return None
    try:
        value_s = float(given) / 1000
    except ValueError:
        value_s = math.nan
    if not 0.0 < value_s < math.inf:
        raise InvalidRequest(name, f"is {given[:40]!r}; it must be a number of milliseconds above 0")
    return value_s
