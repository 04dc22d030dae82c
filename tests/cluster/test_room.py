"""A worker that nobody has room for is told what it lacks. Arithmetic; that Ray is asked is shown in tests/ray."""

import pytest

from cluster.runtime.ray_ranks import shortage

NODES = [{"CPU": 4.0, "memory": 9.0}, {"CPU": 1.0, "GPU": 1.0}]


@pytest.mark.parametrize(
    ("count", "placement", "words"),
    [
        (1, "pack", "for each of 1 ranks, which others hold on the 2 nodes"),
        (5, "pack", "for each of 5 ranks, which others hold"),
        (6, "spread", "for each of 6 ranks; the 2 nodes, if empty, would hold 4, 1 ranks"),
        (5, "strict_pack", "for each of 5 ranks on one node; the 2 nodes, if empty, would hold 4, 1 ranks"),
        (2, "strict_spread", "on each of 2 nodes, which others hold"),
        (3, "strict_spread", "on each of 3 nodes; the 2 nodes, if empty, would hold 4, 1 ranks"),
    ],
)
def test_the_shortage_is_named(count: int, placement: str, words: str) -> None:
    assert f"it needs {{CPU: 1}} {words}" in shortage([{"CPU": 1.0}] * count, placement, NODES)


def test_a_resource_that_no_node_has_is_named() -> None:
    assert "{CPU: 1, TPU: 2}" in shortage([{"CPU": 1.0, "TPU": 2.0}], "pack", NODES)
    assert "the 0 nodes, if empty, would hold no ranks" in shortage([{"CPU": 1.0}], "pack", [])
