"""A layout as a cluster, and the cluster as a file."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.offline.plan.deploy import Layout, WorkerGroup, decode_alone, models_of, spec_of
from cluster.offline.plan.layouts import CHUNKS
from cluster.offline.plan.report import spec_yaml
from cluster.offline.sim import fleet
from cluster.spec import Role
from cluster.spec_file import load_spec, parse_spec
from tests.offline.plan.requests import A100, H100, plan_request

BOTH = plan_request(hardware=(A100, H100), gpus=64)


def groups(role: Role) -> st.SearchStrategy[WorkerGroup]:
    kinds, cuts = st.sampled_from((A100, H100)), st.sampled_from((1, 2, 4))
    batching = st.sampled_from(("chunked", "prefill-first"))
    return st.builds(
        WorkerGroup, st.just(role), kinds, cuts, cuts, st.integers(1, 9), batching, st.sampled_from(CHUNKS)
    )


layouts = st.one_of(
    st.builds(lambda one: Layout("colocated", (one,)), groups(Role.MIXED)),
    st.builds(
        lambda one, two, routing: Layout("split", (one, two), routing),
        groups(Role.PREFILL),
        groups(Role.DECODE),
        st.sampled_from(("least-loaded", "splitwise")),
    ),
)


@given(layouts)
def test_a_cluster_file_is_read_back_as_it_was(layout: Layout) -> None:
    import yaml

    spec = spec_of(BOTH, layout)
    assert parse_spec(yaml.safe_load(spec_yaml(spec, ["why: because", "and # so on"]))) == spec


def test_comments_come_first_and_do_not_change_the_cluster(tmp_path: Path) -> None:
    spec = spec_of(BOTH, Layout("colocated", (WorkerGroup(Role.MIXED, H100, 2),)))
    path = tmp_path / "plan.yaml"
    path.write_text(spec_yaml(spec, ["evidence", "", "pools: [none]"]))
    assert path.read_text().startswith("# evidence\n#\n# pools: [none]\n")
    assert load_spec(path) == spec


def test_each_rank_asks_for_a_gpu_and_for_its_kind_where_there_are_several() -> None:
    mixed = spec_of(BOTH, Layout("split", (WorkerGroup(Role.PREFILL, H100), WorkerGroup(Role.DECODE, A100))))
    assert [pool.resources.gpu for pool in mixed.pools] == [1, 1]
    assert [set(pool.resources.custom) for pool in mixed.pools] == [
        {"accelerator_type:H100"},
        {"accelerator_type:A100"},
    ]
    assert not spec_of(BOTH, Layout("colocated", (WorkerGroup(Role.MIXED, H100),))).pools[0].resources.custom


def test_kv_goes_over_as_many_links_as_the_smaller_side_has() -> None:
    def byte_s(prefill: int, decode: int, kv_link: str = "intra-node") -> set[float]:
        layout = Layout("split", (WorkerGroup(Role.PREFILL, H100, prefill), WorkerGroup(Role.DECODE, H100, decode)))
        models = models_of(plan_request(hardware=(H100,), gpus=64, kv_link=kv_link), layout)
        return {round(model.cost.transfer_byte_s * 1e15) for model in models.values()}

    assert byte_s(1, 4) == byte_s(4, 1) == byte_s(1, 1)
    (one,), (four,) = byte_s(1, 1), byte_s(4, 4)
    assert one == pytest.approx(4 * four, rel=1e-3)


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_quantized_kv_gives_more_blocks_and_smaller_transfers(dtype: str) -> None:
    """In a plan, and in a simulation of the cluster file that it writes."""
    layout = Layout("colocated", (WorkerGroup(Role.MIXED, H100, 1),))
    plain, quantized = (plan_request(hardware=(H100,), kv_dtype=each) for each in ("", dtype))
    (one,), (other,) = (spec_of(each, layout).pools for each in (plain, quantized))
    assert (one.engine.dtype, other.engine.dtype) == ("bfloat16", dtype)
    assert other.engine.kv_blocks == pytest.approx(256 / 132 * one.engine.kv_blocks, rel=1e-3)
    (costs,), (other_costs,) = (models_of(each, layout).values() for each in (plain, quantized))
    assert other_costs.kv_token_bytes == costs.kv_token_bytes * 132 // 256
    assert other_costs.cost.decode_seconds(1, 8000) < costs.cost.decode_seconds(1, 8000)
    (simulated,) = fleet.models_of(spec_of(quantized, layout), source="roofline").values()
    assert simulated.kv_token_bytes == other_costs.kv_token_bytes
    left_out = replace(other, engine=replace(other.engine, kv_blocks=0))
    assert fleet.with_kv_blocks(replace(spec_of(quantized, layout), pools=(left_out,))).pools == (other,)


def test_kv_crosses_nodes_only_where_one_node_is_too_small() -> None:
    def byte_s(replicas: int, kv_link: str) -> float:
        layout = Layout("split", (WorkerGroup(Role.PREFILL, H100, 1, 1, replicas), WorkerGroup(Role.DECODE, H100)))
        return models_of(plan_request(hardware=(H100,), gpus=64, kv_link=kv_link), layout)[
            "decode"
        ].cost.transfer_byte_s

    assert byte_s(7, "inter-node") == byte_s(7, "intra-node") == byte_s(8, "intra-node")
    assert byte_s(8, "inter-node") > byte_s(7, "inter-node")


def test_decode_alone_has_free_prompts_and_handoffs() -> None:
    case = decode_alone(plan_request(hardware=(H100,)), WorkerGroup(Role.DECODE, H100))
    assert case.models["prefill"].cost.prefill_seconds(10_000) == 0.0
    assert case.models["decode"].cost.transfer_seconds(1 << 30) == 0.0
    assert case.models["decode"].cost.decode_seconds(1, 100) > 0.0
