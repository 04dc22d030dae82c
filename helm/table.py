"""Writes the table of values in the chart's README from values.yaml and its comments: `python helm/table.py`."""

from collections.abc import Iterator
from pathlib import Path

import yaml

CHART = Path(__file__).resolve().parent / "diptych"
BEGIN, END = "<!-- values -->\n", "<!-- end of values -->\n"


def table(text: str) -> str:
    """A Markdown table with a row for each key, and for each block that has a comment."""
    rows = [f"| `{path}` | `{default}` | {comment} |\n" for path, default, comment in _rows(text)]
    return "".join(["| value | default | |\n", "|---|---|---|\n", *rows])


def _rows(text: str) -> Iterator[tuple[str, str, str]]:
    top = yaml.compose(text, Loader=yaml.SafeLoader)
    assert isinstance(top, yaml.MappingNode), "values are a mapping"
    return _below("", top, text)


def _below(path: str, node: yaml.MappingNode, text: str) -> Iterator[tuple[str, str, str]]:
    for key, value in node.value:
        name, comment = f"{path}{key.value}", _comment(text.splitlines(), key.start_mark.line)
        block = isinstance(value, yaml.MappingNode) and not value.flow_style
        if not block or comment:
            default = text[value.start_mark.index : value.end_mark.index].strip()
            yield name, "..." if "\n" in default else default, comment
        if block:
            yield from _below(f"{name}.", value, text)


def _comment(lines: list[str], at: int) -> str:
    """The comment right above a line."""
    comment: list[str] = []
    while at and lines[at - 1].strip().startswith("#"):
        at -= 1
        comment.insert(0, lines[at].strip().removeprefix("#").strip())
    return " ".join(comment)


def with_table(page: str, values: str) -> str:
    """The page with an up-to-date table."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + table(values) + END + rest.partition(END)[2]


if __name__ == "__main__":
    readme = CHART / "README.md"
    readme.write_text(with_table(readme.read_text(), (CHART / "values.yaml").read_text()))
