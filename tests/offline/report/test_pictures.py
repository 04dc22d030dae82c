"""Pictures show the right figures and are deterministic."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.offline.report.html import pictures
from cluster.offline.report.pictures import (
    attainment_curves,
    goodput_bars,
    latency_curves,
    phase_bars,
    request_gantt,
    scatter,
)
from cluster.offline.report.spans import phases
from cluster.offline.report.style import NoPictures, png, save
from tests.offline.report.compared_systems import TEST_SLO, systems
from tests.offline.scoring.made import refused, served, split_ledger, split_run
from workers.request import SLO


def panel(picture: Any) -> Any:
    return picture.axes[0]


def texts(picture: Any) -> str:
    shown = [axes.get_title() + axes.get_xlabel() + axes.get_ylabel() for axes in picture.axes]
    shown += [text.get_text() for axes in picture.axes for text in axes.texts + axes.get_yticklabels()]
    shown += [text.get_text() for legend in picture.legends for text in legend.get_texts()]
    return "\n".join(shown)


def test_bars_are_as_long_as_the_goodput_per_gpu() -> None:
    both = systems()
    picture = goodput_bars(both)
    widths = sorted(bar.get_width() for bar in panel(picture).patches)
    assert widths == pytest.approx(sorted(goodput.per_gpu for system in both for goodput in system.goodputs))
    for word in (
        "TTFT <= 0.06 s and TPOT <= 0.02 s",
        "at least 90 %",
        "at least 99 %",
        "(4 GPUs)",
        "not attainable",
        "CI",
    ):
        assert word in texts(picture)


def test_curves_pass_through_the_mean_attainment() -> None:
    both = systems()
    picture = attainment_curves(both)
    line = next(line for line in panel(picture).lines if line.get_label().startswith("split by hand"))
    goodput = max(both[0].goodputs, key=lambda each: len(each.probes))
    assert list(line.get_xdata()) == pytest.approx([rate / 4 for rate, _ in goodput.curve])
    assert list(line.get_ydata()) == pytest.approx([100 * attained.both for _, attained in goodput.curve])


def test_every_finished_request_is_a_point_and_those_that_meet_the_slo_are_in_the_box() -> None:
    both = systems()
    runs = [system.run for system in both if system.run is not None]
    picture = scatter(runs, TEST_SLO)
    for axes, run in zip(picture.axes, runs, strict=True):
        kept, missed = axes.lines[0], axes.lines[1]
        assert len(kept.get_xdata()) + len(missed.get_xdata()) == sum(len(each.token_s) > 1 for each in run.served)
        assert all(ttft <= 0.06 for ttft in kept.get_xdata()) and all(tpot <= 20.0 for tpot in kept.get_ydata())
        assert axes.get_xlim()[1] > 0.06 and axes.get_ylim()[1] > 20.0
    assert "3 not served" in texts(picture)


def test_the_axes_of_latencies_name_units_and_percentiles() -> None:
    shown = texts(latency_curves(systems()))
    for word in ("TTFT, s", "TPOT, ms", "E2E, s", "p50", "p90", "p99", "SLO", "per GPU"):
        assert word in shown


def test_a_requests_bars_are_its_phases() -> None:
    one = split_run(1).served[0]
    picture = request_gantt(one)
    widths = [bar.get_width() for bar in panel(picture).patches]
    lengths = [(span.end_ns - span.begin_ns) / 1e6 for span in phases(one)]
    assert sorted(widths) == pytest.approx(sorted([*lengths, 30.0]))
    for word in ("transfer, elapsed", "prefill compute", "prefill-0 to decode-0", "300 prompt tokens", "ms since"):
        assert word in texts(picture)


def test_a_long_request_is_shown_in_seconds() -> None:
    ledger = split_ledger(queue_ms=20_000, compute_ms=40, wait_ms=10, decode_ms=105)
    shown = texts(request_gantt(served(0, 0.0, [20.045, 20.163], ledger=ledger)))
    for word in ("s since the request arrived", "20 s", "40 ms", "TTFT 20 s"):
        assert word in shown
    assert "ms since" not in shown


@pytest.mark.grid
@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_the_same_figures_give_the_same_bytes(tmp_path: Path, suffix: str) -> None:
    run = split_run(4)
    one, two = (save(scatter([run], TEST_SLO), tmp_path / f"{n}" / f"a{suffix}").read_bytes() for n in range(2))
    assert one == two
    assert save(request_gantt(run.served[0]), tmp_path / f"b{suffix}").read_bytes() != one


def test_everything_is_drawn_for_a_run_without_a_served_request() -> None:
    run = replace(split_run(1), served=(refused(0, 0.0),), steps=(), workers=())
    assert png(scatter([run], SLO())).startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="to draw"):
        request_gantt(run.served[0])
    for across in (goodput_bars, attainment_curves, latency_curves, phase_bars):
        with pytest.raises(ValueError, match="to draw"):
            across([])


def test_pictures_have_distinct_names() -> None:
    made = list(pictures(systems()))
    names = [each.name for each in made]
    assert len(set(names)) == len(names)
    assert {"goodput", "attainment", "latency", "requests", "phases", "request-0-p50"} <= set(names)


def test_without_matplotlib_there_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(NoPictures, match=r"pip install 'diptych\[pictures\]'"):
        goodput_bars(systems())
