"""A worker that nobody has room for is told what it lacks. Arithmetic; that Ray is asked is shown in tests/ray."""

import pytest

from cluster.runtime.ray_ranks import shortage

NODES = [{"CPU": 4.0, "memory": 9.0}, {"CPU": 1.0, "GPU": 1.0}]


@pytest.mark.parametrize(
    ("count", "placement", "words"),
    [
        (1, "pack", "for each of 1 ranks, which others hold on the 2 nodes there are"),
        (5, "pack", "for each of 5 ranks, which others hold"),
        (6, "spread", "for each of 6 ranks; the 2 nodes there are would hold 4, 1 of them, if empty"),
        (5, "strict_pack", "for each of 5 ranks on one node; the 2 nodes there are would hold 4, 1"),
        (2, "strict_spread", "on each of 2 nodes, which others hold"),
        (3, "strict_spread", "on each of 3 nodes; the 2 nodes there are would hold 4, 1"),
    ],
)
def test_the_shortage_is_named(count: int, placement: str, words: str) -> None:
    assert f"it needs {{CPU: 1}} {words}" in shortage([{"CPU": 1.0}] * count, placement, NODES)


def test_a_resource_that_no_node_has_is_named() -> None:
    assert "{CPU: 1, TPU: 2}" in shortage([{"CPU": 1.0, "TPU": 2.0}], "pack", NODES)
    assert "would hold none" in shortage([{"CPU": 1.0}], "pack", [])
