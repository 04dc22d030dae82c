"""The chart as a part of another one, which switches it on and says where images come from."""

from pathlib import Path

import pytest
import yaml

from tests.helm.chart import CHART, Object, pods
from tests.helm.programs import run

pytestmark = pytest.mark.full

ABOUT = {
    "apiVersion": "v2",
    "name": "parent",
    "version": "1.0.0",
    "dependencies": [{"name": "diptych", "version": "0.1.0", "condition": "diptych.enabled"}],
}
OWN = {"enabled": True, "ray": {"auth": {"token": "secret"}}, "imagePullSecrets": [{"name": "one"}]}


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    (tmp_path / "charts").mkdir()
    (tmp_path / "charts" / "diptych").symlink_to(CHART)
    (tmp_path / "Chart.yaml").write_text(yaml.safe_dump(ABOUT))
    return tmp_path


def rendered_in(parent: Path, values: Object) -> tuple[Object, ...]:
    (parent / "values.yaml").write_text(yaml.safe_dump(values))
    code, out, err = run("helm", "template", "release", parent)
    assert code == 0, err
    return tuple(each for each in yaml.load_all(out, Loader=yaml.CSafeLoader) if each)


def test_a_condition_switches_it_on_and_off(parent: Path) -> None:
    assert rendered_in(parent, {"diptych": OWN})
    assert rendered_in(parent, {"diptych": OWN | {"enabled": False}}) == ()


@pytest.mark.parametrize("mode", ["native", "kuberay"])
def test_registry_and_pull_secrets_of_all_charts_are_this_one_s_too(parent: Path, mode: str) -> None:
    shared = {"imageRegistry": "registry.example.com", "imagePullSecrets": ["two", {"name": "three"}, "one"]}
    everything = {"global": shared, "diptych": OWN | {"mode": mode, "image": {"registry": "own.example.com"}}}
    found = pods(rendered_in(parent, everything))
    assert found
    for name, pod in found:
        assert pod["containers"][0]["image"] == "registry.example.com/diptych:0.1.0", name
        assert pod["imagePullSecrets"] == [{"name": "one"}, {"name": "two"}, {"name": "three"}], name


def test_a_parent_with_nothing_to_say_changes_nothing(parent: Path) -> None:
    for name, pod in pods(rendered_in(parent, {"diptych": OWN})):
        assert pod["containers"][0]["image"] == "diptych:0.1.0", name
        assert pod["imagePullSecrets"] == [{"name": "one"}]
