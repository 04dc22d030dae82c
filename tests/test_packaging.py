"""What is installed with what: the client and the light commands need the core alone, and a library that is missing is
one line that names its extra.

"Missing" is played in processes that may import nothing but the core's own requirements.
"""

import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from torch.version import cuda

from cluster.cli import COMMANDS, EXTRAS
from kvtransfer.backends.nixl_build import nixl_extra
from tests.test_imports import imports, modules

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CORE = PROJECT["project"]["dependencies"]
OPTIONAL = PROJECT["project"]["optional-dependencies"]
OURS = {"benchmarks", "cluster", "workers", "kvtransfer", "diptych"}
# Peers and tools that benches and tests look for, each with a word of its own where it is missing.
ELSEWHERE = {"vllm", "llama_cpp", "nixl", "nixl_cu13", "grpc_tools", "triton", "pip"}
# What torch's CUDA build requires, by torch's version. The CPU build requires none, so pip finds no conflict there.
TRITON = {"2.13.0": "3.7.1"}
ALONE = """
import sys
from importlib.machinery import PathFinder
allowed = set(sys.argv.pop(1).split(",")) | sys.stdlib_module_names
class Core(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return super().find_spec(name, path, target) if name.partition(".")[0] in allowed else None
sys.meta_path[:] = [Core if each is PathFinder else each for each in sys.meta_path]
"""


def closure(requirements: list[str]) -> set[str]:
    """The distributions that come with these, ours left out."""
    found: set[str] = set()
    waiting = [Requirement(each) for each in requirements]
    while waiting:
        each = waiting.pop()
        name = canonicalize_name(each.name)
        if name in found or (each.marker and not any(each.marker.evaluate({"extra": e}) for e in {"", *each.extras})):
            continue
        if name == "diptych":
            waiting += [Requirement(other) for extra in each.extras for other in OPTIONAL[extra]]
            continue
        try:
            received = requires(name) or []
        except PackageNotFoundError:
            continue  # for another platform
        found.add(name)
        for other in map(Requirement, received):
            extras = {"", *each.extras}
            if other.marker is None or any(other.marker.evaluate({"extra": extra}) for extra in extras):
                other.marker = None
                waiting.append(other)
    return found


distributions = cache(packages_distributions)


@cache
def libraries(*extras: str) -> frozenset[str]:
    """What can be imported with the core and these extras, our own packages among it."""
    there = closure([*CORE, *(each for extra in extras for each in OPTIONAL[extra])])
    tops = {top for top, names in distributions().items() if there & set(map(canonicalize_name, names))}
    return frozenset(tops | OURS)


def alone(program: str, *arguments: str, extras: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run it with the core and these extras alone."""
    command = [sys.executable, "-c", ALONE + program, ",".join(sorted(libraries(*extras))), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)


def test_the_client_and_the_command_line_need_the_core_alone() -> None:
    names = "cli.status cli.generate cli.top cli.trace offline.report.window spec"
    program = f"import diptych.client, {', '.join(f'cluster.{name}' for name in names.split())}"
    done = alone(program)
    assert done.returncode == 0, done.stderr
    assert not {"torch", "ray", "numpy", "transformers"} & libraries()


COMMAND = "from cluster.cli import main; main(prog_name='diptych')"


def test_light_commands_run_with_the_core_alone() -> None:
    assert "serve" in alone(COMMAND, "--help").stdout
    for arguments in (["status"], ["generate", "hello"]):
        done = alone(COMMAND, *arguments, "--endpoint", "127.0.0.1:1")
        assert "nothing answers at 127.0.0.1:1" in done.stderr, done.stderr


@pytest.mark.parametrize("arguments", ["bench --workload poisson:rate=1,count=2,lengths=8/4", "profile"])
def test_a_running_cluster_is_measured_without_torch(arguments: str) -> None:
    done = alone(COMMAND, *arguments.split(), "--endpoint", "127.0.0.1:1", extras=("simulate",))
    assert "nothing answers at 127.0.0.1:1" in done.stderr, done.stderr


def test_a_workload_is_simulated_without_torch() -> None:
    system = ("--compare", "ours", "--model", "llama-2-70b", "--hardware", "h100-80gb", "--tensor", "8")
    workload = ("--workload", "poisson:rate=4,count=4,lengths=64/8", "--workers", "2")
    done = alone(COMMAND, "simulate", *system, *workload, extras=("simulate",))
    assert done.returncode == 0 and "ours" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        ("serve", "serve"),
        ("doctor", "serve"),
        ("models list", "serve"),
        ("autoscaler -f examples/laptop.yaml --prefix llm", "simulate"),
        ("plan --model llama-3-8b --hardware h100-80gb --prompt 100 --output 10", "simulate"),
        ("simulate -f examples/laptop.yaml --workload poisson:rate=1,count=2,lengths=8/4", "simulate"),
    ],
)
def test_what_is_missing_is_one_line_that_names_the_extra(arguments: str, extra: str) -> None:
    done = alone(COMMAND, *arguments.split())
    assert done.returncode == 1 and done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    named = (
        rf"Error: `diptych {arguments.split()[0]}` needs \w+, which is not installed: pip install 'diptych\[{extra}\]'"
    )
    assert re.fullmatch(named, line), line


def test_each_library_of_the_messages_is_in_its_extra() -> None:
    for extra, names in EXTRAS.items():
        assert set(names) <= libraries(extra), f"not in {extra}: {set(names) - libraries(extra)}"
        assert not set(names) & libraries(), f"the core has {set(names) & libraries()}"


def test_whatever_we_import_is_required_somewhere() -> None:
    there = libraries("all", "bench") | sys.stdlib_module_names | ELSEWHERE
    for name, tree in modules():
        if name in ("benchmarks.clients.cases", "benchmarks.clients.parsers"):  # run in the clients' own environments
            continue
        beside = {"tests"} if name.startswith("benchmarks") else set()  # benchmarks run from the tree
        missing = {each.partition(".")[0] for each in imports(tree)} - there - beside
        assert not missing, f"{name} imports {missing}, which no extra has"


def test_make_demo_installs_what_serves_and_make_test_what_tests_too() -> None:
    makefile = (ROOT / "Makefile").read_text()
    nixl = nixl_extra(cuda)
    serves, ready = (
        libraries(nixl, *named.split(","))
        for stamp in ("SERVES", "READY")
        for named in re.findall(
            rf'^\$\({stamp}\):.*\n(?:\t.*\n)*?\t.*-e "\.\[\$\$\(\$\(NIXL_EXTRA\)\),([\w,]+)\]"', makefile, re.M
        )
    )
    assert {"torch", "ray", "fastapi", "nixl_cu13" if nixl.endswith("cu13") else "nixl_cu12"} <= serves
    assert "pytest" not in serves and serves | {"pytest"} <= ready


def test_the_pinned_triton_is_what_torchs_cuda_build_requires() -> None:
    """Else `make demo` ends with a conflict on every machine that gets torch from PyPI."""
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    torch = re.search(r"\btorch==([\d.]+)", (ROOT / "Makefile").read_text())
    assert torch is not None and pins["triton"] == TRITON[torch[1]]


def test_files_beside_the_code_are_shipped() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]
    shipped = {
        path
        for package, globs in patterns.items()
        for folder in ([ROOT / package.replace(".", "/")] if package != "*" else [])
        for pattern in globs
        for path in folder.glob(pattern)
    }
    for package in ("cluster", "workers", "kvtransfer"):
        assert (ROOT / package / "py.typed").is_file() and "py.typed" in patterns["*"]
        for path in (ROOT / package).rglob("*"):
            if path.is_file() and path.suffix not in (".py", ".pyc") and path.name != "py.typed":
                assert path in shipped, f"{path.relative_to(ROOT)} is not in the wheel; add it to package-data"


def test_the_docs_name_every_extra() -> None:
    received = (ROOT / "docs" / "install.md").read_text()
    assert set(re.findall(r"^\| `([\w-]+)` \|", received, re.M)) == set(OPTIONAL)
    commands = {
        word
        for row in re.findall(r"^\|.*`diptych.*$", received, re.M)
        for word in re.findall(r"`(?:diptych )?(\w+)", row)
    }
    assert set(COMMANDS) <= commands
