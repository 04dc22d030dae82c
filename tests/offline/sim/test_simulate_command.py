"""The command `diptych simulate`: tables, files, and one line for every mistake."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cluster.cli import main

LOAD = "poisson:rate=4,count=12,lengths=100-300/8-16"
EQUAL = ("--model", "opt-13b", "--hardware", "a100-80gb", "--workers", "2", "--processes", "1")
YAML = """
model: llama-3-8b
pools:
  - {name: prefill, role: prefill, hardware: a100-80gb}
  - {name: decode, role: decode, cost: {step_s: 0.01, prefill_token_s: 0.0001}, engine: {kv_blocks: 2000}}
"""


def simulate(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["simulate", *arguments])


def simulated(*arguments: str) -> list[dict]:
    result = simulate(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: list[dict] = json.loads(result.stdout)
    return found


def test_systems_are_compared_in_one_table() -> None:
    result = simulate("--compare", "sarathi,distserve", *EQUAL, "--workload", LOAD, "--ttft", "1", "--tpot", "0.1")
    assert result.exit_code == 0
    assert "sarathi" in result.stdout and "distserve" in result.stdout and "100.0%" in result.stdout
    assert "TTFT <= 1 s and TPOT <= 0.1 s" in " ".join(result.stdout.split())


def test_a_cluster_file_is_simulated_with_its_gpus_and_its_costs(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(YAML)
    (found,) = simulated("-f", str(file), "--workload", LOAD)
    assert found["system"] == "diptych"
    assert {pool["pool"] for pool in found["figures"]["pools"]} == {"prefill", "decode"}


def test_the_same_command_prints_the_same_again(tmp_path: Path) -> None:
    arguments = ("--compare", "ours", *EQUAL, "--workload", LOAD, "--seed", "4")
    first, second = simulated(*arguments), simulated(*arguments)
    for found in (first, second):
        found[0]["figures"].pop("wall_s", None)
    assert first == second


@pytest.mark.full
def test_goodput_comes_with_report_pictures_and_trace(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (found,) = simulated(
        *("--compare", "sarathi", *EQUAL, "--workload", LOAD, "--ttft", "0.5", "--tpot", "0.2"),
        *("--goodput", "--attainment", "0.9", "--seeds", "1", "--requests", "10", "--trace", "-o", str(out)),
    )
    (goodput,) = found["goodput"]
    assert goodput["target"] == 0.9 and goodput["rate"] > 0
    names = {path.name for path in out.iterdir()}
    assert names >= {"report.html", "figures.json", "goodput.png", "sarathi.trace.json"}
    assert json.loads((out / "sarathi.trace.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--workload", LOAD), 2, "either a cluster YAML (-f) or systems (--compare)"),
        (("--compare", "vllm", "--workload", LOAD), 2, "--compare needs --model and --hardware"),
        (("--compare", "vlm", *EQUAL, "--workload", LOAD), 1, "'vlm' is not one of static, orca"),
        (("--compare", "vllm", *EQUAL, "--workload", "nowhere.csv"), 1, "neither a trace file nor a process"),
        (("--compare", "vllm", *EQUAL, "--workload", LOAD, "--ttft", "0"), 2, "above 0 seconds"),
        (("--compare", "vllm", *EQUAL, "--workload", LOAD, "--goodput"), 2, "needs an SLO"),
        (("--compare", "distserve", *EQUAL, "--workers", "1", "--workload", LOAD), 1, "leave one to decode"),
        (("--compare", "ours", *EQUAL, "--model", "opt-13", "--workload", LOAD), 1, "did you mean 'opt-13b'"),
        (("--compare", "ours", *EQUAL, "--hardware", "l4", "--workload", LOAD), 1, "it needs 2 at least"),
        (("-f", "examples/laptop.yaml", "--workload", LOAD), 1, "neither cost (measure it with `diptych profile`)"),
        (("-f", "examples/laptop.yaml", "--profile", "no.json", "--workload", LOAD), 1, "`diptych profile` writes one"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_is_one_line(arguments: tuple[str, ...], code: int, words: str) -> None:
    result = simulate(*arguments)
    assert result.exit_code == code
    assert words in " ".join(result.output.split())
    assert "Traceback" not in result.output
