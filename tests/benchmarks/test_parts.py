"""Figures and claims of each part, from given samples."""

import os
import sys
from pathlib import Path

import pytest

from benchmarks import chats, handoff, kv_dtypes, loading, overhead, peer, startup, transfer, turns
from benchmarks.environments import VLLM
from benchmarks.figures import Figure, Spread
from benchmarks.hosted import mixed_spec, refuse_foreign_ray, split_spec
from benchmarks.pinning import paused, pin
from benchmarks.timed_request import TokenTimes, random_prompt
from cluster.offline.load.processes import Child, Line, ProcessFailed
from diptych.events import TokenLogprobs
from kvtransfer.open import RESERVED_BLOCKS


def handoff_sample(second_s: float, step_s: float = 0.05) -> handoff.HandoffSample:
    return handoff.HandoffSample(1.0, second_s, step_s, step_s, 0.01, 0.2)


def cells(figures: tuple[Figure, ...], row: str, column: str) -> list[Spread]:
    return [figure.spread for figure in figures if (figure.row, figure.column) == (row, column)]


def test_times_of_an_answer() -> None:
    times = TokenTimes((1.0, 1.5, 1.6, 1.8, 1.9))
    assert times.ttft_s == 1.0
    assert times.second_s == pytest.approx(0.5)
    assert times.step_s == pytest.approx(0.1)  # 0.1, 0.2, 0.1: the KV handoff's gap does not count
    assert times.tpot_s == pytest.approx(0.9 / 4)


def test_answers_in_other_dtypes_are_compared_with_those_of_float32() -> None:
    def text(answer: tuple[int, ...], *scores: tuple[int, float]) -> kv_dtypes.Text:
        return kv_dtypes.Text(answer, tuple(TokenLogprobs(chosen, ((best, -0.1),)) for best, chosen in scores))

    exact = [text((1, 2, 3, 4), (7, -1.0), (8, -2.0)), text((5,), (9, -3.0))]
    other = [text((1, 2, 9, 4), (7, -1.5), (1, -2.0)), text((5,), (9, -2.75))]
    texts = {"float32": exact, "bfloat16": exact, "int8": other, "fp8": other}
    assert kv_dtypes.agreement(texts, "bfloat16") == (1.0, [0.0, 0.0, 0.0])
    assert kv_dtypes.agreement(texts, "int8") == (2 / 3, [0.5, 0.0, 0.25])
    made = kv_dtypes.quality(texts)
    assert cells(made, "int8", "equal greedy answers") == [Spread(0.5, 0.5, 0.5, 1)]
    assert cells(made, "int8", "tokens before the first other one") == [Spread(0.75, 0.5, 1.0, 2)]


def test_random_prompts_share_no_prefix() -> None:
    import random

    draw = random.Random(0)
    one, other = random_prompt(draw, 64), random_prompt(draw, 64)
    assert len(one) == 64 and one[:16] != other[:16]


def test_a_kv_handoff_may_cost_one_decode_step() -> None:
    colocated = [handoff_sample(0.05), handoff_sample(0.06), handoff_sample(0.05)]
    within = {64: {"split": [handoff_sample(0.1)] * 3, "colocated": colocated}}
    beyond = {64: {"split": [handoff_sample(0.11)] * 3, "colocated": colocated}}
    assert [claim.met for claim in handoff.claims(within)] == [True]
    assert [claim.met for claim in handoff.claims(beyond)] == [False]


def test_handoff_ratios_are_taken_within_a_round() -> None:
    samples = {
        64: {
            "split": [handoff_sample(0.1), handoff_sample(0.4)],
            "colocated": [handoff_sample(0.1), handoff_sample(0.2)],
        }
    }
    made = handoff.figures(samples)
    (compared,) = cells(tuple(f for f in made if f.unit == "x"), "64 tokens", "2nd - 1st")
    assert compared == Spread(1.5, 1.0, 2.0, 2)


@pytest.mark.parametrize(("cached", "ttft_s", "met"), [(504, 0.4, [True, True]), (503, 0.6, [False, False])])
def test_a_turn_finds_the_last_one_and_is_sooner(cached: int, ttft_s: float, met: list[bool]) -> None:
    samples = {
        (2, "reuse"): [turns.TurnSample(ttft_s, 560, cached), turns.TurnSample(ttft_s, 560, 512)],
        (2, "without"): [turns.TurnSample(0.5, 560, 400)] * 2,
    }
    assert [claim.met for claim in turns.claims(samples)] == met
    assert cells(turns.figures(samples), "turn 2, 560 tokens", "TTFT reuse") == [Spread(ttft_s, ttft_s, ttft_s, 2)]


@pytest.mark.parametrize(
    ("cached", "ttft_s", "met"), [(1024, 0.3, [True] * 6), (1015, 0.4, [False, False, True, True, True, True])]
)
def test_a_chat_finds_its_history_in_each_tier(cached: int, ttft_s: float, met: list[bool]) -> None:
    samples = {name: [turns.TurnSample(0.1, 1056, 1024)] * 3 for name in chats.SYSTEMS}
    samples[chats.COMPUTE] = [turns.TurnSample(1.0, 1056, 0)] * 3
    samples["host"] = [turns.TurnSample(ttft_s, 1056, cached)] * 3
    assert [claim.met for claim in chats.claims(samples)] == met
    assert cells(chats.figures(samples), "host", "p50 / compute") == [Spread(ttft_s, ttft_s, ttft_s, 1)]


@pytest.mark.parametrize(("both_s", "met"), [(0.42, True), (0.43, False)])
def test_loading_is_compared_with_the_better_of_reading_and_computing(both_s: float, met: bool) -> None:
    samples: loading.Samples = {
        (128, "0.5", loading.BOTH): [both_s],
        (128, "0.5", loading.COMPUTE): [1.0, 0.8, 0.7],
        (128, "0.5", loading.READ): [0.3, 0.4, 0.5],
        (128, "4", loading.BOTH): [0.8],
        (128, "4", loading.COMPUTE): [1.0, 0.8, 0.7, 0.8],
    }
    assert [claim.met for claim in loading.claims(samples, loading.LINK)] == [met]
    shown = loading.figures(samples, loading.LINK)
    assert [each.median for each in cells(shown, "4", "both / better")] == [1.0]
    assert [each.median for each in cells(shown, "4", "noise")] == [pytest.approx(0.85 / 0.8)], "[1.0, 0.7], [0.8, 0.8]"


def peer_samples(ours: float, unpinned: float, pinned: float) -> peer.Samples:
    return {
        (256, peer.OURS, "unpinned"): [peer.PeerSample(ours, 0.05, 0.05)],
        (256, peer.OURS, "pinned"): [peer.PeerSample(2 * ours, 0.05, 0.05)],
        (256, peer.THEIRS, "unpinned"): [peer.PeerSample(unpinned, 0.2, 0.1, unpinned - 0.1)],
        (256, peer.THEIRS, "pinned"): [peer.PeerSample(pinned, 0.2, 0.1, pinned - 0.1)],
    }


def test_the_peers_better_configuration_counts() -> None:
    samples = peer_samples(ours=1.0, unpinned=9.0, pinned=1.6)
    assert peer.better_configuration(samples, 256, peer.THEIRS) == "pinned"
    (claim,) = peer.claims(samples)
    assert claim.value == pytest.approx(1.0 / 1.6)
    assert not claim.met


def test_half_the_peers_ttft_is_the_target() -> None:
    (claim,) = peer.claims(peer_samples(ours=1.0, unpinned=2.0, pinned=4.0))
    assert claim.met


def test_without_the_peer_its_part_is_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VLLM.variable, str(tmp_path))
    part = peer.measure(1, True, print)
    assert "peer-install" in part.skipped and not part.figures


def burst(num_tokens: int, requests: int = 10) -> overhead.BurstResult:
    """10 ms of CPU a request and 2 ms a token; half of that in wall time."""
    cpu_s = requests * (0.010 + 0.002 * num_tokens)
    return overhead.BurstResult(requests, cpu_s / 2, cpu_s, 0.01, 0.002, 1.0)


def test_token_and_request_costs_are_separated() -> None:
    sample = overhead.OverheadSample(burst(overhead.SHORT), burst(overhead.LONG))
    assert sample.token_cpu_s == pytest.approx(0.002)
    assert sample.token_wall_s == pytest.approx(0.001)
    assert sample.request_cpu_s == pytest.approx(0.010)
    assert sample.requests_per_core_s == pytest.approx(1 / (0.010 + 0.002 * overhead.LONG))


def test_overhead_has_ratios_between_systems() -> None:
    samples = {
        (1, system): [overhead.OverheadSample(burst(overhead.SHORT), burst(overhead.LONG))]
        for system in overhead.SYSTEMS
    }
    made = overhead.figures(samples)
    assert {figure.spread.median for figure in made if figure.column == "ray / server"} == {1.0}


SERVED = (
    Line("starting Ray on this machine", 11.0),
    Line("starting 2 workers: loading smollm2-135m", 15.0),
    Line("prefill-0: starting", 15.5),
    Line("decode-0: ready (pid 12)", 18.0),
    Line("prefill-0: ready (pid 11)", 20.0),
    Line("prefill-0 -> decode-0: nixl, UCX cma/memory (same host), 5.00 GB/s, 80 us", 20.5),
    Line("ready: grpc://127.0.0.1:50051", 21.0),
)


def test_startup_phases_end_at_lines_of_serve() -> None:
    assert startup.phases(SERVED, 10.0) == {
        "command and imports": 1.0,
        "Ray up": 4.0,
        "workers ready": 5.0,
        "servers open": 1.0,
    }


def test_a_startup_without_ready_line_raises_an_error() -> None:
    with pytest.raises(ValueError, match="servers open"):
        startup.phases(SERVED[:-1], 10.0)


def test_memory_is_compared_with_weights_and_pool() -> None:
    one, bare = startup.ProcessUsage(100, 200, 0.02), startup.ProcessUsage(60, 120, 0.005)
    sample = startup.StartupSample({"Ray up": 4.0}, 6.0, {"worker decode": one, "gateway": one}, 2.0, 4.0, one, bare)
    made = startup.figures([sample], {"worker decode": 80})
    assert [each.median for each in cells(made, "worker decode", "USS / (weights + KV pool)")] == [1.25]
    assert [each.median for each in cells(made, "together", "USS / floor")] == [2.0]
    assert [each.median for each in cells(made, "together", "/ floor")] == [2.0]
    assert [each.median for each in cells(made, "together", "CPU / floor")] == [1.5]
    assert [each.median for each in cells(made, "gateway", "USS above a bare actor")] == [40.0]
    assert [each.median for each in cells(made, "our processes", "idle above bare actors")] == [pytest.approx(0.03)]


def test_scattered_plans_use_every_block_once_and_no_reserved_block() -> None:
    for plan in transfer.plans({"1 MiB": 16, "2 MiB": 32}, 80):
        assert len(set(plan.source)) == len(set(plan.target)) == len(plan.source)
        assert min(plan.source + plan.target) >= RESERVED_BLOCKS and max(plan.source + plan.target) < 80


def test_measured_clusters_fit_side_by_side() -> None:
    pools = [pool for spec in (split_spec(), mixed_spec()) for pool in spec.pools]
    assert sum(pool.resources.cpu for pool in pools) <= 2
    assert {pool.engine.threads for pool in pools} == {1}


def test_a_foreign_ray_is_refused() -> None:
    refuse_foreign_ray({})
    with pytest.raises(ValueError, match="unset"):
        refuse_foreign_ray({"RAY_ADDRESS": "10.0.0.1:6379"})


CHILD = "import sys; print('up', flush=True); sys.stdin.read()"


def test_a_child_process_is_read_pinned_paused_and_ended() -> None:
    core = min(os.sched_getaffinity(0))
    with Child([sys.executable, "-c", CHILD]) as child:
        assert child.wait_line("up", 60.0).at_s > child.started_s
        pin([child.pid], [core])
        assert os.sched_getaffinity(child.pid) == {core}
        with paused([child.pid]):
            assert child.running
        assert [process.pid for process in child.family()] == [child.pid]
    assert not child.running


def test_a_child_that_ends_early_reports_its_output() -> None:
    with (
        Child([sys.executable, "-c", "print('no luck')"]) as child,
        pytest.raises(ProcessFailed, match="no luck"),
    ):
        child.wait_line("up", 60.0)
