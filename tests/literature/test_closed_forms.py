"""Queueing theory and arithmetic of the papers: their own numbers, and queues that are counted through."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.literature.closed_forms import (
    break_even_byte_s,
    crossover_load,
    exposed_transfer_s,
    replicas_ttft_s,
    single_ttft_s,
    sustained_byte_s,
    tensor_ttft_s,
    transfer_threshold_byte_s,
    two_stage_ttft_s,
)
from workers.profiles.profile_errors import ProfileError
from workers.profiles.shapes import SHAPES
from workers.profiles.sources import profile_of


def counted_ttft_s(rate: float, stages: tuple[float, ...], requests: int = 100_000) -> float:
    """Mean time through stages of fixed seconds each, first come first served, Poisson arrivals."""
    draw = random.Random(7)
    now, total, free = 0.0, 0.0, [0.0] * len(stages)
    for _ in range(requests):
        now += draw.expovariate(rate)
        end = now
        for stage, seconds in enumerate(stages):
            end = free[stage] = max(end, free[stage]) + seconds
        total += end - now
    return total / requests


@pytest.mark.parametrize("load", [0.2, 0.6, 0.8])
def test_queues_counted_through_agree_with_the_closed_forms(load: float) -> None:
    prefill_s = 0.5
    rate = load / prefill_s
    assert counted_ttft_s(rate, (prefill_s,)) == pytest.approx(single_ttft_s(rate, prefill_s), rel=0.03)
    assert counted_ttft_s(rate, (0.25, 0.25)) == pytest.approx(two_stage_ttft_s(rate, prefill_s), rel=0.03)
    assert counted_ttft_s(rate, (0.5 / 1.6,)) == pytest.approx(tensor_ttft_s(rate, prefill_s, 1.6), rel=0.03)
    assert counted_ttft_s(rate / 3, (prefill_s,)) == pytest.approx(replicas_ttft_s(rate, prefill_s, 3), rel=0.03)


def test_pipelines_win_above_the_crossovers_of_the_table() -> None:
    assert [round(crossover_load(k), 2) for k in (1.3, 1.5, 1.7, 1.9)] == [0.61, 0.94, 1.26, 1.63]


@given(speedup=st.floats(1.01, 1.99), share=st.floats(0.01, 0.999), prefill_s=st.floats(1e-3, 10))
def test_at_the_crossover_both_are_equal_and_around_it_each_wins_its_side(
    speedup: float, share: float, prefill_s: float
) -> None:
    load = crossover_load(speedup)
    assert 0.0 < load < speedup
    at, below = load / prefill_s, share * load / prefill_s
    assert two_stage_ttft_s(at, prefill_s) == pytest.approx(tensor_ttft_s(at, prefill_s, speedup), rel=1e-6)
    assert tensor_ttft_s(below, prefill_s, speedup) < two_stage_ttft_s(below, prefill_s)
    above = (load + (speedup - load) * (1 - share)) / prefill_s
    assert two_stage_ttft_s(above, prefill_s) < tensor_ttft_s(above, prefill_s, speedup)


def test_distserves_own_speed_up_puts_the_crossover_at_four_fifths() -> None:
    """K(2) of OPT-13B at 512 tokens, overheads included: between the table's 1.3 and 1.5."""
    speedup = profile_of("opt-13b", "a100-80gb").cost.prefill_seconds(512) / profile_of(
        "opt-13b", "a100-80gb", 2
    ).cost.prefill_seconds(512)
    assert 0.61 < crossover_load(speedup) < 0.94


def test_mooncakes_thresholds_for_llama_3_70b() -> None:
    on_a800 = transfer_threshold_byte_s(8192, 8, 8192, 8 * 312e12)
    on_h800 = transfer_threshold_byte_s(8192, 8, 8192, 8 * 989e12)
    assert round(on_a800 / 1e9, 2) == 5.86
    assert round(on_h800 / 1e9, 1) == 18.6


BREAK_EVEN = {  # GB/s at half of 989 TFLOP/s for 512, 2048, 8192, 32768 tokens; at half of 312 for 2048
    "opt-13b": "16.0 15.6 14.2 10.5 4.9",
    "opt-66b": "8.9 8.8 8.3 6.9 2.8",
    "opt-175b": "6.7 6.6 6.4 5.5 2.1",
    "llama-2-7b": "19.8 19.2 17.2 12.0 6.1",
    "llama-3-8b": "4.6 4.5 4.0 2.9 1.4",
    "mistral-7b": "4.6 4.5 4.0 2.9 1.4",
    "llama-3-70b": "1.18 1.16 1.10 0.90 0.37",
    "qwen2.5-7b": "2.2 2.1 1.9 1.4 0.66",
    "qwen2.5-0.5b": "8.2 7.6 5.7 2.9 2.4",
    "qwen3-0.6b": "60 51 31 12 16",
}


@pytest.mark.parametrize("model", BREAK_EVEN)
def test_the_link_below_which_recomputing_is_faster(model: str) -> None:
    settings = [(tokens, 989e12 / 2) for tokens in (512, 2048, 8192, 32768)] + [(2048, 312e12 / 2)]
    found = [break_even_byte_s(SHAPES[model], *setting) / 1e9 for setting in settings]
    for said, computed in zip(BREAK_EVEN[model].split(), found, strict=True):
        digits = len(said.partition(".")[2])
        assert abs(computed - float(said)) <= 0.505 * 10**-digits, f"{computed:.3f} for {said}"


def test_at_the_break_even_link_a_prefix_takes_as_long_to_fetch_as_to_compute() -> None:
    shape, flops = SHAPES["llama-3-8b"], 4e14
    link_byte_s = break_even_byte_s(shape, 3000, flops)
    assert 3000 * shape.kv_bytes_per_token / link_byte_s == pytest.approx(shape.prefill_flops(3000) / flops)


def test_ten_requests_of_512_tokens_of_opt_66b_need_90_gigabits() -> None:
    assert sustained_byte_s(SHAPES["opt-66b"], 10, 512) * 8 / 1e9 == pytest.approx(90, rel=0.1)


def test_a_transfer_by_layers_hides_behind_the_prefill() -> None:
    assert exposed_transfer_s(1e9, 1.0, 40, 1e10) == pytest.approx(0.1 / 40)
    assert exposed_transfer_s(1e9, 0.0, 40, 1e10, 0.002) == pytest.approx(0.102)
    assert exposed_transfer_s(1e9, 0.05, 40, 1e10) == pytest.approx(0.1 - 0.05 * 39 / 40)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: single_ttft_s(2.0, 0.5), "no bounded queue"),
        (lambda: two_stage_ttft_s(4.0, 0.5), "no bounded queue"),
        (lambda: single_ttft_s(-1.0, 0.5), "0 or more"),
        (lambda: single_ttft_s(float("nan"), 0.5), "0 or more"),
        (lambda: single_ttft_s(1.0, 0.0), "above 0"),
        (lambda: tensor_ttft_s(1.0, 0.5, 0.5), "speedup is 0.5"),
        (lambda: replicas_ttft_s(1.0, 0.5, 0), "replicas is 0"),
        (lambda: crossover_load(2.0), "between 1 and 2"),
        (lambda: break_even_byte_s(SHAPES["opt-13b"], 0, 1e12), "prefix_tokens is 0"),
        (lambda: exposed_transfer_s(1.0, 1.0, 1, 0.0), "link_byte_s is 0"),
        (lambda: transfer_threshold_byte_s(0, 1, 1, 1.0), "hidden is 0"),
    ],
)
def test_questions_without_an_answer_are_refused(call, said: str) -> None:
    with pytest.raises(ProfileError, match=said):
        call()
