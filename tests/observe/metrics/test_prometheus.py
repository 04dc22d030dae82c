"""A real Prometheus scrapes the gateways of a cluster, with the chart's rules, and is asked what it knows."""

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from tests.observe.metrics.boards import BOARD, RULES, names, put_in, queries, rules
from tests.observe.metrics.monitored import Monitored, monitored
from tests.observe.metrics.prometheus import Prometheus, program, prometheus

pytestmark = pytest.mark.asyncio(loop_scope="module")

SENT = (  # gateway, prompt tokens, tokens, class
    *((0, 40 + n, 12, "fast") for n in range(4)),
    *((1, 50 + n, 9, "hopeless") for n in range(3)),
    *((0, 30 + n, 6, "default") for n in range(2)),
)
ANSWERS = len(SENT)
PROMPT_TOKENS = sum(num_prompt for _, num_prompt, *_ in SENT)
TOKENS = sum(num_tokens for *_, num_tokens, _ in SENT)
GAPS = TOKENS - ANSWERS
SEEN_S = 20.0
LABEL_VALUES = re.compile(r"label_values\((.*), (\w+)\)")


@dataclass(frozen=True)
class Subject:
    cluster: Monitored
    prometheus: Prometheus


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def subject(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Subject]:
    """Everything was sent, and has been scraped."""
    program("prometheus")
    folder = Path(tmp_path_factory.mktemp("prometheus"))
    async with monitored() as cluster, prometheus(cluster.targets, RULES, folder) as there:
        subject = Subject(cluster, there)
        await until(subject, "count(diptych_info)", 2.0)  # series that were there before are seen to grow
        for sent in SENT:
            await cluster.complete(*sent)
        await until(subject, 'sum(diptych_requests_total{outcome="completed"})', ANSWERS)
        yield subject


async def found(subject: Subject, expression: str) -> dict[tuple[tuple[str, str], ...], float]:
    """What there is, as soon as there is something: a scrape that fails leaves a gap."""
    async with asyncio.timeout(SEEN_S):
        while not (values := await subject.prometheus.query(expression)):
            await asyncio.sleep(0.05)
    return values


async def until(subject: Subject, expression: str, value: float) -> None:
    async with asyncio.timeout(SEEN_S):
        while (there := await subject.prometheus.number(expression)) != value:
            assert there is None or there < value, f"{expression} is {there}"
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ('sum(diptych_requests_total{outcome="completed"})', ANSWERS),
        ("sum(diptych_requests_total)", ANSWERS),
        ("sum(diptych_prompt_tokens_total)", PROMPT_TOKENS),
        ("sum(diptych_generated_tokens_total)", TOKENS),
        ("sum(diptych_time_to_first_token_seconds_count)", ANSWERS),
        ('sum(diptych_time_to_first_token_seconds_bucket{le="2560.0"})', ANSWERS),
        ("sum(diptych_inter_token_seconds_count)", GAPS),
        ("sum(diptych_time_per_output_token_seconds_count)", ANSWERS),
        ('sum(diptych_request_seconds_count{class="hopeless"})', 3),
        ('sum(diptych_request_seconds_count{gateway="gateway-1"})', 3),
        ("sum(diptych_request_prompt_tokens_sum)", PROMPT_TOKENS),
        ('sum(diptych_ledger_seconds_count{part="prefill_compute"})', ANSWERS),
        ("sum(diptych_transfer_bytes_count)", ANSWERS),
        ("sum(max by (worker) (diptych_worker_transfers_total))", ANSWERS),
        ("sum(max by (worker) (diptych_worker_prefix_query_tokens_total))", 2 * PROMPT_TOKENS),
        ('sum(diptych_slo_requests_total{class="fast", kind="both", attained="yes"})', 4),
        ('sum(diptych_slo_requests_total{class="hopeless", kind="ttft", attained="no"})', 3),
        ('max(diptych_workers{role="decode", state="ready"})', 2),
        ("sum(vllm:generation_tokens_total)", TOKENS),
        ('sum(vllm:request_success_total{finished_reason="length"})', ANSWERS),
        ("sum(vllm:e2e_request_latency_seconds_count)", ANSWERS),
        ('count(vllm:kv_cache_usage_perc{model_name="simulated"})', 3),
    ],
)
async def test_prometheus_counts_the_sent_requests(subject: Subject, expression: str, value: float) -> None:
    await until(subject, expression, value)


async def test_the_parts_of_the_ledger_are_what_requests_took(subject: Subject) -> None:
    parts = await subject.prometheus.number("sum(last_over_time(diptych_ledger_seconds_sum[1m]))")
    whole = await subject.prometheus.number('sum(last_over_time(diptych_request_seconds_sum{outcome="completed"}[1m]))')
    assert parts is not None and whole is not None
    assert 0.5 * whole < parts <= whole, "the ledger ends with the last token, the request a little later"


async def test_gateways_and_workers_report_the_same_transfers(subject: Subject) -> None:
    moved = await subject.prometheus.number("sum(last_over_time(diptych_transfer_bytes_sum[1m]))")
    assert moved and moved > 0
    await until(subject, "sum(max by (worker) (diptych_worker_transfer_bytes_total))", moved)


@pytest.mark.parametrize("panel", queries())
async def test_every_dashboard_panel_has_data(subject: Subject, panel: str) -> None:
    await found(subject, queries()[panel])


async def test_the_variables_of_the_dashboard_have_values(subject: Subject) -> None:
    values = {}
    for variable in BOARD["templating"]["list"][1:]:
        series, label = LABEL_VALUES.findall(put_in(variable["definition"]))[0]
        there = await subject.prometheus.ask(f"label/{label}/values", **{"match[]": series})
        values[variable["name"]] = set(there)
    assert values == {"namespace": set(), "job": {"diptych"}, "class": {"default", "fast", "hopeless"}}


async def test_the_rules_are_evaluated_and_an_idle_cluster_has_no_alert(subject: Subject) -> None:
    async with asyncio.timeout(SEEN_S):
        while any(rule["health"] == "unknown" for rule in await evaluated(subject)):
            await asyncio.sleep(0.05)
    received = await evaluated(subject)
    assert len(received) == len(rules())
    assert {rule["name"]: rule.get("lastError") for rule in received if rule["health"] != "ok"} == {}
    assert not [rule["name"] for rule in received if rule["type"] == "alerting" and rule["state"] == "firing"]
    recorded = {each["record"] for each in rules() if "record" in each}
    for name in recorded:
        await found(subject, name)
    await found(subject, 'diptych:slo_attainment:ratio_rate5m{kind="ttft", class="hopeless"} == 0')
    await found(subject, 'diptych:slo_attainment:ratio_rate5m{kind="both", class="fast"} == 1')


async def evaluated(subject: Subject) -> list[dict[str, str]]:
    groups = (await subject.prometheus.ask("rules"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


async def test_every_queried_series_was_scraped(subject: Subject) -> None:
    asked = set().union(*map(names, [*queries().values(), *(rule["expr"] for rule in rules())]))
    scraped = set(await subject.prometheus.ask("label/__name__/values"))
    assert asked and asked <= scraped, asked - scraped
