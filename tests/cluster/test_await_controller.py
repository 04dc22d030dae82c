"""Waiting for the controller of a cluster, with Ray's answers replaced."""

from typing import Any

import pytest
import ray

from cluster.runtime import ray_nodes
from cluster.runtime.runtime_errors import RuntimeUnavailable


class Context:
    def get_node_id(self) -> str:
        return "here"


def answers(monkeypatch: pytest.MonkeyPatch, *nodes: dict[str, Any]) -> None:
    monkeypatch.setattr(ray_nodes, "find_controller", lambda cluster: None)
    monkeypatch.setattr(ray, "get_runtime_context", Context)
    monkeypatch.setattr(ray, "nodes", lambda: list(nodes))


@pytest.mark.parametrize("nodes", [(), ({"NodeID": "here", "Alive": False}, {"NodeID": "there", "Alive": True})])
async def test_a_replaced_head_ends_the_wait(monkeypatch: pytest.MonkeyPatch, nodes: tuple[dict[str, Any]]) -> None:
    answers(monkeypatch, *nodes)
    with pytest.raises(RuntimeUnavailable, match="the head of this node's Ray was replaced"):
        await ray_nodes.await_controller("diptych", 600.0)


async def test_the_wait_for_an_unknown_cluster_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, {"NodeID": "here", "Alive": True})
    with pytest.raises(RuntimeUnavailable, match="no cluster called 'diptych' is served on this Ray within 0 s"):
        await ray_nodes.await_controller("diptych", 0.0)
