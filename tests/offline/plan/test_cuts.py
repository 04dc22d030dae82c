"""Possible instances and pairs of them."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.offline.plan.deploy import Layout, WorkerGroup, spec_of
from cluster.offline.plan.layouts import CHUNKS, colocated, instances, is_close
from cluster.offline.plan.request import PlanError
from cluster.spec import Role
from tests.offline.plan.requests import A100, H100, plan_request
from workers.profiles.hardware import DATA
from workers.profiles.profile_errors import ProfileError


def shards(**changed: object) -> set[tuple[int, int]]:
    return {(group.tensor, group.pipeline) for group in instances(plan_request(**{"hardware": (H100,)} | changed))}


def test_a_model_is_only_sharded_so_that_it_fits() -> None:
    assert (1, 1) not in shards(model="llama-3-70b", gpus=8)
    assert (4, 2) in shards(model="llama-3-70b", gpus=8)
    assert shards(gpus=1) == {(1, 1)}


def test_stages_have_equal_layers_where_that_is_possible() -> None:
    assert not {(1, 3), (1, 5)} & shards(gpus=8)
    assert {(8, 2), (4, 3)} <= shards(model="deepseek-v3", hardware=("h200",), gpus=16)  # 61 layers


def test_tensor_ranks_stay_in_a_node() -> None:
    assert max(tensor for tensor, _ in shards(gpus=8, nodes=4)) == 2


def test_all_instances_of_a_kind_have_one_source_of_times() -> None:
    """DistServe's fits cover OPT-13B at TP 1, 2 and 4 only; a roofline for TP 8 would compare sources."""
    question = plan_request(model="opt-13b", hardware=(A100,), gpus=8, source="best")
    assert question.sources == {A100: "distserve"}
    assert {group.tensor for group in instances(question)} == {1, 2, 4}


def test_a_model_that_fits_nowhere_says_what_it_needs() -> None:
    with pytest.raises(PlanError, match=r"llama-3-70b does not fit: it needs 2 h100-80gb at least.*1 were given"):
        instances(plan_request(model="llama-3-70b", hardware=(H100,), gpus=1))


def test_a_source_without_the_model_lists_what_it_has() -> None:
    with pytest.raises(PlanError, match=r"splitwise has no llama-3-8b.*it has .*llama-2-70b"):
        instances(plan_request(source="splitwise"))


def test_a_hardware_file_is_a_kind_too(tmp_path: Path) -> None:
    sheet = json.loads((DATA / "hardware.json").read_text())["l4"]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"mine": sheet}))
    question = plan_request(hardware=(str(path),))
    assert {group.hardware for group in instances(question)} == {str(path)}
    assert spec_of(question, Layout("colocated", (instances(question)[0],))).pools[0].hardware == str(path)


def test_an_error_for_an_unknown_name_has_the_nearest() -> None:
    with pytest.raises(ProfileError, match="llama-3-8b"):
        plan_request(model="lama-3-8b")
    with pytest.raises(ProfileError, match="h100-80gb"):
        plan_request(hardware=("h100-80g",))


def test_colocated_has_every_chunk_size_and_prefill_first() -> None:
    made = colocated([WorkerGroup(Role.MIXED, H100)])
    assert [each.batch_tokens for each in made if each.batching == "chunked"] == list(CHUNKS)
    assert [each.batching for each in made][-1] == "prefill-first"


@given(*[st.integers(1, 4)] * 4, st.integers(1, 4), st.sampled_from((2, 4, 8)))
def test_close_pairs_are_those_of_distserves_repository(
    tensor_p: int, pipeline_p: int, tensor_d: int, pipeline_d: int, nodes: int, per_node: int
) -> None:
    """Some common divisor c of the stages, at most the nodes, leaves segments that fit a node together."""
    question = plan_request(hardware=(H100,), gpus=nodes * per_node, nodes=nodes)
    prefill, decode = (
        WorkerGroup(Role.PREFILL, H100, tensor_p, pipeline_p),
        WorkerGroup(Role.DECODE, H100, tensor_d, pipeline_d),
    )
    expected = any(
        tensor_p * (pipeline_p // c) + tensor_d * (pipeline_d // c) <= per_node
        for c in range(1, nodes + 1)
        if pipeline_p % c == 0 and pipeline_d % c == 0
    )
    assert is_close(question, prefill, decode) == (expected and prefill.gpus + decode.gpus <= question.gpus)
