"""Compiles grammars for one tokenizer with llguidance, which the extra `structured` installs.

A compiled grammar is a matcher before its first token; each answer has a copy of it. A matcher depends on the tokens
of its answer only, so it is never sent anywhere: whoever needs one gives the tokens so far to a new copy.

The limits bound what a client's grammar costs: the memory, and the time of a mask. They do not bound the time and the
stack of compiling, so a gateway checks every grammar in a process of its own first.
"""

import json
import logging
import re
from collections import OrderedDict
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from time import thread_time
from typing import TYPE_CHECKING, Any

import numpy as np

from workers.errors import InvalidRequest
from workers.model.config import read_model_config
from workers.model.tokenizer_files import read_tokenizer
from workers.request import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher

logger = logging.getLogger(__name__)

MAX_COMPILED = 32  # grammars kept
LIMITS: Any = {
    "max_grammar_size": 50_000,
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 30_000,
    "step_max_items": 4_000,  # bounds a mask to about 5 ms
    "max_lexer_states": 20_000,
    "verbose_errors": False,
}
MASK_S = 0.01  # of computation for a mask; a grammar that takes longer would delay the tokens of others
PROBED_TOKENS = 8
# Small models would fill an answer with the unlimited whitespace that JSON allows; a line break and its indentation are
# enough. `lenient`: what is not enforced is a warning; `_compile` refuses all but formats, which only annotate where
# they are not known.
JSON_OPTIONS: Any = {"whitespace_pattern": r"(\r?\n)?[ \t]{0,20}", "lenient": True}
PASSING_WARNING = "Unknown format: "
LONGEST_REASON = 300  # characters of an error
# llguidance's words for what it does not enforce, and ours.
REASONS = (
    (r'at \d+\(\d+\): invalid regex (".*") \(in regex\): regex parse error: .* error: (.*?) \d+ \| .*', r"\1: \2"),
    (r"Unimplemented keys: \[(.*)\]", r"\1 cannot be enforced; leave it out"),
    (r"NoExtensionBias", "it allows no token"),
    (r"oneOf not fully supported.*", "oneOf needs schemas that exclude each other; anyOf does not"),
    (r"Resource '([^']*)' is not present.*", r"a $ref to '\1' is outside of the schema; put it below $defs"),
)
INSTALL = "install it with: pip install 'diptych[structured]'"


def has_grammars() -> bool:
    """Whether llguidance is installed."""
    return find_spec("llguidance") is not None


class GrammarCompiler:
    """Safe to use from several threads. Construction takes a second and holds the GIL."""

    def __init__(self, tokenizer: str, vocab_size: int, end_tokens: Sequence[int]) -> None:
        """`tokenizer`: the content of a tokenizer.json. Raises `ValueError` if llguidance cannot read it."""
        from llguidance import LLParserLimits, LLTokenizer

        self._tokenizer: LLTokenizer = LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(end_tokens) or None)
        self._limits = LLParserLimits(**LIMITS)
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = Lock()

    def matcher(self, grammar: Grammar) -> "LLMatcher":
        """A new matcher. Raises `InvalidRequest` for a grammar that is wrong, too large or matched by no text."""
        with self._lock:
            compiled = self._compiled.pop(grammar, None)
        if compiled is None:
            compiled = self._compile(grammar)
        with self._lock:
            self._compiled[grammar] = compiled
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return compiled.deep_copy()

    def check(self, grammar: Grammar) -> None:
        """Raises `InvalidRequest` as `matcher`, and for a grammar whose masks take long."""
        matcher = self.matcher(grammar)
        for _ in range(PROBED_TOKENS):
            begun_s = thread_time()
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            if not matcher.is_stopped():
                matcher.compute_ff_tokens()  # what is forced may have no end
                matcher.consume_token(int(np.unpackbits(mask, bitorder="little").argmax()))
            if (matcher.is_error() and mask.any()) or thread_time() - begun_s > MASK_S:
                raise InvalidRequest("sampling.grammar", "takes too long for each token; simplify it")
            if matcher.is_stopped():
                break

    def _compile(self, grammar: Grammar) -> "LLMatcher":
        from llguidance import LLMatcher

        try:
            source = _source(grammar)
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidRequest("sampling.grammar", f"cannot be read: {_short(str(error))}") from None
        compiled = LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        if not compiled.is_error():
            first = compiled.deep_copy()
            first.compute_bitmask()  # finds what no text matches
            ignored = [each for each in compiled.get_grammar_warnings() if not each.startswith(PASSING_WARNING)]
            if not first.is_error() and not ignored:
                return compiled
            why = f"cannot be compiled: {_short('; '.join(map(_short, ignored)))}"
            if not ignored:
                why = f"no text can match it, or it needs too much computation: {reason(first)}"
        else:
            why = f"cannot be compiled: {reason(compiled)}"
        raise InvalidRequest("sampling.grammar", why)


def grammar_compiler(folder: Path) -> GrammarCompiler:
    """Of the model in this folder. Raises `ModelError`, or `ValueError` if llguidance cannot read its tokenizer."""
    shape = read_model_config(folder)
    return GrammarCompiler(read_tokenizer(folder).tokenizer, shape.vocab_size, shape.eos_token_ids)


def reason(matcher: "LLMatcher") -> str:
    """Why it failed, in one line."""
    return _short(matcher.get_error())


def lark_grammar(grammar: Grammar) -> Grammar:
    """GBNF becomes Lark; others stay. Raises `InvalidRequest`. Takes long, with the GIL, for a long text."""
    if grammar.kind != "grammar":
        return grammar
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return Grammar("lark", any_to_lark(grammar.text))
    except Exception as error:  # its parser raises whatever a text leads it to
        raise InvalidRequest("sampling.grammar", f"is neither Lark nor GBNF: {_short(str(error))}") from None


def _source(grammar: Grammar) -> str:
    """As llguidance reads it."""
    from llguidance import LLMatcher

    match grammar.kind:
        case "json":
            schema: Any = json.loads(grammar.text)
            if not isinstance(schema, dict | bool):
                raise ValueError("a JSON schema is an object")
            if isinstance(schema, dict) and "x-guidance" in schema:  # llguidance's own options, which replace ours
                raise ValueError("x-guidance is not supported; leave it out")
            return LLMatcher.grammar_from_json_schema(grammar.text, overrides=JSON_OPTIONS)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "choice":
            choices = json.loads(grammar.text)
            if not (isinstance(choices, list) and choices and all(isinstance(each, str) for each in choices)):
                raise ValueError("choices are a list of at least one string")
            # One terminal: alternatives of a rule would be tried one by one.
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, choices))}")
        case _:
            return LLMatcher.grammar_from_lark(lark_grammar(grammar).text)


def _short(text: str) -> str:
    line = " ".join(text.removesuffix("<non-verbose/>").split())
    for theirs, ours in REASONS:
        line = re.sub(theirs, ours, line, count=1)
    return line if len(line) <= LONGEST_REASON else f"{line[:LONGEST_REASON]}..."
