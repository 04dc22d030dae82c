"""Turn by turn in the simulator, what was said before is found."""

import pytest

from benchmarks.simulated_turns import cluster_of, simulated_turns
from tests.engine.waiting import wait_for_fetches

BLOCK = 16


def test_the_next_turn_finds_all_of_the_last_one_up_to_a_block_and_computes_of_it_what_is_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raced_s = sum(each.ttft_s for each in simulated_turns(*cluster_of("slo"), users=6, turns=3))
    alone_s = sum(each.ttft_s for each in simulated_turns(*cluster_of("least-loaded"), users=6, turns=3))
    wait_for_fetches(monkeypatch)
    turns = simulated_turns(*cluster_of("slo"), users=6, turns=3)
    assert len(turns) == 12
    assert all(each.cached_tokens >= each.history - BLOCK for each in turns)
    assert raced_s <= 1.05 * sum(each.ttft_s for each in turns)
    assert raced_s < alone_s
