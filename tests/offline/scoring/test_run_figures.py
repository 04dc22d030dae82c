"""Figures of runs whose answers are known."""

import json
import math
from array import array
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.offline.scoring.figures import DEFINITIONS, Attainment, attainment, figures, percentiles, slo_text
from cluster.offline.scoring.records import RequestOutcome, RequestRecord, Run, WorkerRecord, worst_mean_s
from tests.offline.scoring.made import refused, served, split_run, steady
from workers.request import SLO

ANY = SLO()


def run(requests: list[RequestRecord], seconds: float = 10.0) -> Run:
    return Run("s", "w", "virtual", 0, 2, seconds, 0.1, tuple(requests))


def test_percentiles_of_eleven_steady_requests_are_those_by_hand() -> None:
    made = figures(run([steady(n, n, 0.1 * (n + 1), 0.01 * (n + 1), 5) for n in range(11)]), ANY)
    assert made.ttft_s is not None and made.tpot_s is not None and made.e2e_s is not None
    assert (made.ttft_s.count, made.ttft_s.p50, made.ttft_s.p90) == (11, pytest.approx(0.6), pytest.approx(1.0))
    assert made.ttft_s.p99 == pytest.approx(1.09)  # 9 tenths of the way from the 10th to the 11th
    assert (made.tpot_s.mean, made.tpot_s.max) == (pytest.approx(0.06), pytest.approx(0.11))
    assert made.e2e_s.p50 == pytest.approx(0.6 + 4 * 0.06)
    assert made.normalized_s is not None and made.normalized_s.p50 == pytest.approx((0.6 + 4 * 0.06) / 5)
    assert made.offered_rate == pytest.approx(1.0)
    assert made.output_tokens_rate == pytest.approx(5.5)


def test_all_gaps_are_pooled_and_the_worst_tenth_is_each_requests_own() -> None:
    smooth = steady(0, 0.0, 0.1, 0.01, 21)
    stalled = served(1, 0.0, [*(0.1 + 0.01 * n for n in range(18)), 1.27, 1.77])  # 17 gaps and two stalls
    made = figures(run([smooth, stalled]), ANY)
    assert made.tbt_s is not None and made.worst_tbt_s is not None
    assert made.tbt_s.count == 39
    assert made.tbt_s.max == pytest.approx(1.0)
    assert made.worst_tbt_s.max == pytest.approx((1.0 + 0.5) / 2)  # two of 19 gaps
    assert made.worst_tbt_s.p50 == pytest.approx((0.01 + 0.75) / 2)


def test_an_unserved_request_misses_its_slo_and_has_no_latency() -> None:
    outcomes = (RequestOutcome.REJECTED, RequestOutcome.FAILED, RequestOutcome.UNFINISHED)
    cut = served(3, 0.0, [0.05, 0.06], outcome=RequestOutcome.UNFINISHED)
    made = figures(run([steady(0, 0.0, 0.1, 0.01, 3), *(refused(n, 0.0, e) for n, e in enumerate(outcomes)), cut]), ANY)
    assert made.attainment == Attainment(0.2, 0.2, 0.2, 0.2)
    assert made.effective_capacity == 0.2
    assert (made.finished, made.rejected, made.failed, made.unfinished) == (1, 1, 1, 2)
    assert made.ttft_s is not None and made.ttft_s.count == 1
    assert made.output_tokens_rate == pytest.approx(0.5)


def test_one_token_has_no_tpot_and_misses_none() -> None:
    made = figures(run([steady(0, 0.0, 0.1, 0.0, 1), steady(1, 0.0, 0.1, 0.5, 3)]), SLO(1.0, 0.2))
    assert made.tpot_s is not None and made.tpot_s.count == 1
    assert (made.attainment.tpot, made.attainment.both) == (0.5, 0.5)


def test_a_run_in_which_nothing_happened_has_figures() -> None:
    for empty in (run([], 0.0), run([refused(0, 0.0)], 0.0)):
        made = figures(empty, SLO(1.0, 1.0))
        assert made.ttft_s is made.tbt_s is made.mfu is made.kv_occupancy is made.transfer_share is None
        assert made.attainment == Attainment(0.0, 0.0, 0.0, 0.0)
        json.dumps(made.as_json(), allow_nan=False)


def test_machines_are_counted_with_idle_ones() -> None:
    made = figures(split_run(), ANY)
    prefill, decode = made.pools
    assert made.gpus == 4  # one more than the workers have
    assert made.mfu == pytest.approx(0.25)
    assert made.kv_occupancy == pytest.approx(75 / 400)
    assert (decode.kv_occupancy, decode.busy_share) == (pytest.approx(0.25), pytest.approx(0.5))
    assert (prefill.workers, prefill.gpus, prefill.role) == (1, 2, "prefill")
    assert made.preemptions == 2
    assert made.cached_share == pytest.approx(0.25)


def test_shares_of_the_transfer_are_those_of_the_ledger() -> None:
    one = split_run(1)
    ledger = one.served[0].ledger
    made = figures(one, ANY)
    assert ledger is not None
    assert made.exposed_transfer_share == pytest.approx(10e6 / ledger.total_ns)
    assert made.transfer_share == pytest.approx(0.03 / (ledger.total_ns / 1e9))
    assert sum(seconds for _, seconds in made.phases_s) == pytest.approx(ledger.total_ns / 1e9)
    assert dict(made.phases_s)["prefill_compute"] == pytest.approx(0.04)


def test_pools_are_means_over_their_workers() -> None:
    pair = tuple(WorkerRecord(f"d-{n}", "decode", "decode", 1, 10, busy_s=float(2 + n)) for n in range(2))
    made = figures(replace(run([steady(0, 0.0, 0.1, 0.01, 2)]), workers=pair), ANY)
    assert made.pools[0].busy_share == pytest.approx(0.25)


def test_json_names_slo_gpus_and_metrics() -> None:
    written = json.loads(json.dumps(figures(split_run(), SLO(0.25, 0.1)).as_json(), allow_nan=False))
    assert (written["gpus"], written["slo"]["ttft_s"]) == (4, 0.25)
    assert set(written["ttft_s"]) == {"count", "mean", "p50", "p90", "p99", "max"}
    assert written["definitions"] == DEFINITIONS
    assert slo_text(SLO(tpot_s=0.1)) == "TPOT <= 0.1 s" and slo_text(ANY) == "no SLO"


@pytest.mark.parametrize(
    ("attained", "broken"),
    [
        (Attainment(0.95, 0.95, 0.92, 1.0), ()),
        (Attainment(0.5, 0.95, 0.5, 1.0), ("TTFT",)),
        (Attainment(0.8, 0.7, 0.6, 1.0), ("TPOT", "TTFT")),
        (Attainment(0.92, 0.92, 0.85, 1.0), ("TTFT and TPOT, of different requests",)),
        (Attainment(0.8, 0.8, 0.8, 0.8), ("requests not served",)),
    ],
)
def test_what_broke_is_named(attained: Attainment, broken: tuple[str, ...]) -> None:
    assert attained.broken(0.9) == broken


requests = st.lists(
    st.tuples(
        st.floats(0, 50), st.floats(0, 5), st.floats(0, 0.5), st.integers(0, 12), st.sampled_from(RequestOutcome)
    ),
    min_size=1,
    max_size=20,
)
bound = st.none() | st.floats(0, 5)


@settings(deadline=None)
@given(requests, bound, bound, st.floats(0, 2))
def test_attainment_never_falls_with_a_looser_slo(
    drawn: list[tuple[float, float, float, int, RequestOutcome]], ttft: float | None, tpot: float | None, more: float
) -> None:
    made = run([steady(n, at, first, gap, count, outcome=end) for n, (at, first, gap, count, end) in enumerate(drawn)])
    tight = attainment(made, SLO(ttft, tpot))
    loose = attainment(made, SLO(None if ttft is None else ttft + more, None if tpot is None else tpot + more))
    assert tight.both <= min(tight.ttft, tight.tpot) <= tight.served
    assert tight.ttft <= loose.ttft and tight.tpot <= loose.tpot and tight.both <= loose.both <= loose.served
    assert attainment(made, ANY).both == tight.served


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=60))
def test_percentiles_agree_with_numpy(samples: list[float]) -> None:
    made = percentiles(np.array(samples))
    assert made is not None
    for share, value in ((50, made.p50), (90, made.p90), (99, made.p99)):
        assert value == pytest.approx(np.percentile(samples, share))
    worst = sorted(samples)[-math.ceil(len(samples) / 10) :]
    assert worst_mean_s(np.array(samples)) == pytest.approx(sum(worst) / len(worst))


def test_a_worker_that_was_started_again_is_one_worker() -> None:
    starts = tuple(WorkerRecord("d-0", "decode", "decode", 1, 10, busy_s=2.0, used_block_s=20.0) for _ in range(2))
    made = figures(replace(run([steady(0, 0.0, 0.1, 0.01, 2)]), workers=starts), ANY)
    assert (made.pools[0].workers, made.pools[0].gpus) == (1, 1)
    assert made.pools[0].busy_share == pytest.approx(0.4)
    assert made.kv_occupancy == made.pools[0].kv_occupancy == pytest.approx(0.4)


def test_latencies_are_those_of_the_records() -> None:
    made = split_run()
    ours = figures(made, ANY)
    assert ours.ttft_s is not None and ours.tpot_s is not None
    assert ours.ttft_s.max == pytest.approx(max(each.ttft_s or 0.0 for each in made.served))
    assert ours.tpot_s.max == pytest.approx(max(each.tpot_s or 0.0 for each in made.served))


def test_two_million_gaps_are_scored() -> None:
    token_s = array("d", (0.01 * n for n in range(100)))
    made = run([served(n, 0.0, token_s) for n in range(20_000)], 100.0)
    done = figures(made, SLO(1.0, 1.0))
    assert done.tbt_s is not None and done.tbt_s.count == 20_000 * 99


def test_steps_that_were_only_counted_have_no_shares() -> None:
    counted = WorkerRecord("w", "pool", "mixed", 1, kv_blocks=100, steps=7)
    run = Run("s", "w", "real", 0, 1, 10.0, 10.0, (), workers=(counted,))
    found = figures(run, SLO())
    assert found.kv_occupancy is None
    assert (found.pools[0].busy_share, found.pools[0].kv_occupancy, found.pools[0].steps) == (None, None, 7)
