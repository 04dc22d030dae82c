"""Turn by turn in the simulator, what was said before is found."""

from benchmarks.simulated_turns import cluster_of, simulated_turns

BLOCK = 16


def test_the_next_turn_finds_all_of_the_last_one_up_to_a_block() -> None:
    turns = simulated_turns(*cluster_of("slo"), users=6, turns=3)
    assert len(turns) == 12
    assert all(each.cached_tokens >= each.history - BLOCK for each in turns)
    alone = simulated_turns(*cluster_of("least-loaded"), users=6, turns=3)
    assert sum(each.ttft_s for each in turns) < sum(each.ttft_s for each in alone)
