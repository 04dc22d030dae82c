"""The error for a worker that fits on no node says what is missing. Arithmetic only; tests/ray asks Ray."""

from dataclasses import replace
from pathlib import Path

import pytest

from cluster.runtime.placement import Node, has_labels, listed, own_labels, own_resources, selectors, shortage
from cluster.runtime.runtime_errors import RuntimeUnavailable
from cluster.spec import PoolSpec, Resources, Role
from cluster.spec_file import laptop_spec, load_spec
from workers.config import ParallelConfig

ROOMS = {"CPU": 4.0, "memory": 9.0}, {"CPU": 1.0, "GPU": 1.0}
NODES = [Node(room) for room in ROOMS]
KINDS = [Node(ROOMS[0], {"gpu": "h100", "ray.io/node-id": "1f"}), Node(ROOMS[1], {"gpu": "a100"}), Node(ROOMS[1])]


@pytest.mark.parametrize(
    ("count", "placement", "words"),
    [
        (1, "pack", ", which others hold on the 2 nodes"),
        (5, "pack", " for each of 5 ranks, which others hold"),
        (6, "spread", " for each of 6 ranks; the 2 nodes, if empty, would hold 4, 1 ranks"),
        (5, "strict_pack", " for each of 5 ranks on one node; the 2 nodes, if empty, would hold 4, 1 ranks"),
        (2, "strict_spread", " on each of 2 nodes, which others hold"),
        (3, "strict_spread", " on each of 3 nodes; the 2 nodes, if empty, would hold 4, 1 ranks"),
    ],
)
def test_the_shortage_is_named(count: int, placement: str, words: str) -> None:
    assert f"it needs {{CPU: 1}}{words}" in shortage(Resources(), ParallelConfig(count, placement=placement), NODES)


def test_a_resource_that_no_node_has_is_named() -> None:
    assert "{CPU: 1, TPU: 2}" in shortage(Resources(custom={"TPU": 2.0}), ParallelConfig(), NODES)
    assert "{CPU: 1, accelerator_type:H100: 1}" in shortage(
        Resources(custom={"accelerator_type:H100": 1.0}), ParallelConfig(), NODES
    )
    assert "the 0 nodes, if empty, would hold no ranks" in shortage(Resources(), ParallelConfig(), [])


def test_resources_that_ray_adds_are_not_listed() -> None:
    added = {"node:10.0.0.1": 1.0, "node:__internal_head__": 1.0, "bundle_group_0_1f": 1000.0, "CPU_group_0_1f": 1.0}
    assert listed({"CPU": 2.0, **added}) == "CPU: 2"


@pytest.mark.parametrize(
    ("selector", "chosen"),
    [("h100", "h"), ("!h100", "an"), ("in(h100, a100)", "ha"), ("!in(h100,a100)", "n"), ("l4", "")],
)
def test_selectors_match_like_rays(selector: str, chosen: str) -> None:
    assert [name for name, node in zip("han", KINDS, strict=True) if has_labels(node.labels, {"gpu": selector})] == [
        *chosen
    ]


def test_unknown_labels_are_reported_with_the_existing_ones() -> None:
    received = shortage(Resources(labels={"gpu": "l4"}), ParallelConfig(), KINDS)
    assert received == (
        "it needs {CPU: 1}, labels {gpu: l4}; no node has these labels, there are 1 with "
        "{gpu: h100}, 1 with {gpu: a100}, 1 with none"
    )
    assert shortage(Resources(labels={"gpu": "l4"}), ParallelConfig(), []).endswith("there are no nodes")


def test_only_nodes_with_the_labels_are_counted() -> None:
    wanted = Resources(labels={"gpu": "h100"})
    assert shortage(wanted, ParallelConfig(4), KINDS).endswith("which others hold on the only node with these labels")
    assert shortage(wanted, ParallelConfig(5), KINDS).endswith(
        "the only node with these labels, if empty, would hold 4 ranks"
    )
    assert selectors(wanted, ParallelConfig(2)) == [{"gpu": "h100"}] * 2
    assert selectors(Resources(), ParallelConfig(2)) is None


def test_a_local_ray_has_the_labels_of_all_pools() -> None:
    def spec(first: dict[str, str], second: dict[str, str]) -> dict[str, str]:
        pools = (
            PoolSpec("prefill", Role.PREFILL, resources=Resources(labels=first)),
            PoolSpec("decode", Role.DECODE, resources=Resources(labels=second)),
        )
        return own_labels(replace(laptop_spec(), pools=pools))

    assert spec({"gpu": "in(h100, h200)", "ray.io/market-type": "spot"}, {"zone": "a"}) == {"gpu": "h100", "zone": "a"}
    assert spec({"gpu": "!l4"}, {}) == {}
    with pytest.raises(RuntimeUnavailable, match="pool decode wants nodes with gpu: a100, another pool gpu: h100"):
        spec({"gpu": "h100"}, {"gpu": "a100"})


def test_a_local_ray_has_the_custom_resources_of_the_pools_maximum() -> None:
    pool = PoolSpec("mixed", Role.MIXED, 1, min_replicas=1, max_replicas=3, parallel=ParallelConfig(2))
    spec = replace(laptop_spec(), pools=(replace(pool, resources=Resources(custom={"fast": 2.0})),))
    assert own_resources(spec) == {"fast": 12.0}


@pytest.mark.parametrize(
    "labels", [{"": "a"}, {"gpu": ""}, {"gpu": "in()"}, {"-x": "a"}, {"gpu": "a b"}, {"a/b/c": "d"}]
)
def test_invalid_labels_are_refused(labels: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="labels"):
        Resources(labels=labels)


def test_the_example_of_two_gpu_types_puts_each_pool_on_its_type() -> None:
    spec = load_spec(Path(__file__).parents[2] / "examples" / "gpu-types.yaml")
    kinds = [{"ray.io/accelerator-type": kind} for kind in ("H100", "A100", "A100-80G", "L4")]
    placed = [[has_labels(kind, pool.resources.labels) for kind in kinds] for pool in spec.pools]
    assert placed == [[True, False, False, False], [False, True, True, False]]
    quick, cheap = (pool.cost for pool in spec.pools)
    assert quick is not None and cheap is not None
    assert cheap.prefill_seconds(1000) > 2 * quick.prefill_seconds(1000)
