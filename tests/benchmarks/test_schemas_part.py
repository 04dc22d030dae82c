"""Random answers of a schema end and are valid; the sets of a folder are its folders with schemas."""

import json
import random
from pathlib import Path

from benchmarks.schemas import RandomAnswers, schema_sets
from tests.model.grammars import SCHEMAS, check_answer
from tests.model.tiny import write_tiny_llama
from workers.model.grammar import grammar_compiler
from workers.model.tokenizer import ModelTokenizer
from workers.request import Grammar


def test_random_answers_are_valid(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "tiny")
    answers = RandomAnswers(grammar_compiler(folder), ModelTokenizer(folder))
    for number, schema in enumerate(SCHEMAS):
        grammar = Grammar("json", json.dumps(schema))
        answer = answers.draw(grammar, random.Random(number))
        assert answer is not None
        check_answer(grammar, answer)
    assert len(answers.mask_s) > len(SCHEMAS)


def test_sets_are_folders_and_have_at_most_so_many_schemas_evenly(tmp_path: Path) -> None:
    for name in ("easy", "medium"):
        (tmp_path / name).mkdir()
        for number in range(10):
            (tmp_path / name / f"{number}.json").write_text("{}")
    sets = schema_sets(tmp_path, 4)
    assert list(sets) == ["easy", "medium"]
    assert [file.stem for file in sets["easy"].files] == ["0", "2", "5", "7"]
    assert len(schema_sets(tmp_path / "easy", 100)["."].files) == 10
