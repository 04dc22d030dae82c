"""The table of values in the chart's README, out of values.yaml and its comments: `python helm/table.py` writes it."""

from collections.abc import Iterator
from pathlib import Path

import yaml

CHART = Path(__file__).resolve().parent / "diptych"
BEGIN, END = "<!-- values -->\n", "<!-- end of values -->\n"


def table(text: str) -> str:
    """Rows for every key of these values that is no block of further keys, as Markdown."""
    rows = [f"| `{path}` | `{default}` | {words} |\n" for path, default, words in _rows(text)]
    return "".join(["| value | default | |\n", "|---|---|---|\n", *rows])


def _rows(text: str) -> Iterator[tuple[str, str, str]]:
    top = yaml.compose(text, Loader=yaml.SafeLoader)
    assert isinstance(top, yaml.MappingNode), "values are a mapping"
    return _below("", top, text)


def _below(path: str, node: yaml.MappingNode, text: str) -> Iterator[tuple[str, str, str]]:
    for key, value in node.value:
        name, words = f"{path}{key.value}", _comment(text.splitlines(), key.start_mark.line)
        block = isinstance(value, yaml.MappingNode) and not value.flow_style
        if not block or words:
            default = text[value.start_mark.index : value.end_mark.index].strip()
            yield name, "..." if "\n" in default else default, words
        if block:
            yield from _below(f"{name}.", value, text)


def _comment(lines: list[str], at: int) -> str:
    """What stands right above a line."""
    words: list[str] = []
    while at and lines[at - 1].strip().startswith("#"):
        at -= 1
        words.insert(0, lines[at].strip().removeprefix("#").strip())
    return " ".join(words)


def written(page: str, values: str) -> str:
    """The page with the table as it should be."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + table(values) + END + rest.partition(END)[2]


if __name__ == "__main__":
    readme = CHART / "README.md"
    readme.write_text(written(readme.read_text(), (CHART / "values.yaml").read_text()))
