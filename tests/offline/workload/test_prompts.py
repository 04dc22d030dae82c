"""Prompts share tokens exactly where their prefixes do, and contain only ordinary tokens."""

from dataclasses import replace
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.offline.workload.arrivals import Arrival, Workload, WorkloadError
from cluster.offline.workload.prompts import FIRST_TOKEN, prompt_tokens, request
from workers.request import SLO

BLOCK = 16
ENOUGH = 8  # tokens within which two stretches differ


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    prefixes = draw(
        st.lists(st.lists(st.sampled_from([0, 1, 2, 49_149, 2**64 - 1]), max_size=5), min_size=2, max_size=6)
    )
    behind = draw(st.lists(st.integers(0, 3 * BLOCK), min_size=len(prefixes), max_size=len(prefixes)))
    arrivals = tuple(
        Arrival(0.0, len(prefix) * BLOCK + more + ENOUGH, 1, tuple(prefix))
        for prefix, more in zip(prefixes, behind, strict=True)
    )
    return Workload("prefixes", arrivals, block_tokens=BLOCK)


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


@given(workloads(), st.sampled_from([1000, 32_000, 49_152, 151_936]))
def test_prompts_share_exactly_their_common_prefix(workload: Workload, vocab_size: int) -> None:
    prompts = [prompt_tokens(workload, index, vocab_size) for index in range(len(workload.arrivals))]
    for index, (arrival, prompt) in enumerate(zip(workload.arrivals, prompts, strict=True)):
        assert len(prompt) == arrival.prompt_tokens
        assert FIRST_TOKEN <= min(prompt) <= max(prompt) < vocab_size
        assert prompt == prompt_tokens(workload, index, vocab_size)
        for other_arrival, other in zip(workload.arrivals[:index], prompts[:index], strict=True):
            shared = BLOCK * common(arrival.prefix, other_arrival.prefix)
            assert shared <= common(prompt, other) < shared + ENOUGH


def test_no_two_of_many_prompts_are_alike() -> None:
    workload = Workload("many", tuple(Arrival(0.0, 5, 1) for _ in range(20_000)))
    assert len({request(workload, index, 49_152).prompt for index in range(20_000)}) == 20_000


def test_a_short_last_block_begins_as_the_whole_one() -> None:
    workload = Workload("short", (Arrival(0.0, 20, 1, (1, 2)), Arrival(0.0, 32, 1, (1, 2))), block_tokens=16)
    assert prompt_tokens(workload, 0, 32_000) == prompt_tokens(workload, 1, 32_000)[:20]


def test_a_prompt_may_be_longer_than_the_table() -> None:
    workload = Workload("long", (Arrival(0.0, 1_000_000, 1), Arrival(0.0, 1_000_000, 1)))
    one, other = (prompt_tokens(workload, index, 32_000) for index in (0, 1))
    assert len(one) == len(other) == 1_000_000
    assert one[:ENOUGH] != other[:ENOUGH]
    assert len(set(one)) > 20_000


def test_small_vocabularies() -> None:
    workload = Workload("small", tuple(Arrival(0.0, 100, 1) for _ in range(50)))
    for vocab_size in (5, 6, 64):
        prompts = {prompt_tokens(workload, index, vocab_size) for index in range(50)}
        assert len(prompts) == 50
        assert all(FIRST_TOKEN <= token < vocab_size for prompt in prompts for token in prompt)
    with pytest.raises(WorkloadError, match="a vocabulary of 4 tokens is too small"):
        prompt_tokens(workload, 0, 4)


def test_ids_that_no_block_can_have() -> None:
    with pytest.raises(WorkloadError, match="id is -1; ids must be 0 to"):
        prompt_tokens(Workload("wrong", (Arrival(0.0, 9, 1, (-1,)),)), 0, 32_000)


def test_requests_ask_for_exactly_the_output() -> None:
    arrivals = (Arrival(0.0, 9, 4), Arrival(1.0, 8, 6, session="talk"))
    workload, slo = Workload("two", arrivals), SLO(ttft_s=0.5, tpot_s=0.05)
    first, second = (request(workload, index, 32_000, slo=slo, seed=7) for index in range(2))
    assert (first.id, second.id, second.session) == ("w-0", "w-1", "talk")
    assert (first.sampling.max_tokens, first.sampling.ignore_eos, first.sampling.seed) == (4, True, 7)
    assert (first.slo, len(first.prompt)) == (slo, 9)


def test_answers_to_one_prompt_have_its_tokens_and_group() -> None:
    one, two, other = Arrival(0.0, 20, 3), Arrival(0.0, 20, 3, sample=1), Arrival(1.0, 20, 3)
    workload = Workload("answers", (one, two, other))
    first, second, third = (request(workload, index, 1000) for index in range(3))
    assert first.prompt == second.prompt != third.prompt
    assert first.group == second.group != "" and third.group == ""
    for arrivals in ((two,), (one, replace(two, output_tokens=4)), (one, replace(two, sample=2))):
        with pytest.raises(WorkloadError, match="answer"):
            Workload("answers", arrivals)
