"""Random answers of a schema end and are valid."""

import json
import random
from pathlib import Path

from benchmarks.schemas import RandomAnswers
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
