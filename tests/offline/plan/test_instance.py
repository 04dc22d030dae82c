"""TTFT, TPOT and throughput of one instance."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from cluster.offline.plan.instance import InstanceAnswer, LengthRanges, answers, instances_of, parse_range
from cluster.offline.plan.instance_report import instance_estimates_json, instance_json, instance_lines
from cluster.offline.plan.load import PlanLoad
from cluster.offline.plan.request import PlanError
from cluster.offline.plan.trial import Trial
from cluster.offline.scoring.goodput import TimeUp
from cluster.offline.workload.lengths import Uniform
from tests.offline.plan.requests import L4, plan_request
from workers.profiles.sources import profile_of
from workers.request import SLO

LENGTHS = LengthRanges(Uniform(300, 900), Uniform(8, 12))
QUESTION = plan_request(gpus=1, load=PlanLoad.of(LENGTHS.workload()), slo=SLO(1.0, 0.1))


@pytest.fixture(scope="module")
def answer() -> InstanceAnswer:
    (found,) = answers(instances_of(QUESTION, LENGTHS), (1, 4))
    return found


def test_alone_ttft_is_the_prefill_and_tpot_the_decode_step(answer: InstanceAnswer) -> None:
    cost = profile_of("llama-3-8b", L4, source="roofline").cost
    assert answer.ttft_s == pytest.approx((cost.prefill_seconds(300), cost.prefill_seconds(900)), rel=1e-3)
    assert answer.tpot_s == pytest.approx((cost.decode_seconds(1, 304), cost.decode_seconds(1, 906)), rel=1e-2)


def test_more_users_wait_longer_and_get_more_done(answer: InstanceAnswer) -> None:
    one, four = answer.users
    assert four.ttft_s.p90 > one.ttft_s.p90
    assert four.output_tokens_rate > 1.5 * one.output_tokens_rate
    assert one.ttft_s.count == 5 and four.ttft_s.count == 20  # the first of each user's six is not counted


def test_throughput_is_the_rate_at_which_both_slos_hold(answer: InstanceAnswer) -> None:
    found = answer.throughput
    assert found is not None and found.rate > 0.0
    assert all(each.attained.both >= 0.9 for each in found.probes if each.rate in found.by_seed)


def test_the_three_answers_are_never_mixed(answer: InstanceAnswer) -> None:
    lines = instance_lines(QUESTION, LENGTHS, [answer])
    first, second, third = (next(i for i, line in enumerate(lines) if line.startswith(f"{n}.")) for n in (1, 2, 3))
    assert not any("requests/s" in line for line in lines[first:third])
    assert not any("TPOT" in line for line in lines[first:second])
    value = instance_estimates_json([answer.instance]) | instance_json(QUESTION, LENGTHS, [answer])
    paid, throughput = value["throughput"][0]["cost"], value["throughput"][0]
    assert paid["dollars_h"] == value["prices"][L4]
    assert paid["requests_s_per_dollar_h"] == pytest.approx(throughput["requests_per_s"] / paid["dollars_h"])
    assert value["what_if"]["changes"] and value["estimates"][0]["cost"]["dollars_per_million_tokens"] > 0.0
    assert value["ttft"][0]["one_user_s"] == dict(zip(("shortest", "longest"), answer.ttft_s, strict=True))


def test_an_slo_that_cannot_be_met_starves_no_prompt() -> None:
    question = plan_request(gpus=1, load=QUESTION.load, slo=SLO(1.0, 0.01))
    (found,) = answers(instances_of(question, LENGTHS), (4,))
    assert found.users[0].ttft_s.p90 < 2.0


def test_what_closed_forms_rule_out_is_not_simulated() -> None:
    question = plan_request(gpus=1, load=QUESTION.load, slo=SLO(1.0, 0.01))
    (instance,) = instances_of(question, LENGTHS)
    assert instance.estimate.rate == 0.0 and "TPOT" in instance.estimate.broken
    (found,) = answers([instance], ())
    assert found.throughput is None
    assert instance_json(question, LENGTHS, [found])["throughput"][0]["requests_per_s"] == 0.0
    assert any("the SLO is 10 ms" in line for line in instance_lines(question, LENGTHS, [found]))


def test_when_the_time_is_up_the_answer_is_what_is_known() -> None:
    runs = Counter[str]()

    def each(work: Any, *arguments: Any) -> Iterator[Any]:
        """Two probes of the throughput, and nothing of several users."""
        what, most = ("probes", 2) if isinstance(work, Trial) else ("users", 1)
        runs[what] += 1
        if runs[what] > most:
            raise TimeUp
        return map(work, *arguments)

    (found,) = answers(instances_of(QUESTION, LENGTHS), (1, 4), each)
    assert not found.complete and not found.users
    assert found.ttft_s[0] == pytest.approx(found.instance.estimate.ttft_s[0], rel=1e-3)
    assert found.throughput is not None and len(found.throughput.probes) == 2
    words, cost = instance_lines(QUESTION, LENGTHS, [found])[-2:]
    assert "known from 2 runs" in words and "requests/s per $/h" in cost
    assert instance_json(QUESTION, LENGTHS, [found])["complete"] is False


@pytest.mark.parametrize("text", ["", "0", "-5", "7-3", "many", "1-2-3", "1.5"])
def test_invalid_lengths_are_refused(text: str) -> None:
    with pytest.raises(PlanError, match="--prompt"):
        parse_range(text, "--prompt")


def test_a_range_and_a_number() -> None:
    assert parse_range("1500-2000", "--prompt") == Uniform(1500, 2000)
    assert parse_range(" 500 ", "--output") == Uniform(500, 500)


def test_a_search_that_was_cut_short_has_what_every_seed_held(answer: InstanceAnswer) -> None:
    assert answer.throughput is not None
    cut = replace(answer.throughput, complete=False, seeds=(0, 1), by_seed=(20.0, 24.0), rate=22.0, broke=(None, None))
    words = "\n".join(instance_lines(QUESTION, LENGTHS, [replace(answer, throughput=cut)]))
    assert words.count("at least 20 requests/s") == 2 and "22 requests/s" not in words
