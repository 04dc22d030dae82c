"""The Dockerfile: it passes hadolint, names no registry, installs matching builds, and makes the image of the chart."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from kvtransfer.backends.nixl_build import nixl_extra

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_hadolint_passes() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [hadolint, "--failure-threshold", "style", ROOT / "Dockerfile"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_hadolint_reports_a_bad_file(tmp_path: Path) -> None:
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM debian\nRUN cd /tmp && pip install torch\n")
    hadolint = Path(sys.executable).with_name("hadolint")
    assert subprocess.run([hadolint, bad], capture_output=True, check=False).returncode != 0


def test_no_registry_is_named() -> None:
    images = re.findall(r"^FROM (\S+)", TEXT, re.M)
    assert images == ["${BASE_IMAGE}", "${BASE_IMAGE}"]
    assert not re.search(r"https?://|\w+\.\w+/\w+:", re.sub(r"^#.*$", "", TEXT, flags=re.M))


def test_versions_are_those_of_the_package() -> None:
    torch = next(each for each in PROJECT["optional-dependencies"]["serve"] if each.startswith("torch"))
    assert f"ARG TORCH={torch}\n" in TEXT
    assert f'image.version="{PROJECT["version"]}"' in TEXT
    extras = re.findall(r"^ARG EXTRAS=(.*)$", TEXT, re.M)[0].split(",")
    assert set(extras) <= set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("torch_cuda", [None, "12.8", "13.0"])
@pytest.mark.parametrize("override", ["", "nixl", "nixl-cu13"])
def test_the_nixl_build_follows_the_cuda_of_torch(tmp_path: Path, torch_cuda: str | None, override: str) -> None:
    """Runs the Dockerfile's own command, with a torch of this CUDA and a pip that prints its arguments."""
    (command,) = re.findall(r"^RUN (nixl=(?:.*\\\n)*.*)$", TEXT, re.M)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text(f"cuda = {torch_cuda!r}\n")
    (tmp_path / "pip").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "python").write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    for program in ("pip", "python"):
        (tmp_path / program).chmod(0o755)
    (script,) = re.findall(r"^COPY (\S+/nixl_build.py) /tmp/$", TEXT, re.M)
    command = command.replace("/opt/diptych/bin", str(tmp_path)).replace("/tmp/nixl_build.py", str(ROOT / script))
    variables = {"EXTRAS": "http", "NIXL_EXTRA": override, "PATH": os.environ["PATH"]}
    done = subprocess.run(["sh", "-c", command], env=variables, capture_output=True, text=True, check=True)
    expected = override or nixl_extra(torch_cuda)
    assert expected in PROJECT["optional-dependencies"]
    assert done.stdout == f"install -c constraints.txt .[http,{expected}]\n"


def test_the_chart_asks_for_this_image() -> None:
    chart = ROOT / "helm" / "diptych"
    values = yaml.safe_load((chart / "values.yaml").read_text())
    version = yaml.safe_load((chart / "Chart.yaml").read_text())["appVersion"]
    assert f"-t {values['image']['repository']}:{version} ." in TEXT
    security = values["podDefaults"]["podSecurityContext"]
    assert f"\nUSER {security['runAsUser']}\n" in TEXT and f"--uid {security['runAsUser']} " in TEXT
    pods = (chart / "templates" / "_pods.tpl").read_text()
    for name in ("HOME", "USER", "DIPTYCH_CACHE", "HF_HOME"):
        (value,) = re.findall(rf"\b{name}=(\S+)", TEXT)
        assert f"{{name: {name}, value: {value}}}" in pods


def test_what_is_copied_is_what_the_package_needs() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {name for line in re.findall(r"^COPY (?!--from)(.*) \S+$", TEXT, re.M) for name in line.split()}
    inside = {name for name in copied if any(name.startswith(f"{other}/") for other in copied)}
    assert copied - inside == allowed
    assert all((ROOT / name).exists() for name in copied)
