"""The Dockerfile: hadolint has nothing to say, it names no registry, and what it makes is what the chart asks for."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [hadolint, "--failure-threshold", "style", ROOT / "Dockerfile"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_hadolint_would_notice(tmp_path: Path) -> None:
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
    assert copied == allowed
    assert all((ROOT / name).exists() for name in copied)
