"""The command `diptych plan`: its answers and its errors."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cluster.cli import main
from cluster.offline.plan.budget import LIMIT, Budget
from cluster.spec_file import load_spec

LOAD = ["--workload", "poisson:rate=2,lengths=200-600/5-15,count=100"]
QUICK = ["--requests", "20", "--seeds", "1", "--processes", "1"]
TARGETS = ["--ttft", "0.4", "--tpot", "0.1"]
SMALL = ["--model", "llama-3-8b", "--hardware", "l4", "--gpus", "1", *LOAD, *TARGETS, *QUICK]


def plan(*words: str) -> Result:
    return CliRunner().invoke(main, ["plan", *words])


def test_a_plan_is_printed_and_written(tmp_path: Path) -> None:
    out = tmp_path / "plan.yaml"
    result = plan(*SMALL, "--rate", "1", "-o", str(out), "--price", "l4=0.6", "--json")
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout)
    assert value["options"][0]["gpus"] == 1
    assert value["verdict"].startswith("Do not disaggregate")
    assert value["estimates"][0]["cost"]["dollars_h"] == value["question"]["prices"]["l4"] == 0.6
    assert value["first"]["decided"] and value["first"]["options"][0]["goodput"]["requests_per_s"] >= 1.0
    assert value["options"][0]["cost"]["dollars_per_million_output_tokens"] > 0.0
    assert load_spec(out).pools[0].hardware == "l4"


def test_an_instance_has_three_answers() -> None:
    words = ["--model", "llama-3-8b", "--hardware", "l4,a10", "--prompt", "200-300", "--output", "5", "--users", "1,2"]
    result = plan(*words, *QUICK, "--price", "a10=0.7", "--price", "l4=0.3")
    assert result.exit_code == 0, result.output
    assert "a10 $0.7/h (given), l4" in result.stdout or "l4 $0.3/h (given), a10" in result.stdout
    assert "1 more GPU for mixed" in result.stdout
    assert [line[:2] for line in result.stdout.splitlines() if line[:2] in ("1.", "2.", "3.")] == ["1.", "2.", "3."]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "needs --model, --hardware, --gpus, --workload, --ttft, --tpot"),
        ([*SMALL, "--prompt", "5"], 2, "needs --output"),
        ([*SMALL, "--tpot", "-1"], 2, "--tpot is -1.0"),
        ([*SMALL, "--ttft", "nan"], 2, "--ttft is nan"),
        ([*SMALL, "--attainment", "2"], 2, "2.0 is not in the range"),
        ([*SMALL, "--rate", "-3"], 1, "rate is -3.0"),
        ([*SMALL, "--rate", "1e9"], 1, "no layout on up to 1 GPUs serves 1e+09 requests/s"),
        ([*SMALL, "--nodes", "3"], 1, "nodes is 3"),
        ([*SMALL, "--model", "lama-3-8b"], 1, "did you mean 'llama-3-8b'"),
        ([*SMALL, "--hardware", "a100-80g"], 1, "did you mean 'a100-80gb'"),
        ([*SMALL, "--hardware", "l4,l4"], 1, "different kinds"),
        ([*SMALL, "--model", "llama-3-70b"], 1, "does not fit: it needs 8 l4"),
        ([*SMALL, "--workload", "nothing.csv"], 1, "nothing.csv"),
        (["--model", "deepseek-v3", "--hardware", "l4", "--prompt", "9", "--output", "5"], 1, "at most 8 stages"),
        ([*SMALL, "--ttft", "0.0001"], 1, "closest:"),
        ([*SMALL, "--hardware", "l20", "--objective", "cost"], 1, "--price l20=DOLLARS"),
        ([*SMALL, "--price", "l4"], 1, "--price is 'l4'"),
        ([*SMALL, "--price", "l4=-1"], 1, "the price of l4 is -1"),
        ([*SMALL, "--price", "h100=2"], 1, "a price is given for h100, which is none of l4"),
        ([*SMALL, "--prompt", "9-5", "--output", "5"], 1, "--prompt is '9-5'"),
        ([*SMALL, "--prompt", "9", "--output", "5", "--users", "x"], 2, "--users is 'x'"),
        ([*SMALL, "--prompt", "9", "--output", "5", "--ttft", "0"], 2, "--ttft is 0.0"),
        ([*SMALL, "--prompt", "9", "--output", "5", "--hardware", "l4,l4"], 1, "different kinds"),
        ([*SMALL, "--prompt", "9", "--output", "5", "--hardware", ","], 1, "one or more different kinds"),
    ],
)
def test_an_error_is_one_line(words: list[str], code: int, message: str) -> None:
    result = plan(*words)
    assert result.exit_code == code, result.output
    assert message in result.stderr
    assert "Traceback" not in result.output and "unexpected" not in result.stderr


INSTANCE = ["--model", "llama-3-8b", "--hardware", "h100-80gb,l4", "--prompt", "1500-2000", "--output", "500"]
PLACED = ["--model", "llama-3-8b", "--hardware", "l4", "--gpus", "2", *LOAD, *TARGETS]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (INSTANCE, "h100-80gb\n  fits, with KV for"),
        (PLACED, "colocated: "),
    ],
)
def test_the_closed_form_answer_needs_no_simulation(
    words: list[str], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("nothing may be simulated yet")

    monkeypatch.setattr("cluster.offline.plan.budget.Budget.__init__", refuse)
    result = plan(*words)
    assert "without queueing" in result.stdout and line in result.stdout
    assert result.exit_code == 1 and "nothing may be simulated yet" in result.stderr


@pytest.mark.full
def test_a_kind_that_does_not_fit_leaves_the_others_their_answer() -> None:
    few = ["--model", "llama-3-70b", "--hardware", "l4,h100-80gb", "--gpus", "4", "--prompt", "200", "--output", "5"]
    result = plan(*few, "--users", "1", *QUICK, "--json")
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout)
    assert "needs 8 l4" in value["does_not_fit"][0]
    assert {each["layout"]["groups"][0]["hardware"] for each in value["estimates"]} == {"h100-80gb"}


def test_a_kind_whose_kv_is_too_small_leaves_the_others_their_answer() -> None:
    long = ["--model", "llama-3-8b", "--hardware", "l4,h100-80gb", "--prompt", "60000", "--output", "5"]
    result = plan(*long, "--users", "1", "--ttft", "9", *QUICK)
    assert result.exit_code == 0, result.output
    _, answer = result.stdout.split("1. Prefill")
    assert "l4: not simulated: the KV does not hold a long request" in answer
    assert "l4: 0 requests/s: even a short request has 60,005 tokens, more than the KV holds" in answer
    assert "output tokens/s" in answer  # of the H100


def test_the_limit_bounds_the_answer_and_marks_it() -> None:
    result = plan(*INSTANCE, "--limit", "1", "--processes", "1", "--json")
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout)
    assert value["ended_by"] == "the time limit" and value["complete"] is False
    assert value["estimates"][0]["rate"] > 0.0


def started(command: list[str]) -> "subprocess.Popen[str]":
    """In its own process group, which a terminal sends Ctrl-C to."""
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def test_an_interrupt_prints_the_best_so_far() -> None:
    command = [sys.executable, "-m", "cluster.cli", "plan", *INSTANCE, "--processes", "1"]
    with started(command) as process:
        assert process.stdout is not None and process.stderr is not None
        first = process.stderr.readline()
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60.0)
    assert "simulated (at most" in first
    assert process.returncode == 130, err
    assert "without queueing" in out and "3. Goodput" in out
    assert out.rstrip().endswith("Ctrl-C ended the run: this answer is incomplete")
    assert "Traceback" not in err


def test_an_interrupted_search_prints_all_layers_as_json() -> None:
    command = [sys.executable, "-m", "cluster.cli", "plan", *PLACED, "--processes", "1", "--json"]
    with started(command) as process:
        assert process.stderr is not None
        progress = process.stderr.readline()
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60.0)
    assert progress.startswith("first verdict: trying") and process.returncode == 130, err
    assert "Traceback" not in err  # the processes were starting
    value = json.loads(out)
    assert value["ended_by"] == "Ctrl-C" and value["complete"] is False
    assert value["estimates"][0]["rate"] > 0.0 and value["what_if"]["changes"]
    assert value["first"]["decided"] is False and value["verdict"].lower().startswith("not decided")


@pytest.mark.parametrize("words", [INSTANCE, PLACED])
def test_an_interrupt_before_the_simulation_keeps_the_estimate(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cluster.offline.plan.budget.Budget.__init__", interrupt)
    result = plan(*words, "--json")
    assert result.exit_code == 130, result.output
    value = json.loads(result.stdout)
    assert value["ended_by"] == "Ctrl-C" and value["complete"] is False
    assert value["estimates"][0]["rate"] > 0.0 and value["what_if"]["changes"]
    shown = plan(*words)
    assert shown.exit_code == 130 and "without queueing" in shown.stdout
    assert shown.stdout.rstrip().endswith("Ctrl-C ended the run: this answer is incomplete")


def test_an_slo_that_no_layout_meets_is_not_simulated() -> None:
    result = plan(*PLACED, "--tpot", "0.001", "--processes", "1")
    assert result.exit_code == 1 and "First verdict" not in result.stdout
    assert "closest: colocated: 1 x mixed" in result.stderr and "the SLO is 1 ms" in result.stderr


def test_a_plan_that_was_not_decided_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Budget.__init__

    def begin_at_the_limit(budget: Budget, limit_s: float, processes: int) -> None:
        begin(budget, limit_s, processes)
        budget.ended_by = LIMIT

    monkeypatch.setattr(Budget, "__init__", begin_at_the_limit)
    out = tmp_path / "plan.yaml"
    words = ["--model", "llama-3-8b", "--hardware", "h100-80gb", "--gpus", "8", *LOAD, *TARGETS]
    result = plan(*words, "--processes", "1", "-o", str(out))
    assert result.exit_code == 1 and "give a longer --limit" in result.stderr
    assert "Not decided in time" in result.stdout
    assert not out.exists()


@pytest.mark.parametrize(
    "words", [[*INSTANCE, "--prompt", "9000"], [*PLACED, "--workload", "poisson:rate=1,lengths=9000/5,count=20"]]
)
def test_requests_longer_than_the_context_are_named(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("the estimate is enough")

    monkeypatch.setattr("cluster.offline.plan.budget.Budget.__init__", refuse)
    warning = "Warning: 100.0% of the requests are longer than the context of llama-3-8b (8,192 tokens)"
    assert warning in plan(*words, "--ttft", "9").stdout
    assert "Warning" not in plan(*INSTANCE).stdout


def test_help_has_examples() -> None:
    assert "--prompt 1500-2000 --output 500" in plan("--help").stdout


def test_several_kinds_of_gpu_are_compared_by_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of one kind is not a GPU of another."""

    def refuse(*_: object) -> None:
        raise RuntimeError("the estimate is enough")

    monkeypatch.setattr("cluster.offline.plan.budget.Budget.__init__", refuse)
    both = [*PLACED, "--hardware", "l4,h100-80gb"]
    assert "the most requests/s per $/h" in plan(*both).stdout
    assert "the most requests/s per GPU" in plan(*both, "--objective", "gpus").stdout
    assert "the most requests/s per GPU" in plan(*PLACED).stdout
