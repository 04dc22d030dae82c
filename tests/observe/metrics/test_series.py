"""The series of a gateway are what docs/reference/metrics.md says, add up, and stay as many as they are."""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from prometheus_client import REGISTRY
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from cluster.events import Completed
from cluster.observe.ledger import PHASES, LatencyLedger
from cluster.observe.metrics.vllm import vllm_families
from cluster.observe.request_metrics import RequestMetrics
from cluster.policy.estimate.histograms import TOKENS, HistogramBuilder, RequestTotals
from cluster.policy.slo_attainment import OTHER, OUTCOMES, Ended, GatewayAttainment
from cluster.spec import MetricsSpec, Role, SpecError
from cluster.spec_file import parse_spec
from diptych.view import REFUSALS, ClusterView, PoolView, WorkerState, WorkerView
from kvtransfer.ticket import TransferReport
from tests.observe.exposition import exposition
from tests.observe.metrics.boards import names, queries, rules
from tests.observe.metrics.monitored import Monitored, monitored
from tests.observe.metrics.prometheus import promtool
from workers.request import SLO, FinishReason, Request
from workers.stats import BorrowStats, Pulls, TierStats, WorkerStats

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "metrics.md"
ROW = re.compile(r"^\| `((?:diptych_|vllm:)\w+)` \| (\w+) \| (.*?) \| (.*?) \|$", re.M)
COMMON = {"gateway", "model_name", "engine", "le"}
REPORT = TransferReport("lease", "tcp", "path", 3, 4096, 1, 3, 1, 3, 0.002, 0.001, 0.003)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def texts() -> list[str]:
    """What both gateways tell after an answer each."""
    async with monitored() as cluster:
        return await series_of(cluster)


async def series_of(cluster: Monitored) -> list[str]:
    for gateway in (0, 1):
        await cluster.complete(gateway, 40, 8, "fast")
    await cluster.complete(0, 2100, 8, "fast")  # borrows
    return [await cluster.exposition(gateway) for gateway in (0, 1)]


@cache
def families(text: str) -> list[Metric]:
    return list(text_string_to_metric_families(text))


def shown(family: Metric) -> str:
    """Its name as PromQL has it, without what a histogram adds."""
    return f"{family.name}_total" if family.type == "counter" else family.name


def rows(found: list[Metric]) -> Iterator[tuple[str, str, str, str]]:
    for family in found:
        labels = sorted({label for sample in family.samples for label in sample.labels} - COMMON)
        yield shown(family), family.type, ", ".join(f"`{label}`" for label in labels), family.documentation


def value(text: str, name: str, **labels: str) -> float:
    samples = [sample for family in families(text) for sample in family.samples if sample.name == name]
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


def test_the_documented_metrics_are_the_exported_ones(texts: list[str]) -> None:
    wanted = list(rows(families(texts[0])))
    table = "\n".join(f"| `{name}` | {kind} | {labels} | {words} |" for name, kind, labels, words in wanted)
    assert ROW.findall(PAGE.read_text()) == wanted, f"docs/reference/metrics.md should have these rows:\n{table}"


def test_every_series_of_dashboard_and_rules_exists(texts: list[str]) -> None:
    asked = set().union(*map(names, [*queries().values(), *(rule["expr"] for rule in rules())]))
    there = {sample.name for family in families(texts[0]) for sample in family.samples}
    assert {name for name in asked if ":" not in name} <= there


def test_our_metrics_have_base_units_and_a_gateway_label(texts: list[str]) -> None:
    for number, text in enumerate(texts):
        for family in families(text):
            if family.name.startswith("vllm:"):
                assert all({"model_name", "engine"} <= sample.labels.keys() for sample in family.samples)
                continue
            assert family.name.startswith("diptych_")
            assert not re.search(r"_(ms|milliseconds|us|kb|mb|percent)(_|$)", family.name)
            assert {sample.labels["gateway"] for sample in family.samples} == {f"gateway-{number}"}


def test_promtool_accepts_our_metrics(texts: list[str]) -> None:
    ours = [line for line in texts[0].splitlines() if "vllm:" not in line]
    assert promtool("check", "metrics", stdin="\n".join(ours) + "\n") == ""


def test_vllm_metrics_equal_ours(texts: list[str]) -> None:
    text = texts[0]
    for theirs, ours in (
        ("vllm:generation_tokens_total", "diptych_generated_tokens_total"),
        ("vllm:prompt_tokens_total", "diptych_prompt_tokens_total"),
        ("vllm:request_success_total", "diptych_finished_total"),
        ("vllm:time_to_first_token_seconds_sum", "diptych_time_to_first_token_seconds_sum"),
        ("vllm:time_to_first_token_seconds_bucket", "diptych_time_to_first_token_seconds_bucket"),
        ("vllm:inter_token_latency_seconds_count", "diptych_inter_token_seconds_count"),
        ("vllm:e2e_request_latency_seconds_sum", "diptych_request_seconds_sum"),
        ("vllm:nixl_bytes_transferred_sum", "diptych_transfer_bytes_sum"),
        ("vllm:prefix_cache_queries_total", "diptych_worker_prefix_query_tokens_total"),
    ):
        assert value(text, theirs) == pytest.approx(value(text, ours)) and value(text, ours) > 0, theirs
    parts = ("prefill", "decode", "inference")
    prefill, decode, both = (value(text, f"vllm:request_{part}_time_seconds_sum") for part in parts)
    assert both == pytest.approx(prefill + decode)
    queued = value(text, "vllm:request_queue_time_seconds_sum")
    assert queued + both == pytest.approx(value(text, "diptych_ledger_seconds_sum"))


def test_only_one_gateway_exports_vllm_metrics_of_workers(texts: list[str]) -> None:
    engines = [
        {sample.labels["engine"] for family in families(text) for sample in family.samples if "engine" in sample.labels}
        for text in texts
    ]
    assert engines == [{"gateway-0", "prefill-0", "decode-0", "decode-1"}, {"gateway-1"}]


@pytest.mark.parametrize("outcome", [outcome for outcome in OUTCOMES if outcome != "completed"])
def test_vllm_metrics_of_requests_count_only_completed_ones(outcome: str) -> None:
    tally = RequestMetrics(["fast"])
    tally.add(Ended(outcome, "fast", waited_s=0.5), None, ())
    text = exposition(replace(GatewayAttainment(), totals=tally.snapshot()), "gateway-0", compat="vllm")
    assert value(text, "diptych_request_seconds_count", outcome=outcome) == 1
    theirs = [sample for family in families(text) for sample in family.samples if family.name.startswith("vllm:")]
    assert theirs and {sample.value for sample in theirs} == {0.0}


def test_vllm_latency_counts_completed_requests() -> None:
    tally = RequestMetrics([])
    ledger = LatencyLedger((("admission", 10**9),), (), 10**9, 10**9)
    tally.add(Ended("completed", waited_s=3.0), Completed(FinishReason.STOP, 5, 4, 0, 1, ledger, ()), ())
    tally.add(Ended("refused"), None, ())
    text = exposition(replace(GatewayAttainment(), totals=tally.snapshot()), "gateway-0", compat="vllm")
    name = "vllm:e2e_request_latency_seconds"
    assert (value(text, f"{name}_count"), value(text, f"{name}_sum")) == (1, 3.0)
    assert value(text, "vllm:request_success_total") == 1


def test_vllm_waiting_requests_include_gateways_and_workers() -> None:
    workers = tuple(WorkerView(name, "p", Role.MIXED, WorkerState.READY, stats=STATS) for name in ("w0", "w1"))
    view = ClusterView(1, "c", None, workers, gateways=("gateway-x", "gateway-a"))
    texts = [
        exposition(replace(GatewayAttainment(), queued=queued), name, view, compat="vllm")
        for name, queued in (("gateway-x", 5), ("gateway-a", 70))
    ]
    assert value(texts[1], "vllm:num_requests_waiting", engine="gateway-a") == 70
    assert sum(value(text, "vllm:num_requests_waiting") for text in texts) == 5 + 70 + 2 * STATS.waiting
    assert sum(value(text, "vllm:num_requests_running") for text in texts) == 2 * STATS.running


def test_vllm_metrics_are_exported_only_if_configured() -> None:
    assert "vllm:" not in exposition(GatewayAttainment(), "gateway-0")
    assert "vllm:" in exposition(GatewayAttainment(), "gateway-0", compat="vllm")
    pools = {"model": "m", "pools": [{"name": "both", "role": "mixed"}]}
    assert parse_spec(pools).metrics == MetricsSpec(None)
    assert parse_spec(pools | {"metrics": {"compat": "vllm"}}).metrics.compat == "vllm"
    with pytest.raises(SpecError, match="compat 'sglang' is not one of vllm"):
        parse_spec(pools | {"metrics": {"compat": "sglang"}})


TIER = TierStats("disk", 24, 25, 26, 27, 28, 29, 30, 31, 32, "", 33, 37.5, 38)
LOANS = BorrowStats("p0", 46, 47, 48.5, 49, 50, (("dtype", 51), ("no-room", 52)))
STATS = WorkerStats(
    queued_tokens=1, waiting=2, running=3, reserved=4, leases=5, free_blocks=60, cached_blocks=7, quarantined_blocks=8,
    total_blocks=100, steps=10, step_s=0.5, preemptions=11, expired_leases=12, bubble_share=0.25, sought_tokens=13,
    found_tokens=62, tiers=(TIER,), pulls=Pulls(15, 16, 17, 18, 19, 20.5), non_finite=23,
    lent_blocks=34, borrowed_blocks=35, expired_loans=36, borrowed=(LOANS,),
    fetched_tokens=5, fetched_saved_s=1.5, device_saved_s=0.5, device_lent_tokens=6, adapters=("a", "b"),
)  # fmt: skip
TOLD = {
    "running_requests": 3, "waiting_requests": 2, "reserved_requests": 4, "queued_tokens": 1, "kv_blocks": 100,
    "kv_used_blocks": 40, "kv_cached_blocks": 7, "kv_quarantined_blocks": 8, "leases": 5, "step_seconds": 0.5,
    "bubble_ratio": 0.25, "adapters": 2, "memory_bytes": 21, "steps_total": 10, "preemptions_total": 11,
    "prefix_query_tokens_total": 13, "prefix_hit_tokens_total": 62,
    "cache_hit_tokens_total": 62, "cache_saved_seconds_total": 39.5, "cache_lent_tokens_total": 44,
    "cache_blocks": 24, "cache_capacity_blocks": 25, "cache_healthy": 1,
    "cache_pinned_blocks": 33,
    "cache_read_bytes_total": 28, "cache_written_bytes_total": 29, "cache_dropped_blocks_total": 30,
    "cache_timeouts_total": 31, "cache_failures_total": 32,
    "expired_leases_total": 12, "lent_blocks": 34, "borrowed_blocks": 35, "expired_loans_total": 36,
    "loan_blocks": 46, "loan_bytes": 47, "loan_oldest_seconds": 48.5, "loans_total": 49, "loan_recalls_total": 50,
    "loan_refusals_total": 103, "non_finite_requests_total": 23,
    "transfers_total": 15, "failed_transfers_total": 16,
    "corrupt_transfers_total": 17, "transfer_bytes_total": 18, "transfer_descriptors_total": 19,
    "transfer_seconds_total": 20.5, "restarts_total": 45, "consecutive_failures": 3, "role": 2,
}  # fmt: skip


def test_live_workers_export_statistics_and_dead_ones_role_and_failures() -> None:
    living = WorkerView("d0", "decode", Role.DECODE, WorkerState.READY, stats=STATS, memory_bytes=21, restarts=22)
    counts: dict[str, Any] = {"restarts": 23, "failures": 3}
    dead = WorkerView("d1", "decode", Role.DECODE, WorkerState.DEAD, stats=STATS, memory_bytes=21, **counts)
    view = ClusterView(1, "c", None, (living, dead), pools=(PoolView("decode", Role.DECODE, 3, 1, 4),))
    text = exposition(GatewayAttainment(), "gateway-0", view, compat="vllm")
    there = {sample.name for family in families(text) for sample in family.samples}
    found = {name for name in there if name.startswith("diptych_worker_")}
    assert {name.removeprefix("diptych_worker_"): value(text, name) for name in found} == TOLD
    hits = [value(text, "diptych_worker_cache_hit_tokens_total", tier=tier) for tier in ("device", "fetched", "disk")]
    assert hits == [30, 5, 27]
    refused = {reason: value(text, "diptych_worker_loan_refusals_total", reason=reason) for reason in REFUSALS}
    assert refused == dict.fromkeys(REFUSALS, 0) | {"dtype": 51, "no-room": 52}
    assert value(text, "diptych_workers", role="decode", state="ready") == 1
    assert value(text, "diptych_workers", role="decode", state="dead") == 1
    assert (value(text, "diptych_pool_workers"), value(text, "diptych_pool_target_workers")) == (1, 3)
    theirs = ("kv_cache_usage_perc", "num_preemptions_total", "nixl_num_failed_transfers_total")
    assert [value(text, f"vllm:{name}") for name in theirs] == [pytest.approx(0.4), 11, 16]
    assert value(text, "vllm:nixl_num_kv_expired_reqs_total") == 12


def test_no_metric_is_registered_globally(texts: list[str]) -> None:
    assert not [family.name for family in REGISTRY.collect() if family.name.startswith(("diptych", "vllm"))]


# ---- counting ----------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(0, 1e7), st.integers(1, 5)), max_size=40))
def test_a_histogram_puts_each_value_below_its_bound(values: list[tuple[float, int]]) -> None:
    counting = HistogramBuilder(TOKENS, [()])
    for seen, times in values:
        counting.add_all((), [seen] * times)
    (row,) = counting.snapshot().rows
    for index, bound in enumerate(TOKENS):
        assert sum(row.counts[: index + 1]) == sum(times for seen, times in values if seen <= bound)
    assert sum(row.counts) == sum(times for _, times in values)
    assert row.total == pytest.approx(sum(seen * times for seen, times in values))


def asked(class_name: str) -> Request:
    return Request("a", (1, 2), slo=SLO(class_name=class_name))


ENDS = st.tuples(st.sampled_from(OUTCOMES), st.text(max_size=4), st.none() | st.floats(0, 1e4), st.booleans())


@given(st.lists(ENDS, max_size=80))
def test_labels_are_bounded_by_the_specification(ends: list[tuple[str, str, float | None, bool]]) -> None:
    tally = RequestMetrics(["fast", "batch"])
    for outcome, class_name, ttft_s, moved in ends:
        (count_tokens,) = tally.token_observers(asked(class_name), "decode-0")
        count_tokens(3, [0.25 / 3] * 3)
        tally.add(Ended(outcome, class_name, ttft_s=ttft_s, waited_s=1.0), None, [REPORT] * moved)
    series_of = tally.snapshot()
    known = {"default", "fast", "batch", OTHER}
    assert {row.labels[0] for row in series_of.gaps.rows} | {row.labels[0] for row in series_of.ttft.rows} <= known
    assert len(series_of.requests.rows) <= len(known) * len(OUTCOMES)
    assert sum(sum(row.counts) for row in series_of.requests.rows) == len(ends)
    assert sum(sum(row.counts) for row in series_of.ttft.rows) == sum(ttft_s is not None for _, _, ttft_s, _ in ends)
    assert sum(row.total for row in series_of.gaps.rows) == pytest.approx(0.25 * len(ends)), (
        "three tokens shared each gap"
    )
    assert sum(row.total for row in series_of.transfer_bytes.rows) == 4096 * sum(moved for *_, moved in ends)


PARTS = st.lists(st.tuples(st.sampled_from(PHASES), st.integers(0, 10**12)), max_size=8, unique_by=lambda part: part[0])


@given(PARTS, PARTS)
def test_ledger_parts_and_vllm_stages_sum_to_the_total(
    first: list[tuple[str, int]], rest: list[tuple[str, int]]
) -> None:
    ttft_ns, rest_ns = (sum(ns for _, ns in parts) for parts in (first, rest))
    ledger = LatencyLedger(tuple(first), tuple(rest), ttft_ns, ttft_ns + rest_ns)
    tally = RequestMetrics([])
    tally.add(Ended("completed"), Completed(FinishReason.STOP, 5, 4, 2, 1, ledger, ()), ())
    series_of = tally.snapshot()
    whole_s = ledger.total_ns / 1e9
    assert sum(row.total for row in series_of.parts.rows) == pytest.approx(whole_s)
    assert {row.labels[0] for row in series_of.parts.rows if sum(row.counts)} == {name for name, _ in first + rest}
    stages = {row.labels[0]: row.total for row in series_of.stages.rows}
    assert stages["queue"] + stages["inference"] == pytest.approx(whole_s)
    assert stages["prefill"] + stages["decode"] == pytest.approx(stages["inference"])
    assert all(seconds >= -1e-9 for seconds in stages.values())
    assert (series_of.prompt_tokens, series_of.cached_tokens, dict(series_of.finishes)["stop"]) == (5, 2, 1)


def test_every_finish_reason_has_a_vllm_reason() -> None:
    tallied = replace(RequestTotals(), finishes=tuple((reason.value, 1) for reason in FinishReason))
    series_of = replace(GatewayAttainment(), totals=tallied)
    (ends,) = [
        each for each in vllm_families(series_of, "gateway-1", ClusterView(0, "", None, ())) if "success" in each.name
    ]
    assert sum(sample.value for sample in ends.samples) == len(FinishReason)


def test_a_tier_that_stopped_or_stores_nothing_is_unhealthy() -> None:
    for tier in (
        structs.replace(TIER, problem="reads stopped"),
        TierStats("disk", dropped_blocks=7),
    ):
        worker = WorkerView("d0", "decode", Role.DECODE, WorkerState.READY, stats=WorkerStats(tiers=(tier,)))
        text = exposition(GatewayAttainment(), "gateway-0", ClusterView(1, "c", None, (worker,)))
        assert value(text, "diptych_worker_cache_healthy", tier="disk") == 0
