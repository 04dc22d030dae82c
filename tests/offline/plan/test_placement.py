"""Small searches, whole: what is chosen, printed and refused."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.offline.plan.deploy import Layout, WorkerGroup
from cluster.offline.plan.placement import BEST_SO_FAR, PlacementResult, PlacementSearch
from cluster.offline.plan.report import plan_json, plan_lines, write_plan
from cluster.offline.plan.request import PlanError, PlanRequest
from cluster.offline.plan.trial import Option, full_trial
from cluster.offline.plan.verdict import PlanVerdict, difference, judge
from cluster.offline.scoring.figures import Attainment
from cluster.offline.scoring.goodput import Goodput, Map, Probe, Search, TimeUp
from cluster.spec import Role
from cluster.spec_file import load_spec
from tests.offline.plan.requests import L4, load, plan_request
from workers.request import SLO

SPLIT = (WorkerGroup(Role.PREFILL, L4), WorkerGroup(Role.DECODE, L4))


def search(question: PlanRequest) -> tuple[PlacementResult, PlanVerdict]:
    found = PlacementSearch(question).search()
    return found, judge(question, found.options)


@pytest.fixture(scope="module")
def small() -> tuple[PlanRequest, PlacementResult, PlanVerdict]:
    question = plan_request(seeds=(0,))
    return question, *search(question)


@pytest.mark.full
def test_colocated_and_split_are_both_answers_with_the_same_gpus(
    small: tuple[PlanRequest, PlacementResult, PlanVerdict],
) -> None:
    kinds = {option.layout.kind: option.layout.gpus for option in small[2].options}
    assert {"colocated", "split", "hybrid"} <= set(kinds)
    assert set(kinds.values()) == {2}


def test_the_figures_are_those_of_the_full_trial(small: tuple[PlanRequest, PlacementResult, PlanVerdict]) -> None:
    question, _, verdict = small
    chosen = verdict.chosen
    again = full_trial(question, chosen.layout)
    for seed, rate in zip(question.seeds, chosen.goodput.by_seed, strict=True):
        assert again(rate, seed).both >= question.target


def test_the_plan_is_a_cluster_file_with_its_evidence(
    small: tuple[PlanRequest, PlacementResult, PlanVerdict], tmp_path: Path
) -> None:
    question, found, verdict = small
    write_plan(tmp_path / "plan.yaml", question, found, verdict)
    text = (tmp_path / "plan.yaml").read_text()
    assert verdict.words in text and verdict.chosen.goodput.short in text
    spec = load_spec(tmp_path / "plan.yaml")
    assert sum(pool.num_ranks for pool in spec.pools) == verdict.chosen.layout.gpus
    assert spec.gateway.slo == question.slo


def test_text_and_json_agree(small: tuple[PlanRequest, PlacementResult, PlanVerdict]) -> None:
    lines, value = plan_lines(*small), plan_json(*small)
    assert value["verdict"] in lines
    assert [each["layout"] for each in value["options"]] == [each.layout.description for each in small[2].options]
    assert all(each["goodput"]["summary"] in "\n".join(lines) for each in value["options"])


def test_no_system_is_advised_once_the_time_is_up(small: tuple[PlanRequest, PlacementResult, PlanVerdict]) -> None:
    question = small[0]
    found = PlacementSearch(question, ends_after(0)).search()
    assert not found.complete and not found.options
    assert plan_lines(question, found, None)[0].startswith("Not decided in time")


def test_without_time_to_rank_the_best_of_closed_forms_is_simulated_full_trial(
    small: tuple[PlanRequest, PlacementResult, PlanVerdict],
) -> None:
    question = small[0]
    found = PlacementSearch(question, ends_after(6), past=lambda share: True).search()
    assert found.options and not found.complete
    verdict = judge(question, found.options, found.complete)
    assert verdict.words.startswith("Not decided yet")
    assert plan_json(question, found, verdict)["complete"] is False


def test_the_best_colocated_instance_is_known_when_the_time_is_up() -> None:
    def each(work: Callable[..., Any], *arguments: Any) -> Iterator[Any]:
        for one in zip(*arguments, strict=True):
            if one[0].layout.kind == "split":
                raise TimeUp
            yield work(*one)

    said = []
    found = PlacementSearch(plan_request(), each, lambda what, how_far: said.append((what, how_far))).search()
    (option,) = found.options
    assert option.layout.kind == "colocated" and option.goodput.rate > 0.0 and not found.complete
    best = f"at least {option.value:.3g} requests/s per GPU: {option.layout.description}"
    assert [how_far for what, how_far in said if what == BEST_SO_FAR][-1] == best


def ends_after(runs: int) -> Map:
    left = runs

    def each(work: Callable[..., Any], *arguments: Any) -> Iterator[Any]:
        nonlocal left
        for one in zip(*arguments, strict=True):
            if not left:
                raise TimeUp
            left -= 1
            yield work(*one)

    return each


@pytest.mark.full
def test_a_rate_is_served_with_no_more_gpus_than_it_needs() -> None:
    one = full_trial(plan_request(), Layout("colocated", (WorkerGroup(Role.MIXED, L4),)))
    rate = 0.1 * one.max_rate
    _, verdict = search(plan_request(gpus=3, rate=rate))
    assert verdict.chosen.layout.gpus == 1
    assert verdict.chosen.serves is not None
    assert verdict.chosen.serves.both >= 0.9
    assert verdict.words.startswith("Do not disaggregate")


@pytest.mark.full
def test_intra_node_handoffs_keep_pairs_in_a_node() -> None:
    found, _ = search(plan_request(kv_link="intra-node", gpus=2, nodes=1))
    assert any("pairs inside nodes" in note for note in found.notes)


def test_an_slo_that_no_layout_meets_names_the_closest() -> None:
    with pytest.raises(PlanError, match=r"no placement of llama-3-8b on up to 2 GPUs.*closest: .*%"):
        search(plan_request(slo=SLO(1e-4, 0.1)))


def test_requests_too_large_for_the_kv_are_hopeless() -> None:
    with pytest.raises(PlanError, match=r"closest: .* would meet the SLO for 0\.0%"):
        search(plan_request(gpus=1, load=load("60000/10"), slo=SLO(100.0, 0.1)))


def test_a_rate_that_is_too_much_names_what_the_closest_attains() -> None:
    with pytest.raises(
        PlanError, match=r"serves 5000 requests/s.*closest: .* meets the SLO up to .* GPUs would be needed"
    ):
        search(plan_request(gpus=1, rate=5000.0, load=load("100-200/2"), slo=SLO(0.4, 0.1)))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"gpus": 0}, "gpus is 0"),
        ({"rate": float("nan")}, "rate is nan"),
        ({"target": 1.5}, "target is 1.5"),
        ({"slo": SLO(None, 0.1)}, "ttft is None"),
        ({"nodes": 3, "gpus": 4}, "nodes is 3"),
        ({"objective": "joy"}, "objective 'joy' is not one of"),
        ({"hardware": ()}, "hardware"),
        ({"hardware": ("l20",), "objective": "cost"}, "price of l20"),
        ({"seeds": ()}, "seeds"),
        ({"requests": 1}, "requests is 1"),
    ],
)
def test_invalid_numbers_are_refused(changed: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_request(**changed)


# ---- verdicts on made-up figures ------------------------------------------------------------------------------------


def option(question: PlanRequest, kind: str, by_seed: tuple[float, ...], replicas: int = 1) -> Option:
    groups = (WorkerGroup(Role.MIXED, L4, 1, 1, 2 * replicas),) if kind == "colocated" else SPLIT
    layout = Layout(kind, groups).times(*(2 * replicas,) if kind == "colocated" else (replicas, replicas))
    rate = sum(by_seed) / len(by_seed)
    goodput = Goodput(question.slo, 0.9, layout.gpus, question.seeds, by_seed, rate, rate, rate, Search(1, 1, 99), ())
    return Option(layout, full_trial(question, layout), goodput, Attainment(1.0, 1.0, 1.0, 1.0))


@pytest.mark.parametrize(
    ("colocated", "split", "chosen"),
    [
        ((10.0, 11.0, 12.0), (20.0, 21.0, 22.0), "split"),  # surely more
        ((10.0, 11.0, 12.0), (10.0, 18.0, 9.0), "colocated"),  # more, but by chance
        ((10.0, 11.0, 12.0), (10.0, 11.0, 12.0), "colocated"),  # the same: the simpler
        ((20.0, 21.0, 22.0), (10.0, 11.0, 12.0), "colocated"),
    ],
)
def test_splitting_must_surely_be_better(colocated: tuple[float, ...], split: tuple[float, ...], chosen: str) -> None:
    question = plan_request(seeds=(0, 1, 2))
    verdict = judge(question, [option(question, "split", split), option(question, "colocated", colocated)])
    assert verdict.chosen.layout.kind == chosen
    assert verdict.words.startswith("Disaggregate" if chosen == "split" else "Do not disaggregate")
    assert ("chance" in verdict.words) == (split == (10.0, 18.0, 9.0))


def test_options_are_compared_on_the_seeds_that_both_know() -> None:
    """A search that was cut short knows one layout with all seeds and another with the first."""
    question = plan_request(seeds=(0, 1, 2))
    split = option(question, "split", (20.0, 21.0, 22.0))
    first = plan_request(seeds=(0,))
    for rate, chosen in ((10.0, "split"), (19.5, "colocated")):
        verdict = judge(question, [split, option(first, "colocated", (rate,))], complete=False)
        assert verdict.chosen.layout.kind == chosen and "one seed, no interval" in verdict.words


def test_for_a_rate_fewer_gpus_win_whatever_the_goodput() -> None:
    question = plan_request(gpus=8, rate=5.0, seeds=(0, 1))
    options = [option(question, "colocated", (50.0, 50.0), replicas=2), option(question, "split", (6.0, 6.0))]
    verdict = judge(question, options)
    assert verdict.chosen.layout.kind == "split"
    assert "split serves 5 requests/s with 2 GPU, colocated with 4 GPU" in verdict.words


def test_a_single_option_needs_no_comparison() -> None:
    question = plan_request()
    assert judge(question, [option(question, "split", (5.0,))]).words == (
        "Disaggregate: no colocated layout meets the SLO"
    )


def test_a_difference_is_paired_by_seed() -> None:
    found = difference([1.0, 5.0, 9.0], [2.0, 6.0, 10.0])
    assert (found.mean, found.low, found.high) == (1.0, 1.0, 1.0)
    with pytest.raises(ValueError):
        difference([1.0], [1.0, 2.0])


def test_a_difference_has_students_interval_over_its_seeds() -> None:
    found = difference([0.0, 0.0, 0.0], [1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.high - found.mean == pytest.approx(4.303 / 3**0.5)  # t with 2 degrees of freedom; deviation 1


def test_a_difference_of_one_seed_has_no_interval() -> None:
    found = difference([1.0], [9.0])
    assert found.mean == 8.0 and found.low < 0.0
    assert "one seed" in found.description("requests/s", "colocated")


@pytest.mark.parametrize(
    ("gpus", "words"), [(1, "a split needs two GPUs"), (4, "no split on up to 4 GPUs meets the SLO")]
)
def test_without_a_split_the_verdict_says_why(gpus: int, words: str) -> None:
    question = plan_request(gpus=gpus)
    assert judge(question, [option(question, "colocated", (5.0,))]).words == f"Do not disaggregate: {words}"


def test_headroom_is_that_of_a_seed_at_its_own_goodput() -> None:
    question = plan_request(seeds=(0, 1))
    made = option(question, "colocated", (10.0, 11.0))
    met = {(10.0, 0): 0.93, (10.0, 1): 0.99, (11.0, 0): 0.8, (11.0, 1): 0.95}
    probes = tuple(Probe(rate, seed, Attainment(share, 1.0, share, 1.0)) for (rate, seed), share in met.items())
    told = replace(made, goodput=replace(made.goodput, probes=probes)).headroom
    assert told.startswith("at 10 requests/s TTFT met by 93.0%"), told


def test_bounds_of_searches_that_were_cut_short_tell_no_difference() -> None:
    question = plan_request()
    made = [option(question, "colocated", (10.0,)), option(question, "split", (12.0,))]
    assert "split serves" in judge(question, made, complete=False).words
    cut = replace(made[1], goodput=replace(made[1].goodput, complete=False))
    assert judge(question, [made[0], cut], complete=False).words == "Not decided yet; best so far: colocated"
