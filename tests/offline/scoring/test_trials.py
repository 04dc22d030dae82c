"""Configurations compared over seeds: intervals by hand, pairs within seeds, verdicts where intervals allow them."""

from dataclasses import replace

import pytest

from cluster.offline.report.style import png
from cluster.offline.report.trials import (
    by_text,
    has_verdicts,
    summary_lines,
    trial_intervals,
    trial_tables,
    verdict_map,
)
from cluster.offline.scoring.figures import figures
from cluster.offline.scoring.trials import METRICS, SeedRun, Trials, TrialVerdict, interval
from tests.offline.scoring.made import split_run, steady
from workers.request import SLO

TTFT = next(metric for metric in METRICS if metric.name == "TTFT p50")
KEPT = next(metric for metric in METRICS if metric.name == "TTFT and TPOT attainment")
TOKENS = next(metric for metric in METRICS if metric.name == "output tokens")
TEST_SLO = SLO(1.0, 0.1)


def trial(name: str, seed: int, ttft_s: float, *, load: str = "1 requests/s", colocated: bool | None = True) -> SeedRun:
    run = replace(split_run(), system=name, served=tuple(steady(n, 0.0, ttft_s, 0.05, 8) for n in range(4)))
    return SeedRun(name, colocated, load, seed, figures(run, TEST_SLO))


def test_an_interval_by_hand() -> None:
    found = interval([1.0, 2.0, 3.0])
    assert found.mean == 2.0 and found.high - 2.0 == pytest.approx(4.303 / 3**0.5) == 2.0 - found.low
    assert interval([5.0]) == interval([5.0, 5.0, 5.0]).__class__(5.0, 5.0, 5.0, 1)
    with pytest.raises(ValueError, match="at least one"):
        interval([])


def test_seeds_are_paired() -> None:
    """Seeds differ by a factor of ten, the configurations by a half in each: the ratio knows, the means would not."""
    ours = [trial("split", seed, 0.05 * 10**seed, colocated=False) for seed in range(3)]
    theirs = [trial("mixed", seed, 0.1 * 10**seed) for seed in range(3)]
    found = Trials([*ours, *theirs]).against_best(TTFT, "split", "1 requests/s")
    assert found is not None and found.other == "mixed" and found.verdict is TrialVerdict.BETTER
    assert (found.by.mean, found.by.low, found.by.high) == pytest.approx((0.5, 0.5, 0.5))
    assert by_text(found, TTFT) == "0.5x (0.5..0.5)"


def test_shares_are_compared_by_their_difference_even_at_zero() -> None:
    trials = Trials(
        [trial("split", seed, 0.5, colocated=False) for seed in range(2)]
        + [trial("mixed", seed, 5.0) for seed in range(2)]
    )
    found = trials.against_best(KEPT, "split", "1 requests/s")
    assert found is not None and found.by.mean == 1.0 and found.verdict is TrialVerdict.BETTER
    assert by_text(found, KEPT) == "+100 points (+100..+100)"
    worse = trials.against(KEPT, "mixed", "split", "1 requests/s")
    assert worse is not None and worse.verdict is TrialVerdict.WORSE


def test_the_best_colocated_is_the_best_at_this_figure() -> None:
    trials = Trials(
        [trial("slow", 0, 0.9), trial("quick", 0, 0.2), trial("split", 0, 0.1, colocated=False), trial("slow", 1, 0.9)]
    )
    assert trials.best(TTFT, "1 requests/s", trials.colocated) == "quick"
    assert trials.best(TTFT, "1 requests/s", trials.configurations) == "split"
    assert trials.best(TTFT, "9 requests/s", trials.colocated) is None


def test_one_seed_decides_nothing_and_noise_decides_nothing() -> None:
    single = Trials([trial("split", 0, 0.1, colocated=False), trial("mixed", 0, 0.9)])
    noisy = Trials(
        [trial("split", seed, ttft, colocated=False) for seed, ttft in enumerate((0.1, 0.9, 0.5))]
        + [trial("mixed", seed, ttft) for seed, ttft in enumerate((0.5, 0.3, 0.6))]
    )
    for trials in (single, noisy):
        found = trials.against_best(TTFT, "split", "1 requests/s")
        assert found is not None and found.verdict is TrialVerdict.EVEN


def test_intervals_stay_where_figures_can_lie() -> None:
    trials = Trials([trial("mixed", 0, 0.1), trial("mixed", 1, 5.0)])
    kept, ttft = (trials.mean(metric, "mixed", "1 requests/s") for metric in (KEPT, TTFT))
    assert kept is not None and (kept.low, kept.mean, kept.high) == (0.0, 0.5, 1.0)
    assert ttft is not None and ttft.low == 0.0 and ttft.high > 5.0


def test_a_run_is_counted_once() -> None:
    with pytest.raises(ValueError, match="ran twice"):
        Trials([trial("mixed", 0, 0.1), trial("mixed", 0, 0.2)])


def test_losing_regions_are_listed_and_drawn() -> None:
    """Split wins at one load and loses at the other."""
    trials = Trials(
        [
            trial(name, seed, ttft, load=load, colocated=name == "mixed")
            for load, split in (("1 requests/s", 0.1), ("2 requests/s", 0.9))
            for seed in range(3)
            for name, ttft in (("mixed", 0.4), ("split", split))
        ]
    )
    low, high = summary_lines(trials)
    assert "wins: TTFT p50 0.25x of mixed" in low and "loses" not in low
    assert "loses: TTFT p50 2.25x of mixed" in high
    assert "no difference: TTFT and TPOT attainment +0 points" in high
    tables = list(trial_tables(trials))
    assert len(tables) == 4 and has_verdicts(trials)
    row = next(row for row in tables[3].rows if row[0] == "TTFT p50")
    assert row == ("TTFT p50", "mixed", "2.25x (2.25..2.25)\nworse")
    for picture in (verdict_map(trials), trial_intervals(trials)):
        assert png(picture)[:4] == b"\x89PNG"


def test_a_configuration_of_unknown_kind_is_not_compared() -> None:
    others = [trial("mixed", 0, 0.4), trial("split", 0, 0.2, colocated=False)]
    trials = Trials([*others, trial("there", 0, 0.1, colocated=None)])
    assert list(summary_lines(trials)) == list(summary_lines(Trials(others)))
    means, against = trial_tables(trials)
    assert "there" in means.headers and against.headers == ("", "best colocated", "split")


def test_without_a_colocated_configuration_nothing_is_compared() -> None:
    trials = Trials([trial("a", 0, 0.1, colocated=False), trial("b", 0, 0.2, colocated=False)])
    assert not has_verdicts(trials) and list(summary_lines(trials)) == [] and len(list(trial_tables(trials))) == 1
