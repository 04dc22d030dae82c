"""The README and the docs say what the code does: links, commands, examples, numbers and test names are checked."""

import ast
import re
from functools import cache
from pathlib import Path

import yaml

from cluster.cli import COMMANDS
from cluster.spec_file import laptop_spec, load_spec, parse_spec
from tests.test_imports import LAYERS

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += sorted((ROOT / "benchmarks" / "results").glob("*.md"))
FAILURES = (ROOT / "docs" / "failures.md").read_text()
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
NAMED = re.compile(r"`(\w+)` \((\d[\d.]*)[^)]*\)")  # `lease_s` (10.0 s)
ROW = re.compile(r"^\| `(\w+)` \| ([\d.]+) \| `([\w/]+\.py)` \|$", re.M)
TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
VALUES = {name: (float(value), path) for name, value, path in ROW.findall(FAILURES)}


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def blocks(language: str) -> list[tuple[str, str]]:
    return [
        (page_name(page), body) for page in PAGES for kind, body in FENCE.findall(page.read_text()) if kind == language
    ]


@cache
def syntax(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


def assigned(path: str) -> dict[str, float]:
    """Numbers given to names in a module: constants, pairs of them, and the defaults of dataclass fields."""
    found: dict[str, float] = {}
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.Assign):
            targets, value = node.targets[0], node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets, value = node.target, node.value
        else:
            continue
        names = targets.elts if isinstance(targets, ast.Tuple) else [targets]
        values = value.elts if isinstance(value, ast.Tuple) else [value]
        for name, each in zip(names, values, strict=False):
            if isinstance(name, ast.Name) and isinstance(each, ast.Constant) and isinstance(each.value, int | float):
                found.setdefault(name.id, float(each.value))
    return found


def test_links_lead_somewhere() -> None:
    for page, link in [(each, link) for each in PAGES for link in LINK.findall(FENCE.sub("", each.read_text()))]:
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page_name(page)} links to {link}, which is not there"
        if anchor:
            assert anchor in anchors(target), f"{page_name(page)} links to {link}, which has no such heading"


def test_the_index_lists_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    listed = {(index.parent / link).resolve() for link in LINK.findall(index.read_text())}
    pages = {page for page in PAGES if page.parent.name != "decisions" and page.is_relative_to(ROOT / "docs")}
    assert pages - {index} <= listed
    assert "docs/README.md" in LINK.findall((ROOT / "README.md").read_text())


def test_every_command_of_the_readme_exists() -> None:
    readme = (ROOT / "README.md").read_text()
    named = set(re.findall(r"^(?:.* )?diptych ([a-z]+)\b", "\n".join(body for _, body in FENCE.findall(readme)), re.M))
    named |= set(re.findall(r"`diptych ([a-z]+)", readme))
    assert named == set(COMMANDS), "the README's commands and those of `diptych --help` differ"


def test_every_make_target_of_the_docs_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in PAGES:
        for target in re.findall(r"(?:^|`)make ([\w-]+)", page.read_text(), re.M):
            assert target in targets, f"{page_name(page)} names `make {target}`"


def test_yaml_examples_are_specifications() -> None:
    examples = blocks("yaml")
    assert examples
    for name, body in examples:
        assert parse_spec(yaml.safe_load(body)).pools, name


def test_the_example_file_is_the_default_cluster() -> None:
    assert load_spec(ROOT / "examples" / "laptop.yaml") == laptop_spec()


def test_the_best_example_is_a_file_whose_defaults_are_ours() -> None:
    spec = load_spec(ROOT / "examples" / "best.yaml")
    assert (spec.gateway.routing, spec.gateway.admission, spec.elastic.mode) == ("slo", "slo", "act")
    assert {(pool.engine.batching, pool.engine.kv_blocks) for pool in spec.pools} == {("adaptive", 0)}


def test_the_python_example_is_the_file() -> None:
    ((_, shown),) = [each for each in blocks("python") if each[0] == "README.md"]
    assert (ROOT / "examples" / "client.py").read_text().endswith(shown)


def test_numbers_of_failures_are_those_of_the_code() -> None:
    assert VALUES
    for name, (value, path) in VALUES.items():
        assert assigned(path).get(name) == value, f"docs/failures.md says {name} is {value} in {path}"


def test_every_number_named_in_failures_stands_in_its_table() -> None:
    for name, value in NAMED.findall(FAILURES):
        assert name in VALUES, f"{name} has a value in the text but no row in the table"
        assert float(value) == VALUES[name][0], f"{name} is {value} in the text and {VALUES[name][0]} in the table"


@cache
def functions_of(path: str) -> set[str]:
    return {node.name for node in ast.walk(syntax(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_named_test_exists() -> None:
    for page, path, name in [(each, *named) for each in PAGES for named in TEST.findall(each.read_text())]:
        assert (ROOT / path).is_file(), f"{page_name(page)} names {path}"
        assert not name or name in functions_of(path), f"{page_name(page)} names {path}::{name}"


def test_the_layers_of_the_design_are_those_that_are_held() -> None:
    ((_, shown),) = blocks("layers")
    assert [line.split() for line in shown.splitlines()] == LAYERS[::-1], (
        "docs/design.md and test_imports.LAYERS differ"
    )


def test_the_ledger_of_the_design_is_complete() -> None:
    from cluster.observe.ledger import PHASES

    section = (ROOT / "docs" / "design.md").read_text().partition("## The ledger")[2].partition("\n## ")[0]
    assert tuple(re.findall(r"^\| `(\w+)` \|", section, re.M)) == PHASES
