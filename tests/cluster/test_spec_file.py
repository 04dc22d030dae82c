"""A file that is no cluster file is one error that says so, soon, whatever its content and size."""

import os
from pathlib import Path

import pytest

from cluster.spec import SpecError
from cluster.spec_file import MAX_BYTES, load_spec

DOUBLING = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty or not a mapping"),
        (b"\xff\xfe{", "is not UTF-8 text"),
        (bytes(100), "is not YAML"),
        (b"model: x\npools: &a [*a]\n", "has more than 100000 values, with its aliases expanded"),
        (b"model: x\na0: &a0 [x]\n" + DOUBLING.encode(), "has more than 100000 values"),
        (b"model: x\npools: " + b"[" * 5000 + b"]" * 5000, "is nested too deep"),
    ],
    ids=["empty", "binary", "zeros", "a cycle", "aliases of aliases", "deep"],
)
def test_no_content_is_an_unexpected_error(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_bytes(content)
    with pytest.raises(SpecError, match=words):
        load_spec(path)


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.touch()
    os.truncate(path, MAX_BYTES << 20)
    with pytest.raises(SpecError, match="has more than 1 MiB"):
        load_spec(path)
