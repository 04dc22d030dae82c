"""docs/reference/configuration.md has every key of a cluster file, with what the code says of it."""

import json
import re
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from cluster.spec import ClusterSpec
from workers.costs import CostModel, LinearCost

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "docs"))
from configuration import BLOCKS, CHOICES, PAGE, meanings, reference, rows, written

SCHEMA = json.loads((PAGE.parents[2] / "helm" / "diptych" / "values.schema.json").read_text())


def nested(hint: Any) -> set[type]:
    """The dataclasses in a type: its own, those of a union, a tuple or a mapping."""
    if hint is CostModel:
        return {LinearCost}
    if is_dataclass(hint):
        return {hint} if isinstance(hint, type) else set()
    return {kind for each in get_args(hint) for kind in nested(each)}


def in_schema(path: str) -> dict[str, Any]:
    """The chart's schema of a block."""
    found: dict[str, Any] = SCHEMA["properties"]["cluster"]
    for part in filter(None, path.split(".")):
        found = found["additionalProperties"] if part == "NAME" else found["properties"][part.removesuffix("[]")]
        found = found.get("items", found)
        found = SCHEMA["definitions"][found["$ref"].rpartition("/")[2]] if "$ref" in found else found
    return found


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text()
    assert page == written(page), "run: python docs/configuration.py"


def test_every_block_of_a_cluster_file_is_there() -> None:
    below = {kind for block in BLOCKS.values() for hint in get_type_hints(block).values() for kind in nested(hint)}
    assert below | {BLOCKS[""]} == set(BLOCKS.values())


@pytest.mark.parametrize("path", BLOCKS)
def test_every_key_has_a_meaning(path: str) -> None:
    said = meanings(BLOCKS[path])
    assert list(said) == [each.name for each in fields(BLOCKS[path])]
    assert all(re.fullmatch(r"[A-Z0-9`].*[.\w]", words) for words in said.values())


@pytest.mark.parametrize(("kind", "key"), [each for each in CHOICES if each[0] is not ClusterSpec])
def test_the_choices_are_all_that_is_taken(kind: type, key: str) -> None:
    with pytest.raises(ValueError) as refused:
        kind(**{key: ("nonsense",) if key == "backends" else "nonsense"})
    assert str(refused.value).endswith(f"is not one of {', '.join(CHOICES[kind, key])}")


@pytest.mark.parametrize("path", BLOCKS)
def test_choices_and_units_are_those_of_the_charts_schema(path: str) -> None:
    schema = in_schema(path)["properties"]
    for key, read, _, _ in rows(BLOCKS[path]):
        shape = schema[key].get("items", schema[key])
        if "enum" in shape:
            known = set(filter(None, shape["enum"]))
            assert set(re.findall(r"`([\w/-]+)`", read)) == known, f"{path}.{key}"
        if read == "seconds":
            assert "number" in shape["type"], f"{path}.{key}"


def test_a_key_without_words_would_be_seen() -> None:
    assert not re.search(r"\|  \|$", reference(), re.M)
