"""What the peers get and how their answers are read. The peers themselves are not here."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.__main__ import main
from benchmarks.peer_simulators.distserve_case import CASES, attained, gain, trial
from benchmarks.peer_simulators.process import PeerFailed, PeerSource, started
from benchmarks.peer_simulators.sources import DISTSERVE, SPLITWISE, VIDUR
from benchmarks.peer_simulators.speed import vidur_costs
from workers.profiles.sources import profile_of


@pytest.mark.parametrize("source", [DISTSERVE, SPLITWISE, VIDUR], ids=["DistServe", "SplitwiseSim", "Vidur"])
def test_a_missing_peer_is_one_line_with_its_option_and_home(
    source: PeerSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(source.variable, raising=False)
    told = f"{source.title}: not named; {source.option} PATH ({source.variable}) names {source.home}"
    assert source.missing() == told


def test_a_folder_without_the_peer_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["peer-placement", "--distserve", str(tmp_path)], env={"RAY_ADDRESS": None})
    assert result.exit_code == 0, result.output
    assert f"no {DISTSERVE.marker} in {tmp_path}" in " ".join(result.output.split())


def test_a_peer_that_ends_gives_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DISTSERVE.variable, str(tmp_path))
    with started(DISTSERVE) as peer, pytest.raises(PeerFailed, match="ended: ModuleNotFoundError: No module named"):
        peer({"model": "facebook/opt-13b"})


def test_a_request_attains_both_or_each_slo_alone() -> None:
    ttft_s, tpot_s = [0.1, 0.3, 0.1, 0.1], [0.05, 0.05, 0.2, 0.05]
    assert attained(ttft_s, tpot_s, each_alone=False).both == 0.5
    assert attained(ttft_s, tpot_s, each_alone=True).both == 0.75


def test_a_gain_is_paired_over_the_seeds() -> None:
    assert gain([1.0, 2.0, 3.0], [1.5, 2.5, 3.5]) == "0.50 (0.50 to 0.50)"
    assert gain([1.0, 2.0], [1.0, 3.0]) == "0.50 (-5.85 to 6.85)"


def test_layouts_have_the_gpus_and_the_fits_of_their_case() -> None:
    trials = {case.name: trial(case, 300) for case in CASES}
    assert trials["split, prefill TP 2, decode TP 1"].gpus == 3
    assert trials["colocated TP 4"].gpus == 4
    ours, vllm = (trials[name].case.models for name in ("colocated TP 4", "colocated TP 4, fits of vLLM"))
    steps_s = [models["mixed"].cost.decode_seconds(1, 500) for models in (ours, vllm)]
    assert steps_s == pytest.approx([12.4e-3, 28.1e-3], rel=0.02)  # 2 ms of each are the step's overhead


def test_vidurs_tables_add_up_to_our_steps() -> None:
    cost = profile_of("llama-2-70b", "a100-80gb", 8, source="vidur").cost
    costs = vidur_costs(cost)
    decode = {(batch, context): ms for batch, context, ms in costs["decode"]}
    prefill = {(context, chunk): ms for context, chunk, ms in costs["prefill"]}
    step_s = (costs["tokens"][32 + 512 - 1] + decode[32, 1024] + prefill[1024, 512]) / 1e3
    assert step_s == pytest.approx(cost.mixed_seconds(((512, 512),), 32, 32 * 1024), rel=1e-9)
    assert {chunk for _, chunk in prefill} <= set(range(32, 16385, 32))
