"""The goodput search finds known thresholds and reports unattainable targets."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cluster.offline.scoring.figures import Attainment
from cluster.offline.scoring.goodput import Goodput, Probes, Search, TimeUp, goodput
from workers.request import SLO

TEST_SLO = SLO(0.25, 0.1)
SEEDS = (0, 1, 2, 3, 4)


def falling(threshold: float, spread: float, rate: float, seed: int) -> Attainment:
    """Attainment that falls through 90 % at the threshold, which each seed shifts by up to `spread`; TPOT breaks."""
    both = min(1.0, max(0.0, 0.9 + 0.5 * (1.0 - rate / own(threshold, spread, seed))))
    return Attainment(1.0, both, both, 1.0)


def own(threshold: float, spread: float, seed: int) -> float:
    return threshold * (1.0 + spread * Random(seed).uniform(-1.0, 1.0))


def searched(threshold: float, search: Search, spread: float = 0.0, target: float = 0.9) -> Goodput:
    probes = Probes(partial(falling, threshold, spread))
    return goodput(probes, search, TEST_SLO, target=target, seeds=SEEDS, gpus=4)


@settings(deadline=None)
@given(
    *(st.floats(0.011, 99.0), st.floats(0.01, 100.0), st.floats(0.0, 0.3), st.sampled_from((0.01, 0.05, 0.2))),
    st.sampled_from((1.01, 1.2, 2.0)),
)
@example(99.0, 100.0, 0.3, 0.01, 2.0)
def test_the_threshold_is_found_within_the_tolerance(
    threshold: float, start: float, spread: float, tolerance: float, stride: float
) -> None:
    made = searched(threshold, Search(start, 0.001, 1000.0, tolerance, stride), spread)
    for seed, found in zip(SEEDS, made.by_seed, strict=True):
        assert found <= own(threshold, spread, seed) * (1 + 1e-9)
        assert found * (1 + tolerance) >= own(threshold, spread, seed) * (1 - 1e-9)
    assert made.low <= made.rate <= made.high
    assert made.per_gpu == made.rate / 4
    assert not made.capped and not made.unattainable


def test_a_start_that_is_near_needs_few_probes() -> None:
    near, far = (searched(1.02, Search(1.0, 0.01, 100.0, 0.05, stride)) for stride in (1.05, 2.0))
    assert len(near.probes) == 2 * len(SEEDS) and near.by_seed == (1.0,) * len(SEEDS)
    assert len(far.probes) > 2 * len(near.probes)


@settings(deadline=None)
@given(st.floats(0.02, 90.0), st.integers(0, 1000))
def test_noise_in_each_probe_moves_the_result_no_farther_than_the_noise(threshold: float, salt: int) -> None:
    def noisy(rate: float, seed: int) -> Attainment:
        noise = Random(f"{salt} {seed} {rate}").uniform(-0.02, 0.02)
        both = min(1.0, max(0.0, 0.9 + 0.5 * (1.0 - rate / threshold) + noise))
        return Attainment(both, 1.0, both, 1.0)

    made = goodput(Probes(noisy), Search(1.0, 0.01, 100.0, 0.02), TEST_SLO, target=0.9, seeds=SEEDS, gpus=1)
    for found in made.by_seed:
        assert threshold * 0.96 / 1.02 * (1 - 1e-9) <= found <= min(100.0, threshold * 1.04)


def test_the_interval_is_students_over_seeds() -> None:
    def attain(rate: float, seed: int) -> Attainment:
        ok = float(rate <= seed)
        return Attainment(ok, 1.0, ok, 1.0)

    made = goodput(Probes(attain), Search(1.0, 0.1, 64.0, 1e-6), TEST_SLO, target=0.9, seeds=(8, 10, 12), gpus=1)
    assert made.rate == pytest.approx(10.0, rel=1e-5)
    assert made.high - made.rate == pytest.approx(4.303 * 2.0 / 3**0.5, rel=1e-4)
    assert "95 % CI" in made.summary and "t over 3 seeds" in made.summary


def test_one_seed_has_no_interval_and_says_so() -> None:
    probes = Probes(partial(falling, 5.0, 0.0))
    made = goodput(probes, Search(1.0, 0.1, 64.0), TEST_SLO, target=0.9, seeds=(3,), gpus=2)
    assert made.low == made.rate == made.high
    assert "one seed" in made.summary and "CI" not in made.summary


def test_every_word_of_the_result_is_there() -> None:
    summary = searched(5.0, Search(1.0, 0.1, 64.0)).summary
    for word in ("90 %", "TTFT <= 0.25 s and TPOT <= 0.1 s", "4 GPUs", "per GPU", "limited by TPOT"):
        assert word in summary


def test_json_names_target_slo_gpus_and_interval() -> None:
    made = searched(5.0, Search(1.0, 0.1, 64.0), 0.1)
    written = json.loads(json.dumps(made.as_json(), allow_nan=False))
    assert (written["target"], written["gpus"], written["per_gpu"]) == (0.9, 4, made.per_gpu)
    assert written["slo"]["ttft_s"] == 0.25 and "t over 5 seeds" in written["interval"]
    assert len(written["probes"]) == len(made.probes) and written["limits"] == ["TPOT"]


def test_an_unattainable_target_is_zero_with_the_closest_probe_and_its_limit() -> None:
    def attain(rate: float, seed: int) -> Attainment:
        return Attainment(0.7 / (1 + rate), 0.95, 0.7 / (1 + rate), 1.0)

    made = goodput(Probes(attain), Search(1.0, 0.25, 64.0), TEST_SLO, target=0.9, seeds=(1, 2), gpus=3)
    assert made.unattainable and made.rate == made.low == made.high == 0.0
    assert made.closest.rate == 0.25
    assert made.limits == ("TTFT",)
    assert "not attainable" in made.summary and "56.0% at 0.25 requests/s (TTFT missed)" in made.summary
    assert {probe.rate for probe in made.probes} == {1.0, 0.5, 0.25}


def test_a_goodput_without_a_failing_rate_is_at_least_the_cap() -> None:
    made = goodput(
        Probes(lambda rate, seed: Attainment(1.0, 1.0, 1.0, 1.0)),
        Search(1.0, 0.25, 50.0),
        TEST_SLO,
        target=0.99,
        seeds=(1, 2),
        gpus=3,
    )
    assert made.capped and made.rate == 50.0
    assert "at least 50 requests/s" in made.summary


def test_exactly_the_target_is_enough() -> None:
    probes = Probes(lambda rate, seed: Attainment(0.9, 0.9, 0.9, 1.0))
    made = goodput(probes, Search(1.0, 0.25, 8.0), TEST_SLO, target=0.9, seeds=(1,), gpus=1)
    assert made.rate == 8.0


def test_nothing_below_the_floor_is_tried() -> None:
    probes = Probes(lambda rate, seed: Attainment(0.0, 1.0, 0.0, 1.0))
    made = goodput(probes, Search(1.0, 0.3, 8.0), TEST_SLO, target=0.9, seeds=(1,), gpus=1)
    assert [probe.rate for probe in made.probes] == [0.3, 0.5, 1.0]


def test_the_limit_is_what_broke_next_above_the_goodput() -> None:
    def attain(rate: float, seed: int) -> Attainment:
        if rate < 0.6:
            return Attainment(0.1, 1.0, 0.1, 1.0)  # a probe that somebody else made
        return Attainment(float(rate < 7.9), float(rate < 5.0), float(rate < 5.0), 1.0)

    probes = Probes(attain)
    probes.at([(0.5, 1), (0.5, 2)])
    made = goodput(probes, Search(1.0, 0.1, 64.0), TEST_SLO, target=0.9, seeds=(1, 2), gpus=1)
    assert made.limits == ("TPOT",)


def test_a_curve_has_only_rates_that_all_seeds_were_probed_at() -> None:
    made = searched(5.0, Search(1.0, 0.1, 64.0), 0.2)
    seen = {rate: {probe.seed for probe in made.probes if probe.rate == rate} for rate, _ in made.curve}
    assert seen and all(seeds == set(SEEDS) for seeds in seen.values())
    assert len(seen) < len({probe.rate for probe in made.probes})
    rate, attained = made.curve[-1]
    assert attained.both == pytest.approx(sum(falling(5.0, 0.2, rate, seed).both for seed in SEEDS) / len(SEEDS))


def test_refused_requests_are_named_as_the_limit() -> None:
    def attain(rate: float, seed: int) -> Attainment:
        share = min(1.0, 4.0 / rate)
        return Attainment(share, share, share, share)

    made = goodput(Probes(attain), Search(1.0, 0.1, 64.0), TEST_SLO, target=0.9, seeds=(1,), gpus=1)
    assert made.limits == ("requests not served",)


def test_targets_share_what_is_known() -> None:
    asked: list[tuple[float, int]] = []

    def attain(rate: float, seed: int) -> Attainment:
        asked.append((rate, seed))
        return falling(5.0, 0.0, rate, seed)

    probes = Probes(attain)
    search = Search(1.0, 0.1, 64.0)
    loose = goodput(probes, search, TEST_SLO, target=0.9, seeds=SEEDS, gpus=1)
    strict = goodput(probes, search, TEST_SLO, target=0.99, seeds=SEEDS, gpus=1)
    assert strict.rate < loose.rate
    assert len(asked) == len(set(asked)) == len(strict.probes)
    rates = [rate for rate, _ in strict.curve]
    assert rates == sorted(rates) and len(rates) * len(SEEDS) == len(asked)


@pytest.mark.parametrize("runs", [0, 1, 3, 8, 20])
def test_when_the_time_is_up_the_bracket_is_the_answer(runs: int) -> None:
    left = runs

    def each(work: Callable[..., Attainment], *arguments: Any) -> Iterator[Attainment]:
        nonlocal left
        for one in zip(*arguments, strict=True):
            if not left:
                raise TimeUp
            left -= 1
            yield work(*one)

    probes = Probes(partial(falling, 5.0, 0.0), each)
    made = goodput(probes, Search(1.0, 0.1, 64.0), TEST_SLO, target=0.9, seeds=SEEDS, gpus=4)
    assert not made.complete and not made.unattainable
    assert len(made.probes) == runs
    for held, broke in zip(made.by_seed, made.broke, strict=True):
        assert held <= 5.0 and (broke is None or broke > 5.0)
    assert ("known from" if runs else "not known") in made.summary
    json.dumps(made.as_json(), allow_nan=False)


def test_seeds_that_follow_the_first_find_the_same_with_fewer_probes() -> None:
    def found(led: bool) -> Goodput:
        probes = Probes(partial(falling, 5.0, 0.05))
        return goodput(probes, Search(1.0, 0.1, 64.0), TEST_SLO, target=0.9, seeds=SEEDS, gpus=4, led=led)

    alone, led = found(False), found(True)
    assert led.by_seed == pytest.approx(alone.by_seed, rel=0.03)
    assert len(led.probes) < len(alone.probes)


def test_probes_of_one_round_go_out_together_in_other_processes() -> None:
    with ProcessPoolExecutor(2) as pool:
        probes = Probes(partial(falling, 5.0, 0.1), pool.map)
        there = goodput(probes, Search(1.0, 0.1, 64.0), TEST_SLO, target=0.9, seeds=SEEDS, gpus=4)
    assert there == searched(5.0, Search(1.0, 0.1, 64.0), 0.1)


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ((1.0, 2.0, 4.0), "floor <= start"),
        ((5.0, 1.0, 4.0), "<= cap"),
        ((1.0, 0.0, 4.0), "0 <"),
        ((1, 1, 1, 0.0), "tol"),
    ],
)
def test_an_empty_range_is_refused(rates: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Search(*rates)


@pytest.mark.parametrize(
    ("target", "seeds", "gpus", "message"),
    [
        (0.0, (1,), 1, "target"),
        (90.0, (1,), 1, "target"),
        (0.9, (), 1, "seeds"),
        (0.9, (1, 1), 1, "seeds"),
        (0.9, (1,), 0, "gpus"),
    ],
)
def test_an_invalid_search_is_refused(target: float, seeds: tuple[int, ...], gpus: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        goodput(
            Probes(partial(falling, 1.0, 0.0)), Search(1.0, 1.0, 1.0), TEST_SLO, target=target, seeds=seeds, gpus=gpus
        )
