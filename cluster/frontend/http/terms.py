"""The Diptych headers of a request: SLO, tenant, session, timeout. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from cluster.frontend.grpc.messages import checked_class
from cluster.frontend.http.middleware import Name
from workers.errors import InvalidRequest
from workers.request import SLO


@dataclass(frozen=True, slots=True)
class Terms:
    """`deadline_s` counts from the request's arrival."""

    name: Name
    slo: SLO
    tenant: str
    session: str
    deadline_s: float | None


def terms_of(headers: Mapping[str, str], name: Name) -> Terms:
    """From headers with lower-case names. Raises `InvalidRequest` naming the header."""
    class_name = headers.get("x-diptych-slo-class", "") or "default"
    return Terms(
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
        wanted_s = float(given) / 1000
    except ValueError:
        wanted_s = math.nan
    if not 0.0 < wanted_s < math.inf:
        raise InvalidRequest(name, f"is {given[:40]!r}; it must be a number of milliseconds above 0")
    return wanted_s
