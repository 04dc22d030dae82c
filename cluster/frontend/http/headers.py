"""Diptych's headers of an HTTP request: SLO, tenant, session, timeout. Pure."""

import math
from collections.abc import Mapping
from dataclasses import replace

from cluster.frontend.gateway import GenerateOptions
from cluster.frontend.grpc.messages import checked_class
from cluster.frontend.http.middleware import RequestName
from workers.errors import InvalidRequest
from workers.request import SLO


def parse_headers(headers: Mapping[str, str], name: RequestName, model: str | None = None) -> GenerateOptions:
    """`headers` have lower-case names. Raises `InvalidRequest` with the header's name."""
    class_name = headers.get("x-diptych-slo-class", "") or "default"
    return GenerateOptions(
        slo=SLO(
            _seconds(headers, "x-diptych-ttft-ms"),
            _seconds(headers, "x-diptych-tpot-ms"),
            checked_class(class_name, "x-diptych-slo-class"),
        ),
        request_id=name.unique,
        client_id=name.given,
        deadline_s=_seconds(headers, "x-diptych-timeout-ms"),
        session=headers.get("x-diptych-session", ""),
        model=model or "",
        tenant=headers.get("x-diptych-tenant", ""),
    )


def of_prompt(options: GenerateOptions, index: int, num_prompts: int, waited_s: float = 0.0) -> GenerateOptions:
    """Of prompt number `index`. The deadline counts from the request's arrival, `waited_s` ago."""
    request_id = f"{options.request_id}.{index}" if num_prompts > 1 else options.request_id
    left_s = None if options.deadline_s is None else options.deadline_s - waited_s
    return replace(options, request_id=request_id, deadline_s=left_s)


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
