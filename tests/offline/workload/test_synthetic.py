"""Synthetic workloads: the grammar, the arrival processes' rates and shapes, the lengths, and wrong descriptions."""

import re
from itertools import pairwise
from statistics import fmean, pstdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.offline.workload import options as written_options
from cluster.offline.workload.arrivals import Workload, WorkloadError
from cluster.offline.workload.lengths import LONG_ANSWER, LONG_PROMPT, SHORT_ANSWER, SHORT_PROMPT
from cluster.offline.workload.load import load_workload

EVERY_PROCESS = ["poisson", "gamma:cv=3,", "weibull:shape=0.7,", "onoff:on=5,off=5,", "day:period=100,", "constant"]


def gaps(workload: Workload) -> list[float]:
    return [later.at_s - sooner.at_s for sooner, later in pairwise(workload.arrivals)]


def described(process: str, options: str) -> str:
    return f"{process}{'' if process.endswith(',') else ':'}{options}"


# ---- processes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("process", EVERY_PROCESS)
def test_every_process_has_its_mean_rate(process: str) -> None:
    found = load_workload(described(process, "rate=8,duration=2500,lengths=1/1"), seed=1)
    assert len(found.arrivals) / 2500 == pytest.approx(8.0, rel=0.1)


@pytest.mark.parametrize("process", ["poisson", "gamma:cv=3,", "weibull:shape=0.7,", "constant"])
def test_a_seed_gives_the_same_lengths_and_pattern_at_every_rate(process: str) -> None:
    slow, fast = (load_workload(described(process, f"rate={r},count=50,lengths=mixed"), seed=3) for r in (1, 4))
    assert [each.prompt_tokens for each in slow.arrivals] == [each.prompt_tokens for each in fast.arrivals]
    assert [each.at_s for each in slow.arrivals] == pytest.approx([4 * each.at_s for each in fast.arrivals])
    other = load_workload(described(process, "rate=1,count=50,lengths=mixed"), seed=4)
    assert [each.prompt_tokens for each in slow.arrivals] != [each.prompt_tokens for each in other.arrivals]


@pytest.mark.parametrize(
    ("process", "cv"), [("poisson", 1.0), ("gamma:cv=3,", 3.0), ("gamma:cv=0.2,", 0.2), ("weibull:shape=2,", 0.523)]
)
def test_gaps_vary_as_they_should(process: str, cv: float) -> None:
    found = gaps(load_workload(described(process, "rate=8,count=20000,lengths=1/1")))
    assert pstdev(found) / fmean(found) == pytest.approx(cv, rel=0.05)


def test_on_off_is_silent_when_off() -> None:
    found = load_workload("onoff:rate=8,on=5,off=15,duration=400,lengths=1/1")
    assert all(each.at_s % 20 < 5 for each in found.arrivals)
    assert {each.at_s // 20 for each in found.arrivals} == set(range(20))


def test_a_day_swings() -> None:
    found = load_workload("day:rate=50,period=100,swing=1,duration=100,lengths=1/1")
    rising = sum(each.at_s < 50 for each in found.arrivals)
    assert rising / len(found.arrivals) == pytest.approx(0.5 + 1 / 3.14159, abs=0.03)


def test_a_burst_comes_at_once_and_constant_gaps_are_equal() -> None:
    assert {each.at_s for each in load_workload("burst:count=9,lengths=1/1").arrivals} == {0.0}
    assert gaps(load_workload("constant:rate=4,count=9,lengths=1/1")) == [0.25] * 8


# ---- lengths and ends --------------------------------------------------------------------------------------------


def test_lengths_are_what_was_written(tmp_path) -> None:
    def drawn(text: str) -> set[tuple[int, int]]:
        found = load_workload(f"burst:count=300,lengths={text}")
        return {(each.prompt_tokens, each.output_tokens) for each in found.arrivals}

    assert drawn("1500/200") == {(1500, 200)}
    assert drawn("3-5/7") == {(3, 7), (4, 7), (5, 7)}
    assert drawn("4x64/48+1024/8-9") == {(64, 48), (1024, 8), (1024, 9)}
    mixed = load_workload("burst:count=1000,lengths=4x64/48+1024/48").arrivals
    assert 0.16 < sum(each.prompt_tokens == 1024 for each in mixed) / 1000 < 0.24
    assert all(LONG_PROMPT.least <= prompt <= LONG_PROMPT.most for prompt, _ in drawn("long/short"))
    assert all(SHORT_ANSWER.least <= output <= SHORT_ANSWER.most for _, output in drawn("long/short"))
    kinds = {(prompt > SHORT_PROMPT.most, output >= LONG_ANSWER.least) for prompt, output in drawn("mixed")}
    assert len(kinds) == 4
    (tmp_path / "trace.csv").write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,11,1\n9,22,2\n")
    assert drawn(str(tmp_path / "trace.csv")) == {(11, 1), (22, 2)}


def test_a_workload_ends_by_count_or_duration_whichever_comes_first() -> None:
    assert len(load_workload("constant:rate=2,count=7,lengths=1/1").arrivals) == 7
    assert len(load_workload("constant:rate=2,duration=5,lengths=1/1").arrivals) == 10
    assert len(load_workload("constant:rate=2,duration=5,count=3,lengths=1/1").arrivals) == 3


def test_phases_follow_one_another() -> None:
    found = load_workload(
        "constant:rate=1,duration=10,lengths=1000/1 + burst:count=2,lengths=7/7 + constant:rate=2,count=2,lengths=1/9"
    )
    assert [each.at_s for each in found.arrivals[9:]] == [9.0, 10.0, 10.0, 10.0, 10.5]
    halves = [load_workload("poisson:rate=4,duration=100,lengths=mixed", seed=seed) for seed in (0, 1)]
    twice = load_workload(" + ".join(["poisson:rate=4,duration=100,lengths=mixed"] * 2), seed=0)
    second = [each for each in twice.arrivals if each.at_s >= 100.0]
    assert twice.arrivals[: len(halves[0].arrivals)] == halves[0].arrivals
    assert [each.prompt_tokens for each in second] != [each.prompt_tokens for each in halves[0].arrivals]
    assert [each.prompt_tokens for each in second] != [each.prompt_tokens for each in halves[1].arrivals]


def test_changes_apply_to_synthetic_workloads_too() -> None:
    found = load_workload("constant:rate=2,count=100,lengths=500/100,from=10,until=20,first=5,clip=300,speed=2")
    assert [each.at_s for each in found.arrivals] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert {(each.prompt_tokens, each.output_tokens) for each in found.arrivals} == {(200, 100)}


# ---- wrong descriptions ------------------------------------------------------------------------------------------

WRONG = {
    "poison:rate=4": "'poison' is neither a trace file nor a process of arrivals; did you mean poisson",
    "": "'' is neither a trace file nor a process",
    "poisson": "poisson needs lengths, such as lengths=mixed",
    "poisson:lengths=mixed,count=5": "poisson needs a rate",
    "poisson:lengths=mixed,rate=5": "poisson needs an end: count=500 .* or duration=300",
    "burst:lengths=mixed": r"burst needs an end: count=500 \(requests\)$",
    "burst:lengths=mixed,rate=5": "burst has no option 'rate'",
    "poisson:rat=4": "poisson has no option 'rat'; did you mean rate",
    "poisson:cv=4": "poisson has no option 'cv'",
    "poisson:zzz=4": "poisson has no option 'zzz'; it has rate, count",
    "poisson:rate": "poisson: rate has no value; it must be a number from",
    "poisson:rate=": "poisson: rate is ''; it must be a number from",
    "poisson:rate=nan": "poisson: rate is 'nan'",
    "poisson:rate=-1": "poisson: rate is '-1'",
    "poisson:rate=1,rate=2": "poisson: rate is written twice",
    "poisson:count=2.5": "count is '2.5'; it must be a whole number from 1 to",
    "gamma:cv=0": "gamma: cv is '0'; it must be a number from 0.01 to 100",
    "day:swing=2": "day: swing is '2'; it must be a number from 0 to 1",
    "poisson:rate=1,count=5,lengths=short": "lengths=short are neither short/short, .* nor a trace file",
    "poisson:rate=1,count=5,lengths=0/5": "lengths 0-0: write the shorter first",
    "poisson:rate=1,count=5,lengths=9-5/5": "lengths 9-5: write the shorter first",
    "poisson:rate=1,count=5,lengths=99999999/5": "from 1 to 10,000,000 tokens",
    "poisson:rate=1e5,duration=1e6,lengths=1/1": "more than 10,000,000 requests",
    "poisson:rate=1,count=5,lengths=1/1,from=50": "no requests from 50 s to inf s; its last arrives at",
    "poisson:rate=1,count=5,lengths=1/1 + nothing": "'nothing' is neither",
    "poisson:rate=1,count=5,lengths=1/1\0": "lengths=1/1\0 are neither",
}


@pytest.mark.parametrize(("source", "message"), WRONG.items(), ids=WRONG)
def test_a_wrong_description_is_one_clear_error(source: str, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        load_workload(source)


WORDS = [*"0159.,:=-/+ \n", " + ", "poisson", "burst", "day", "rate=", "count=3", "lengths=1/1", ",", ",", ":", ":"]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(WORDS), max_size=12).map("".join) | st.text(max_size=30))
def test_no_description_brings_a_traceback(text: str) -> None:
    try:
        load_workload(f"{text}", seed=0)
    except WorkloadError as error:
        assert str(error)


def test_the_grammar_documents_every_option_and_process() -> None:
    grammar = load_workload.__doc__ or ""
    keys = {
        *written_options.FOR_TRACES,
        *written_options.FOR_ALL_PROCESSES,
        "cv",
        "shape",
        "on",
        "off",
        "swing",
        "period",
    }
    assert all(f"{key}=" in grammar for key in keys)
    processes = ["poisson", "gamma", "weibull", "onoff", "day", "constant", "burst"]
    assert all(re.search(rf"\n +{process} ", grammar) for process in processes)
