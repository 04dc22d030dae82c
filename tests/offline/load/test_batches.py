"""Static batches: duration, throughput and latency are three things, and none is written in another's column."""

from dataclasses import replace

import pytest

from cluster.offline.load.batches import Sweep, sizes_of
from cluster.offline.report.batches import HEADERS, batch_curves, batch_table
from cluster.offline.report.style import png
from cluster.offline.scoring.batches import Batch, batch, batch_figures
from cluster.offline.scoring.records import RequestOutcome
from cluster.offline.workload.arrivals import WorkloadError
from tests.offline.scoring.made import refused, split_run, steady


def test_a_batch_of_three_by_hand() -> None:
    """Sent at 1 s: 4 tokens end at 2 s, 4 at 3 s, 8 at 5 s."""
    run = replace(
        split_run(), served=(steady(0, 1.0, 0.4, 0.2, 4), steady(1, 1.0, 0.5, 0.5, 4), steady(2, 1.0, 0.5, 0.5, 8))
    )
    found = batch(run)
    assert (found.size, found.finished, found.output_tokens) == (3, 3, 16)
    assert found.duration_s == pytest.approx(4.0)
    assert found.throughput == pytest.approx(16 / 4.0)
    assert found.latency_s == pytest.approx((1.0 + 2.0 + 4.0) / 3)
    assert found.ttft_s == pytest.approx((0.4 + 0.5 + 0.5) / 3)


def test_what_failed_has_no_latency_but_is_counted() -> None:
    run = replace(
        split_run(), served=(steady(0, 0.0, 1.0, 0.5, 3), refused(1, 0.0), refused(2, 0.0, RequestOutcome.FAILED))
    )
    found = batch(run)
    assert (found.size, found.finished, found.latency_s) == (3, 1, 2.0)
    nothing = batch(replace(run, served=run.served[1:]))
    assert (nothing.throughput, nothing.duration_s, nothing.latency_s) == (0.0, 0.0, None)
    figures = batch_figures([nothing])
    assert figures.failed == 2 and figures.latency_s is None
    assert batch_table([figures], "1/1").rows[0][3:5] == ("-", "-")


def test_repeats_are_told_by_their_medians() -> None:
    made = [Batch(2, 2, tokens, 2.0, latency, 0.5) for tokens, latency in ((40, 1.0), (10, 3.0), (20, 1.5))]
    found = batch_figures(made)
    assert found.throughput == (10.0, 5.0, 20.0) and found.latency_s == (1.5, 1.0, 3.0) and found.repeats == 3
    row = dict(zip(HEADERS, batch_table([found], "8/8").rows[0], strict=True))
    assert row["throughput, output\ntokens/s of the batch"] == "10 (5..20)"
    assert row["average latency\nof a request, s"] == "1.5 (1..3)"
    assert row["duration of the\nbatch, s"] == "2"
    assert png(batch_curves([found]))[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match="no repeats of one"):
        batch_figures([made[0], replace(made[0], size=3)])


def test_sizes_as_they_are_written() -> None:
    assert sizes_of("1..128") == (1, 2, 4, 8, 16, 32, 64, 128)
    assert sizes_of("3..20") == (3, 6, 12, 20) and sizes_of("1,5,9") == (1, 5, 9) and sizes_of("4..4") == (4,)
    for bad in ("", "a", "0..4", "4,2", "2,2", "8..4", "1..5000", "1..", "-1"):
        with pytest.raises(WorkloadError, match="--batches is"):
            sizes_of(bad)


def test_every_repeat_has_the_same_lengths_and_prompts_of_its_own() -> None:
    wanted = Sweep((2, 4), 2, "10-30/5-9", seed=3)
    assert wanted.turns == (2, 4, 2, 4)
    first, again = wanted.workload(4, 1), wanted.workload(4, 3)
    lengths = [[(each.prompt_tokens, each.output_tokens) for each in one.arrivals] for one in (first, again)]
    assert lengths[0] == lengths[1] and len(lengths[0]) == 4
    assert not {each.prefix for each in first.arrivals} & {each.prefix for each in again.arrivals}
