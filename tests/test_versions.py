"""Python 3.11 to 3.13 can read every file, and other torch versions break nothing outside the model's operations.

Ruff finds syntax newer than 3.11 (`target-version`). Here the newer interpreters read the files themselves.
"""

import ast
import shutil
import subprocess
import warnings
from pathlib import Path

import pytest

from tests.test_imports import ROOT, below, imports, modules

FOLDERS = ("cluster", "workers", "kvtransfer", "proto", "benchmarks", "tests", "examples", "docs", "helm")
REMOVED = {  # from the standard library, by 3.12 and 3.13
    *("asynchat", "asyncore", "distutils", "imp", "smtpd"),
    *("aifc", "audioop", "cgi", "cgitb", "chunk", "crypt", "imghdr", "lib2to3", "mailcap", "msilib", "nis", "nntplib"),
    *("ossaudiodev", "pipes", "sndhdr", "spwd", "sunau", "telnetlib", "uu", "xdrlib"),
}
# Reads the files named on stdin; anything that Python warns about while it compiles is an error.
COMPILE = """
import sys, warnings
warnings.simplefilter("error")
for path in sys.stdin.read().splitlines():
    compile(open(path, encoding="utf-8").read(), path, "exec", dont_inherit=True)
print("read", sys.version_info[:2])
"""


def sources() -> list[Path]:
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def private_torch(tree: ast.Module) -> list[str]:
    """Names below torch that begin with one underscore: they change from version to version."""
    found = [name for name in imports(tree) if below(name, ("torch",))]
    found += [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    private = [name.split(".") for name in found if name.startswith("torch.")]
    return [".".join(parts) for parts in private if any(part.startswith("_") and part[1] != "_" for part in parts)]


def compares_torch_version(tree: ast.Module) -> bool:
    compared = [node for node in ast.walk(tree) if isinstance(node, ast.Compare)]
    return any("torch.__version__" in ast.unparse(node) for node in compared)


@pytest.mark.full  # `make check` runs this file, too
def test_no_file_needs_what_newer_pythons_removed() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an invalid escape is a warning since 3.12
        for path in sources():
            gone = REMOVED & {name.split(".")[0] for name in imports(ast.parse(path.read_text()))}
            assert not gone, f"{path} imports {gone}, which Python 3.13 does not have"


@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_newer_pythons_read_every_file(version: str) -> None:
    python = shutil.which(f"python{version}")
    if python is None or subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode:
        pytest.skip(f"python{version} is not here")
    paths = "\n".join(map(str, sources()))
    done = subprocess.run([python, "-c", COMPILE], input=paths, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("read"), done.stderr


def test_private_names_of_torch_stay_in_the_operations_and_the_model() -> None:
    for name, tree in modules():
        if not below(name, ("workers.ops", "workers.model", "benchmarks")):
            assert not private_torch(tree), f"{name} uses {private_torch(tree)}, which another torch may not have"
            assert not compares_torch_version(tree), f"{name} depends on torch's version"


def test_private_names_of_torch_are_found_however_they_are_written() -> None:
    written = "import torch\nfrom torch._C import _nn\ntorch.ops.aten._softmax(x)\ntorch.__version__ > '2'"
    tree = ast.parse(written)
    assert {"torch._C._nn", "torch.ops.aten._softmax"} <= set(private_torch(tree))
    assert compares_torch_version(tree) and not any("__version__" in name for name in private_torch(tree))
