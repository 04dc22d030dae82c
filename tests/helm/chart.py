"""The chart, rendered by the real helm: objects as the API server would get them, or the words of a refusal."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from cluster.spec import ClusterSpec
from cluster.spec_file import load_spec
from tests.helm.programs import run

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "diptych"
VALUES = [*sorted((Path(__file__).parent / "values").glob("*.yaml")), ROOT / "examples" / "helm-values.yaml"]
TOKEN = ("--set", "ray.auth.token=secret")

Object = dict[str, Any]


def values(name: str) -> Path:
    return Path(__file__).parent / "values" / f"{name}.yaml"


@cache
def rendered(path: Path, *options: str) -> tuple[Object, ...]:
    """Do not change them: they are shared."""
    code, out, err = run("helm", "template", "release", CHART, "--namespace", "llm", "-f", path, *options)
    assert code == 0, err
    return tuple(each for each in yaml.load_all(out, Loader=yaml.CSafeLoader) if each)


def refusal(*options: str) -> str:
    """What helm says that is not the same for all refusals: one line."""
    code, _, err = run("helm", "template", "release", CHART, *options)
    assert code != 0, "it was accepted"
    around = ("Error: values don't meet", "diptych:", "Use --debug")
    lines = [line for line in err.splitlines() if line.strip() and not line.startswith(around)]
    assert len(lines) == 1, err
    return lines[0]


def of_kind(objects: tuple[Object, ...], kind: str) -> list[Object]:
    return [each for each in objects if each["kind"] == kind]


def pods(objects: tuple[Object, ...]) -> list[tuple[str, Object]]:
    """Name and specification of every pod or template."""
    found = [(each["metadata"]["name"], each["spec"]) for each in of_kind(objects, "Pod")]
    for each in of_kind(objects, "Deployment") + of_kind(objects, "StatefulSet"):
        found.append((each["metadata"]["name"], each["spec"]["template"]["spec"]))
    for each in of_kind(objects, "RayCluster"):
        found.append(("head", each["spec"]["headGroupSpec"]["template"]["spec"]))
        found += [(group["groupName"], group["template"]["spec"]) for group in each["spec"]["workerGroupSpecs"]]
    for each in of_kind(objects, "RayJob"):
        if "submitterPodTemplate" in each["spec"]:
            found.append(("submitter", each["spec"]["submitterPodTemplate"]["spec"]))
    return found


def cluster_file(objects: tuple[Object, ...]) -> str:
    """What is mounted as /etc/diptych/cluster.yaml."""
    (found,) = [each for each in of_kind(objects, "ConfigMap") if "cluster.yaml" in each["data"]]
    text: str = found["data"]["cluster.yaml"]
    return text


def mounted(objects: tuple[Object, ...], folder: Path) -> ClusterSpec:
    """The mounted file as `diptych serve -f` reads it."""
    path = folder / "cluster.yaml"
    path.write_text(cluster_file(objects))
    return load_spec(path)
