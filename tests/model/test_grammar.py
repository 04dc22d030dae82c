"""A matcher depends on the tokens of its answer only; its masks let exactly the grammar's texts through the sampler."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.model.grammars import GRAMMARS, check_answer
from tests.model.test_sampler import draw
from tests.model.tiny import EOS, write_tiny_llama
from workers.engine.step import Chunk, Draw, StepPlan
from workers.errors import InvalidRequest
from workers.executor.grammar_masks import MAX_FORCED, MAX_FORCED_READ, MAX_MATCHERS, GrammarMasks, StepMasks, unpacked
from workers.executor.sampler import sample
from workers.model.folder import ModelFolder
from workers.model.grammar import MAX_COMPILED, GrammarCompiler, grammar_compiler, lark_grammar
from workers.model.tokenizer import ModelTokenizer
from workers.request import MAX_GRAMMAR_BYTES, Grammar, SamplingParams

VOCAB = 320  # of which the tokenizer has 259
ABC = Grammar("regex", "a?b?c?")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def compiler(folder: Path) -> GrammarCompiler:
    return grammar_compiler(folder)


@pytest.fixture
def masks(compiler: GrammarCompiler) -> GrammarMasks:
    return GrammarMasks(compiler, VOCAB, num_threads=1)


def asked(grammar: Grammar, answer: Sequence[int] = (), key: str = "a/0", **more: object) -> Chunk:
    params = SamplingParams(grammar=grammar)
    packed = np.array(answer, np.int32).tobytes()
    return Chunk(key, (5,), 9, (1,), Draw(params, 1, 10 + len(answer), answer=packed, **more))  # type: ignore[arg-type]


def step(masks: GrammarMasks, *chunks: Chunk) -> StepMasks:
    found = masks.begin(StepPlan(1, chunks))
    assert found is not None
    return found.result(20.0)


def allowed(masks: GrammarMasks, *args: object, **more: object) -> list[int]:
    (mask,) = step(masks, asked(*args, **more)).masks.values()  # type: ignore[arg-type]
    return np.flatnonzero(unpacked(mask, VOCAB)).tolist()


@pytest.mark.full
def test_a_grammar_whose_masks_are_slow_is_refused_or_ends_with_an_error(smollm2: ModelFolder) -> None:
    """With tokens of several letters, whose splits into lexemes a mask tries."""
    compiler, token = grammar_compiler(smollm2.path), ModelTokenizer(smollm2.path).encode("a")[0]
    with pytest.raises(InvalidRequest, match="Too many items"):
        compiler.matcher(Grammar("lark", "start: e\ne: e e | T\nT: /[a-z ]/"))
    slow = compiler.matcher(Grammar("lark", "start: e\ne: e e | T\nT: /[a-z ]{2}/"))
    for _ in range(200):
        slow.compute_bitmask()
        if slow.is_error() or not slow.consume_token(token):
            break
    assert "Too many items" in slow.get_error()


def test_a_plan_without_grammars_needs_no_masks(masks: GrammarMasks) -> None:
    plain = Chunk("a/0", (5,), 9, (1,), draw())
    assert masks.begin(StepPlan(1, (plain, Chunk("b/0", (5,), 9, (1,), None)))) is None
    assert list(step(masks, plain, asked(ABC)).masks) == [1]


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda each: each.text[:20])
def test_a_new_matcher_continues_anywhere_as_the_old_one(
    compiler: GrammarCompiler, folder: Path, grammar: Grammar
) -> None:
    """What a migration, a retry or a preemption needs: no state but the tokens."""
    tokenizer, choose = ModelTokenizer(folder), random.Random(3)
    for _ in range(5):
        kept, answer = GrammarMasks(compiler, VOCAB, num_threads=1), list[int]()
        while not answer or answer[-1] != EOS:
            here = allowed(kept, grammar, answer)
            assert here == allowed(GrammarMasks(compiler, VOCAB, num_threads=1), grammar, answer)
            answer.append(choose.choice([token for token in here if token != EOS and choose.random() < 0.9] or here))
            if len(answer) > 60 and EOS in here:
                answer.append(EOS)
        check_answer(grammar, tokenizer.decode(answer))


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda each: each.text[:20])
def test_what_is_forced_behind_a_token_is_what_each_mask_alone_allows(
    compiler: GrammarCompiler, grammar: Grammar
) -> None:
    choose, jumped = random.Random(5), 0
    for _ in range(20):
        kept, answer = GrammarMasks(compiler, VOCAB, num_threads=1), list[int]()
        while not answer or (answer[-1] != EOS and len(answer) < 100):
            found = step(kept, asked(grammar, answer))
            answer.append(choose.choice(np.flatnonzero(unpacked(found.masks[0], VOCAB)).tolist()))
            for token in dict(found.forced(answer[-1:])).get(0, ()):
                assert allowed(GrammarMasks(compiler, VOCAB, num_threads=1), grammar, answer) == [token]
                answer.append(token)
                jumped += 1
    assert jumped or grammar.kind in ("regex", "lark")


def test_a_long_forced_text_is_read_a_bounded_number_of_times_in_a_step(masks: GrammarMasks) -> None:
    """Each forced token behind a sampled one costs a read of all of it: 64 reads of 20,000 bytes took 0.2 s."""
    for length, most in ((MAX_FORCED_READ // 100, MAX_FORCED), (4 * MAX_FORCED_READ, 1), (MAX_FORCED_READ // 4, 5)):
        grammar = Grammar("choice", json.dumps(["a" * length]))
        (first,) = allowed(masks, grammar, key=f"{length}/0")
        ((_, tokens),) = step(masks, asked(grammar, key=f"{length}/0")).forced([first])
        assert len(tokens) == min(most, length - 1)


def test_a_matcher_that_does_not_fit_the_answer_is_replaced(masks: GrammarMasks) -> None:
    a, b, c = (ModelTokenizerIds.of(letter) for letter in "abc")
    assert allowed(masks, ABC, [a]) == sorted([EOS, b, c])
    assert allowed(masks, ABC, [b]) == sorted([EOS, c])  # the same key, another answer
    assert allowed(masks, Grammar("regex", "ba"), [b]) == [a]  # and another grammar
    for number in range(MAX_MATCHERS + 1):
        allowed(masks, ABC, key=str(number))
    assert allowed(masks, Grammar("regex", "ba"), [b]) == [a] and len(masks._matchers) == MAX_MATCHERS


class ModelTokenizerIds:
    """Ids of the tiny tokenizer: three special tokens, then the letters by code point."""

    @staticmethod
    def of(letter: str) -> int:
        from tokenizers import pre_tokenizers

        return 3 + sorted(pre_tokenizers.ByteLevel.alphabet()).index(letter)


def test_end_tokens_are_allowed_where_the_grammar_is_complete_and_behind_its_end(masks: GrammarMasks) -> None:
    a, b = ModelTokenizerIds.of("a"), ModelTokenizerIds.of("b")
    grammar = Grammar("regex", "ab?")
    assert allowed(masks, grammar) == [a]
    assert allowed(masks, grammar, [a]) == [EOS, b]
    assert allowed(masks, grammar, [a, b]) == [EOS]
    assert allowed(masks, grammar, [a, EOS, EOS]) == [EOS]  # with ignore_eos


def test_bans_hold_unless_nothing_else_is_left(masks: GrammarMasks) -> None:
    a, b = ModelTokenizerIds.of("a"), ModelTokenizerIds.of("b")
    grammar = Grammar("regex", "ab?")
    assert allowed(masks, grammar, [a], banned=(EOS,)) == [b]
    assert allowed(masks, grammar, [a, b], banned=(EOS,)) == [EOS]
    every = (*range(VOCAB),)
    assert allowed(masks, grammar, [a], banned=every) == [EOS, b]


def test_an_answer_that_does_not_match_is_stuck_alone(masks: GrammarMasks) -> None:
    found = step(masks, asked(ABC, key="a/0"), asked(ABC, [5, 5], key="b/0"))
    assert list(found.masks) == [0] and list(found.stuck) == [1]


def test_compiled_grammars_are_bounded(compiler: GrammarCompiler) -> None:
    for number in range(2 * MAX_COMPILED):
        compiler.matcher(Grammar("regex", f"a{{{number}}}"))
    assert len(compiler._compiled) == MAX_COMPILED


def test_json_allows_some_whitespace(compiler: GrammarCompiler) -> None:
    grammar = Grammar("json", json.dumps({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}))
    for text, matches in (
        ('{"a":1}', True),
        ('{\n  "a": 1\n}', True),
        ('{"a":' + " " * 40 + "1}", False),
        ('{"a":' + "\n" * 2 + "1}", False),
        (" {}", False),
    ):
        matcher, tokens = compiler.matcher(grammar), [ModelTokenizerIds.of(letter) for letter in spelled(text)]
        assert (matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()) == matches, text


def test_a_format_that_is_not_known_only_annotates(compiler: GrammarCompiler) -> None:
    """As JSON Schema says."""
    for name, text, matches in (("byte", "b", True), ("date", "b", False), ("date", "2026-11-27", True)):
        matcher = compiler.matcher(Grammar("json", json.dumps({"type": "string", "format": name})))
        tokens = [ModelTokenizerIds.of(letter) for letter in f'"{text}"']
        assert (matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()) == matches


def test_all_that_cannot_be_enforced_is_named(compiler: GrammarCompiler) -> None:
    schema = {"properties": {"a": {"not": {}}, "b": {"uniqueItems": True, "type": "array"}, "c": {"format": "byte"}}}
    schema["properties"]["d"] = {"oneOf": [{"type": "string"}, {"minLength": 3}]}
    with pytest.raises(InvalidRequest) as refused:
        compiler.check(Grammar("json", json.dumps(schema)))
    assert all(each in refused.value.message for each in ('"not"', '"uniqueItems"', "oneOf needs schemas"))
    assert "byte" not in refused.value.message


def spelled(text: str) -> list[str]:
    """The letters of a byte-level vocabulary."""
    return [{" ": "Ġ", "\n": "Ċ"}.get(letter, letter) for letter in text]


BAD = {
    "not JSON": Grammar("json", "{"),
    "no schema": Grammar("json", "3"),
    "a wrong type": Grammar("json", '{"type": "strin"}'),
    "an unsupported keyword": Grammar("json", '{"type": "array", "uniqueItems": true}'),
    "leniency": Grammar("json", '{"not": {}, "x-guidance": {"lenient": true}}'),
    "options of llguidance": Grammar("json", '{"type": "array", "x-guidance": {"item_separator": ";"}}'),
    "forced text without an end": Grammar("lark", 'start: "a" start'),
    "a contradiction": Grammar("json", '{"type": "string", "minLength": 3, "maxLength": 2}'),
    "contradicting parts": Grammar("json", '{"allOf": [{"type": "string"}, {"type": "integer"}]}'),
    "an endless recursion": Grammar("json", '{"$ref": "#"}'),
    "a mutual recursion": Grammar(
        "json", '{"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}'
    ),
    "a file": Grammar("json", '{"$ref": "file:///etc/passwd"}'),
    "an open group": Grammar("regex", "(("),
    "a look-ahead": Grammar("regex", "(?=a)b"),
    "a back reference": Grammar("regex", r"(a)\1"),
    "no text at all": Grammar("regex", r"[^\s\S]"),
    "a lone surrogate": Grammar("regex", "\ud800"),
    "too large": Grammar("json", '{"type": "integer", "multipleOf": 999999937, "maximum": 1000000000000000}'),
    "no choices": Grammar("choice", "[]"),
    "choices that are no text": Grammar("choice", "[1]"),
    "an endless rule": Grammar("lark", 'start: a\na: a "x" | a'),
    "a missing rule": Grammar("lark", "start: b"),
    "an empty grammar": Grammar("lark", ""),
    "neither Lark nor GBNF": Grammar("grammar", "::= ::="),
    "deep GBNF": Grammar("grammar", "root ::= " + "(" * 20000 + '"a"' + ")" * 20000),
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_grammar_is_refused(compiler: GrammarCompiler, name: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        compiler.check(lark_grammar(BAD[name]))
    assert refused.value.field == "sampling.grammar"
    assert len(refused.value.message) < 500


def test_gbnf_becomes_lark(compiler: GrammarCompiler) -> None:
    lark = lark_grammar(Grammar("grammar", 'root ::= "a" tail\ntail ::= "b" | "c" tail'))
    assert lark.kind == "lark" and lark_grammar(lark) == lark
    matcher = compiler.matcher(lark)
    assert matcher.consume_tokens([ModelTokenizerIds.of(letter) for letter in "accb"]) and matcher.is_accepting()


def test_a_grammar_has_a_largest_size() -> None:
    SamplingParams(grammar=Grammar("regex", "é" * (MAX_GRAMMAR_BYTES // 2)))
    with pytest.raises(InvalidRequest, match=r"sampling\.grammar: has more than 64 KiB"):
        SamplingParams(grammar=Grammar("regex", "é" * (MAX_GRAMMAR_BYTES // 2) + "a"))


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2}])
def test_masked_rows_are_sampled_as_if_other_tokens_did_not_exist(params: dict[str, float]) -> None:
    logits = 3 * torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(1))
    mask = np.random.default_rng(2).integers(-(2**31), 2**31, VOCAB // 32).astype(np.int32)
    draws = [draw(position, logprobs=2, **params) for position in range(40)]  # type: ignore[arg-type]
    masked = {row: mask for row in range(0, 40, 2)}
    tokens, logprobs = sample(logits.clone(), draws, masked)
    removed = logits.clone()
    removed[::2, torch.from_numpy(~unpacked(mask, VOCAB))] = -torch.inf
    assert tokens == sample(removed, draws)[0]
    others, their_logprobs = sample(logits.clone(), draws)
    assert tokens[1::2] == others[1::2] and tokens != others
    assert [each and each.top for each in logprobs] == [each and each.top for each in their_logprobs]  # unmasked


def test_the_real_tokenizer_has_a_compiler(smollm2: ModelFolder) -> None:
    """Its tokens have several letters, and cross the grammar's parts."""
    tokenizer, compiler = ModelTokenizer(smollm2.path), grammar_compiler(smollm2.path)
    for grammar in GRAMMARS[:2]:
        matcher = compiler.matcher(grammar)
        text = '{"name": "ann", "age": 33, "ok": true}' if grammar is GRAMMARS[0] else '["red", "blü"]'
        assert matcher.consume_tokens(list(tokenizer.encode(text))) and matcher.is_accepting()
