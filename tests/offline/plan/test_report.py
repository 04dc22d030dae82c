"""Every file that is shipped or written for `serve` has a model that it takes, or says what to fill in."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.offline.plan.report import how_to_start, weights_of
from cluster.spec_file import load_spec
from tests.offline.plan.test_plan_command import SMALL, plan
from workers.errors import ModelError
from workers.model.families import FAMILIES
from workers.model.fetch import PINNED
from workers.model.store import resolve
from workers.profiles.shapes import SHAPES, WEIGHTS, canonical

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))
SERVED = [path for path in EXAMPLES if path.name != "helm-values.yaml"]  # the chart's tests install that one
HUB_ID = r"[\w.-]+/[\w.-]+"


def takes(model: str) -> bool:
    """Whether `serve` knows where to get it."""
    return model in PINNED or bool(re.fullmatch(HUB_ID, model)) or Path(model).is_dir()


@pytest.mark.parametrize("path", SERVED, ids=lambda path: path.name)
def test_an_example_names_a_model_that_serve_takes(path: Path) -> None:
    assert takes(load_spec(str(path)).model)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_a_command_in_an_example_names_a_file_that_is_there(path: Path) -> None:
    for file in re.findall(r"(?:-f|python) (examples/[\w./-]+)", path.read_text()):
        assert (ROOT / file).is_file(), f"{path.name} names {file}"


def test_an_example_for_other_machines_says_what_to_fill_in() -> None:
    needing = [path for path in SERVED if any(pool.resources.gpu for pool in load_spec(str(path)).pools)]
    assert [path.name for path in needing] == ["gpu-types.yaml"]
    assert "RAY_ADDRESS=HOST:6379" in needing[0].read_text() and "HF_TOKEN" in needing[0].read_text()


def test_every_shape_has_weights_that_serve_takes_unless_its_family_is_not_served() -> None:
    assert all(takes(weights) and canonical(weights) == shape for shape, weights in WEIGHTS.items())
    assert {shape.partition("-")[0] for shape in set(SHAPES) - set(WEIGHTS)} == {"opt", "bloom"}
    assert not any(name.lower().startswith(("opt", "bloom")) for name in FAMILIES)


@pytest.mark.parametrize(
    ("model", "weights"),
    [
        ("llama-3-8b", "meta-llama/Meta-Llama-3-8B"),
        ("llama3-8b", "meta-llama/Meta-Llama-3-8B"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "meta-llama/Meta-Llama-3-8B-Instruct"),
        ("smollm2-135m", "smollm2-135m"),
        ("opt-13b", None),
        ("facebook/opt-13b", None),
    ],
)
def test_what_serve_takes_for_the_model_of_a_plan(model: str, weights: str | None) -> None:
    assert weights_of(model) == weights


def test_a_plan_from_a_config_names_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert weights_of(str(tmp_path / "config.json")) == weights_of(str(tmp_path)) == str(tmp_path.resolve())


def test_a_plan_for_a_family_that_is_not_served_says_so_instead_of_a_command_that_fails() -> None:
    how = how_to_start(Path("plan.yaml"), "opt-13b", weights_of("opt-13b"))
    assert (
        how == "Diptych serves no opt-13b: `model` must name another one before `diptych serve -f plan.yaml` can start"
    )


def test_a_written_plan_names_weights_and_the_command_that_starts_it(tmp_path: Path) -> None:
    out = tmp_path / "plan.yaml"
    result = plan(*SMALL, "-o", str(out))
    assert result.exit_code == 0, result.output
    command = f"RAY_ADDRESS=HOST:PORT diptych serve -f {out}"
    assert command in result.output and command in out.read_text()
    assert load_spec(str(out)).model == "meta-llama/Meta-Llama-3-8B"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("llama-3-8b", "a shape to plan and simulate with; give its weights as meta-llama/Meta-Llama-3-8B"),
        ("opt-13b", "a shape to plan and simulate with; Diptych does not serve its family"),
    ],
)
def test_a_shape_is_no_model_and_its_refusal_says_what_to_give(name: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        resolve(name)


def test_an_example_that_wants_arguments_says_which() -> None:
    command = [sys.executable, str(ROOT / "examples" / "ask.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "endpoint, prompt, max_tokens" in done.stderr and "Traceback" not in done.stderr
