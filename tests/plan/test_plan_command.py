"""`diptych plan`, as it is typed: answers, and one clear line for what cannot be answered."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cluster.cli import main
from cluster.spec import load_spec

LOAD = ["--workload", "poisson:rate=2,lengths=200-600/5-15,count=100"]
QUICK = ["--requests", "20", "--seeds", "1", "--processes", "1"]
PROMISE = ["--ttft", "0.4", "--tpot", "0.1"]
SMALL = ["--model", "llama-3-8b", "--hardware", "l4", "--gpus", "1", *LOAD, *PROMISE, *QUICK]


def plan(*words: str) -> Result:
    return CliRunner().invoke(main, ["plan", *words])


def test_a_plan_is_told_and_written(tmp_path: Path) -> None:
    out = tmp_path / "plan.yaml"
    result = plan(*SMALL, "--rate", "1", "-o", str(out), "--json")
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout)
    assert value["options"][0]["gpus"] == 1
    assert value["verdict"].startswith("Do not disaggregate")
    assert load_spec(out).pools[0].hardware == "l4"


def test_two_files_are_compared(tmp_path: Path) -> None:
    for name, replicas in (("a", 1), ("b", 2)):
        (tmp_path / f"{name}.yaml").write_text(
            f"model: llama-3-8b\npools: [{{name: all, role: mixed, replicas: {replicas}, hardware: l4, "
            "engine: {kv_blocks: 2000}}]\n"
        )
    result = plan("--what-if", str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml"), *LOAD, *PROMISE, *QUICK)
    assert result.exit_code == 0, result.output
    assert "a.yaml: goodput" in result.stdout and "TTFT p99" in result.stdout


def test_the_buyer_gets_three_answers() -> None:
    words = ["--model", "llama-3-8b", "--hardware", "l4", "--prompt", "200-300", "--output", "5", "--users", "1,2"]
    result = plan(*words, *QUICK)
    assert result.exit_code == 0, result.output
    assert [line[:2] for line in result.stdout.splitlines() if line[:2] in ("1.", "2.", "3.")] == ["1.", "2.", "3."]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "needs --model, --hardware, --gpus, --workload, --ttft, --tpot"),
        ([*SMALL, "--prompt", "5"], 2, "needs --output"),
        ([*SMALL, "--prompt", "5", "--machines", "4"], 2, "one thing at a time"),
        ([*SMALL, "--tpot", "-1"], 2, "--tpot is -1.0"),
        ([*SMALL, "--ttft", "nan"], 2, "--ttft is nan"),
        ([*SMALL, "--target", "2"], 1, "target is 2.0"),
        ([*SMALL, "--rate", "-3"], 1, "rate is -3.0"),
        ([*SMALL, "--nodes", "3"], 1, "nodes is 3"),
        ([*SMALL, "--model", "lama-3-8b"], 1, "did you mean 'llama-3-8b'"),
        ([*SMALL, "--hardware", "a100-80g"], 1, "did you mean 'a100-80gb'"),
        ([*SMALL, "--hardware", "l4,l4"], 1, "different kinds"),
        ([*SMALL, "--model", "llama-3-70b"], 1, "does not fit: it needs 8 l4"),
        ([*SMALL, "--workload", "nothing.csv"], 1, "nothing.csv"),
        ([*SMALL, "--ttft", "0.0001"], 1, "closest:"),
        ([*SMALL, "--objective", "cost"], 1, "price of l4"),
        ([*SMALL, "--prompt", "9-5", "--output", "5"], 1, "--prompt is '9-5'"),
        ([*SMALL, "--prompt", "9", "--output", "5", "--users", "x"], 2, "--users is 'x'"),
        (["--what-if", "no.yaml", "none.yaml", *LOAD, *PROMISE], 1, "no.yaml"),
    ],
)
def test_what_cannot_be_answered_is_one_line(words: list[str], code: int, said: str) -> None:
    result = plan(*words)
    assert result.exit_code == code, result.output
    assert said in result.stderr
    assert "Traceback" not in result.output and "unexpected" not in result.stderr


def test_help_has_examples() -> None:
    assert "--what-if a.yaml b.yaml" in plan("--help").stdout
