"""Writes the chart's Grafana dashboard: `python helm/dashboard.py`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent / "diptych" / "files" / "dashboard.json"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT = 24, 8
ALL = 'namespace=~"$namespace", job="$job"'  # the operator names a job after the Service: a release has one
OF_CLASS = f'{ALL}, class=~"$class"'


@dataclass(frozen=True)
class Panel:
    """`queries`: pairs of legend and PromQL; `unit`: one of Grafana's."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    width: int = 8
    stacked: bool = False
    kind: str = "timeseries"
    description: str = ""


def rate(name: str, labels: str = ALL) -> str:
    return f"rate({name}{{{labels}}}[$__rate_interval])"


def by_worker(name: str, *, of: str = "") -> str:
    """The maximum, since every gateway exports all workers."""
    return f"max by (worker) ({of or f'{name}{{{ALL}}}'})"


def worker_rate(name: str) -> str:
    return by_worker("", of=rate(f"diptych_worker_{name}_total"))


def increase(name: str, labels: str) -> str:
    return f"max by ({labels}) (increase({name}{{{ALL}}}[$__rate_interval]))"


def attainment(kind: str) -> tuple[tuple[str, str], ...]:
    labels = f'{OF_CLASS}, kind="{kind}"'
    name = "diptych_slo_requests_total"
    met, all_of_them = rate(name, f'{labels}, attained="yes"'), rate(name, labels)
    return (("{{class}}", f"sum by (class) ({met}) / sum by (class) ({all_of_them})"),)


def quantiles(name: str, labels: str = OF_CLASS) -> tuple[tuple[str, str], ...]:
    buckets = f"sum by (le) ({rate(f'{name}_bucket', labels)})"
    return tuple((f"p{round(100 * share)}", f"histogram_quantile({share}, {buckets})") for share in (0.5, 0.9, 0.99))


def total(name: str, labels: str = ALL) -> str:
    return f"sum({rate(name, labels)})"


def sums(name: str, label: str, labels: str = ALL) -> tuple[tuple[str, str], ...]:
    return ((f"{{{{{label}}}}}", f"sum by ({label}) ({rate(name, labels)})"),)


COMPLETED = total("diptych_requests_total", f'{ALL}, outcome="completed"')
READY = f'diptych_workers{{{ALL}, state="ready"}}'
WORKERS_BY_ROLE = f"max by (worker, role) (diptych_worker_role{{{ALL}}})"
PREDICTION_ERRORS = f"sum by (le, kind) ({rate('diptych_prediction_error_ratio_bucket')})"
ERRORS = tuple(
    (f"{{{{kind}}}} p{share}", f"histogram_quantile(0.{share}, {PREDICTION_ERRORS})") for share in (10, 50, 90)
)

ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Now",
        (
            Panel("Requests", "reqps", (("finished", total("diptych_requests_total")),), 6, kind="stat"),
            Panel("Tokens", "short", (("per second", total("diptych_generated_tokens_total")),), 6, kind="stat"),
            Panel(
                "Active requests", "short", (("requests", f"sum(diptych_active_requests{{{ALL}}})"),), 6, kind="stat"
            ),
            Panel("Workers ready", "short", (("{{role}}", f"max by (role) ({READY})"),), 6, kind="stat"),
        ),
    ),
    (
        "SLO attainment",
        (
            Panel("TTFT", "percentunit", attainment("ttft")),
            Panel("TPOT", "percentunit", attainment("tpot")),
            Panel("Both", "percentunit", attainment("both")),
            Panel(
                "Prediction error",
                "none",
                ERRORS,
                12,
                description="Actual over predicted time; above 1 is slower.",
            ),
            Panel("Refused", "reqps", sums("diptych_refused_total", "reason"), 12, stacked=True),
        ),
    ),
    (
        "Latency",
        (
            Panel("Time to first token", "s", quantiles("diptych_time_to_first_token_seconds"), 6),
            Panel("Between tokens", "s", quantiles("diptych_inter_token_seconds"), 6),
            Panel("Time per output token", "s", quantiles("diptych_time_per_output_token_seconds"), 6),
            Panel("Whole request", "s", quantiles("diptych_request_seconds", f'{OF_CLASS}, outcome="completed"'), 6),
            Panel(
                "Time of a request by phase",
                "s",
                (("{{part}}", f"sum by (part) ({rate('diptych_ledger_seconds_sum')}) / scalar({COMPLETED})"),),
                12,
                stacked=True,
                description="Phases of the ledger, averaged over all requests; they add up to the mean request time.",
            ),
            Panel(
                "Phases of the ledger, p90",
                "s",
                (
                    (
                        "{{part}}",
                        f"histogram_quantile(0.9, sum by (le, part) ({rate('diptych_ledger_seconds_bucket')}))",
                    ),
                ),
                12,
                description="Over the requests that had the phase.",
            ),
        ),
    ),
    (
        "Load",
        (
            Panel("Requests", "reqps", sums("diptych_requests_total", "outcome"), stacked=True),
            Panel(
                "Tokens",
                "short",
                (
                    ("prompt", total("diptych_prompt_tokens_total")),
                    ("cached prompt", total("diptych_cached_prompt_tokens_total")),
                    ("generated", total("diptych_generated_tokens_total")),
                ),
            ),
            Panel(
                "Queues",
                "short",
                (
                    ("gateways", f"sum(diptych_queued_requests{{{ALL}}})"),
                    ("{{worker}}", by_worker("diptych_worker_waiting_requests")),
                ),
            ),
            Panel(
                "Responses",
                "reqps",
                sums("diptych_responses_total", "code", f'{ALL}, method!="other"'),
                description="By HTTP and gRPC status code, including refusals.",
                stacked=True,
            ),
            Panel("Prompt length", "short", quantiles("diptych_request_prompt_tokens")),
            Panel("Answer length", "short", quantiles("diptych_request_generated_tokens")),
        ),
    ),
    (
        "Workers",
        (
            Panel("Sequences", "short", (("{{worker}}", by_worker("diptych_worker_running_requests")),)),
            Panel(
                "KV blocks in use",
                "percentunit",
                (
                    (
                        "{{worker}}",
                        f"{by_worker('diptych_worker_kv_used_blocks')} / {by_worker('diptych_worker_kv_blocks')}",
                    ),
                ),
            ),
            Panel(
                "Prefix cache",
                "percentunit",
                (
                    (
                        "{{worker}}",
                        f"{worker_rate('prefix_hit_tokens')} / {worker_rate('prefix_query_tokens')}",
                    ),
                ),
                description="Hit rate: share of looked-up tokens found.",
            ),
            Panel(
                "Prefix cache, by tier",
                "short",
                (
                    (
                        "{{tier}}",
                        f"sum by (tier) (max by (worker, tier) ({rate('diptych_worker_cache_hit_tokens_total')}))",
                    ),
                ),
                stacked=True,
                description="Tokens found per second on the device, in host memory, on the disk and at other workers.",
            ),
            Panel(
                "Time saved by the prefix cache",
                "short",
                (
                    (
                        "{{tier}}",
                        f"sum by (tier) (max by (worker, tier) ({rate('diptych_worker_cache_saved_seconds_total')}))",
                    ),
                ),
                stacked=True,
                description="Seconds of prefill per second that cached tokens saved, less the time to load them.",
            ),
            Panel("Step time", "s", (("{{worker}}", by_worker("diptych_worker_step_seconds")),)),
            Panel("Preemptions", "ops", (("{{worker}}", worker_rate("preemptions")),)),
            Panel("Restarts", "short", (("{{worker}}", by_worker("diptych_worker_restarts_total")),)),
        ),
    ),
    (
        "Pools and roles",
        (
            Panel("Workers ready, by role", "short", (("{{role}}", f"max by (role) ({READY})"),), stacked=True),
            Panel(
                "Pools",
                "short",
                (
                    ("{{pool}} ready", f"max by (pool) (diptych_pool_workers{{{ALL}}})"),
                    ("{{pool}} wanted", f"max by (pool) (diptych_pool_target_workers{{{ALL}}})"),
                ),
            ),
            Panel("Roles", "short", (("{{worker}} {{role}}", WORKERS_BY_ROLE),), stacked=True),
            Panel(
                "Role changes",
                "short",
                (("{{from}} to {{to}}", increase("diptych_role_changes_total", "from, to")),),
            ),
            Panel(
                "Elastic decisions",
                "short",
                (("{{kind}} {{outcome}}", increase("diptych_elastic_decisions_total", "kind, outcome")),),
            ),
            Panel(
                "Migrations",
                "ops",
                (("{{reason}} {{outcome}}", f"sum by (reason, outcome) ({rate('diptych_migrations_total')})"),),
            ),
        ),
    ),
    (
        "Transfers",
        (
            Panel("Fetched", "Bps", (("{{worker}}", worker_rate("transfer_bytes")),), stacked=True),
            Panel("KV handoff", "s", quantiles("diptych_transfer_seconds", ALL)),
            Panel(
                "Failures",
                "ops",
                (
                    ("{{worker}} failed", worker_rate("failed_transfers")),
                    ("{{worker}} corrupt", worker_rate("corrupt_transfers")),
                    ("{{worker}} leases expired", worker_rate("expired_leases")),
                ),
            ),
            Panel("KV handoff size", "bytes", quantiles("diptych_transfer_bytes", ALL)),
            Panel("KV handoff ranges", "short", quantiles("diptych_transfer_descriptors", ALL)),
            Panel("Leases held", "short", (("{{worker}}", by_worker("diptych_worker_leases")),)),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    return {
        "uid": "diptych",
        "title": "Diptych",
        "tags": ["diptych", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "",
        "annotations": {"list": []},
        "templating": {"list": [_source(), *VARIABLES]},
        "panels": _panels(),
    }


def _source() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus", "hide": 0}


def _variable(label: str, series: str, *, has_all: bool = True) -> dict[str, Any]:
    query = f"label_values({series}, {label})"
    return {
        "name": label,
        "type": "query",
        "datasource": SOURCE,
        "definition": query,
        "query": {"query": query, "refId": label},
        "refresh": 2,
        "hide": 0,
        "includeAll": has_all,
        **({"allValue": ".*", "current": {"text": "All", "value": "$__all"}} if has_all else {}),
    }


VARIABLES = (
    _variable("namespace", "diptych_info"),
    _variable("job", 'diptych_info{namespace=~"$namespace"}', has_all=False),
    _variable("class", f"diptych_time_to_first_token_seconds_count{{{ALL}}}"),
)


def _panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    x = y = 0
    for title, panels in ROWS:
        y, x = y + (HEIGHT if x else 0), 0
        place = {"h": 1, "w": WIDTH, "x": 0, "y": y}
        found.append(
            {"id": len(found) + 1, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
        )
        y += 1
        for panel in panels:
            if x + panel.width > WIDTH:
                x, y = 0, y + HEIGHT
            place = {"h": HEIGHT, "w": panel.width, "x": x, "y": y}
            found.append({"id": len(found) + 1, "gridPos": place, **_panel(panel)})
            x += panel.width
    return found


def _panel(panel: Panel) -> dict[str, Any]:
    letters = "ABCDEFGH"
    targets = [
        {"refId": letter, "datasource": SOURCE, "expr": query, "legendFormat": legend, "range": True}
        for letter, (legend, query) in zip(letters, panel.queries, strict=False)
    ]
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0} | ({"max": 1} if panel.unit == "percentunit" else {})
    if panel.kind == "timeseries":
        stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
        fill = 30 if panel.stacked else 5
        defaults["custom"] = {"drawStyle": "line", "lineWidth": 1, "fillOpacity": fill, "stacking": stacking}
        legend = {"displayMode": "list", "placement": "bottom", "showLegend": True}
        options: dict[str, Any] = {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
    else:
        options = {"reduceOptions": {"calcs": ["lastNotNull"], "values": False}, "graphMode": "area"}
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": targets,
    }


def dashboard_json() -> str:
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    PAGE.write_text(dashboard_json())
