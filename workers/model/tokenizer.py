"""Converts text to token ids and back with the tokenizer of a model folder.

Knows vocabularies and chat templates; knows no model, and imports neither torch nor transformers, which take seconds.
The gateway owns one; workers see only token ids.
"""

import ctypes
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
from tokenizers import Tokenizer

from workers.errors import InvalidRequest, ModelError, PromptTooLong
from workers.model.chat_template import Templates, environment, render
from workers.model.config import read_model_config
from workers.model.grammar import INSTALL, GrammarCompiler, grammar_compiler, has_grammars, lark_grammar
from workers.model.token_bytes import byte_letters, token_bytes
from workers.model.tokenizer_files import read_tokenizer
from workers.request import Grammar

NOTHING: Mapping[str, Any] = {}
BYTE_OF = {letter: byte for byte, letter in enumerate(byte_letters())}
# Variables that every template has, and the names of transformers' arguments.
OWN_VARIABLES = {
    *("messages", "conversation", "tools", "documents", "add_generation_prompt", "continue_final_message"),
    *("chat_template", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs", "raise_exception", "strftime_now"),
    *("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"),
}
# Errors of a chat template that are caused by the client's input.
REJECTIONS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
# The decoder's output for bytes that are not a complete character.
_REPLACEMENT = "\ufffd"
# A character has at most four bytes: after this many tokens without one, the bytes are invalid.
_MAX_PENDING_TOKENS = 16


class ModelTokenizer:
    """Immutable after construction; safe to share between requests."""

    def __init__(self, folder: Path, most_tokens: int | None = None) -> None:
        """`most_tokens`: refuse texts that certainly have more tokens, without encoding them.

        Raises `ModelError` if the folder has no usable tokenizer.
        """
        if not (folder / "tokenizer.json").is_file():
            raise ModelError(f"{folder} has no tokenizer.json; save the model's fast tokenizer there")
        files = read_tokenizer(folder)
        self._backend = Tokenizer.from_str(files.tokenizer)
        self._backend.encode_special_tokens = files.splits_special
        self._special_tokens, self._templates = files.special_tokens, files.chat_template
        self._class_name = _class_name(folder)
        self._folder = folder
        self._variables = _variables(self._templates)
        self._check_end_tokens(folder)
        self._max_tokens = most_tokens
        self._bytes = None if most_tokens is None else token_bytes(self._backend)
        _trim()

    def _check_end_tokens(self, folder: Path) -> None:
        """A tokenizer without any of the model's end tokens belongs to another model."""
        if not (folder / "config.json").is_file():
            return
        ends = read_model_config(folder).eos_token_ids
        if ends and all(self._backend.id_to_token(end) is None for end in ends):
            named = ", ".join(map(str, ends))
            raise ModelError(
                f"{folder} names end token {named}, which its tokenizer.json does not have ({self.vocab_size} tokens); "
                "fetch config and tokenizer of the same model"
            )

    @property
    def longest_text_bytes(self) -> int | None:
        """A longer text certainly has more than `most_tokens` tokens; None: there is no bound."""
        if self._bytes is None or self._max_tokens is None:
            return None
        return int(self._bytes.most * self._max_tokens)

    @property
    def vocab_size(self) -> int:
        """Number of the tokenizer's ids, special ones included; the model's own vocabulary may be padded."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def has_chat_template(self) -> bool:
        return self._templates is not None

    @property
    def info(self) -> Mapping[str, Any]:
        """As JSON: `tokenizer_class`, `vocab_size`, the special tokens by their names, `chat_template` (null: none)."""
        return {
            "tokenizer_class": self._class_name,
            "vocab_size": self.vocab_size,
            **self._special_tokens,
            "chat_template": self._templates,
        }

    @cached_property
    def special_ids(self) -> Mapping[str, int]:
        """The ids of special tokens, by their texts."""
        return {
            each.content: number for number, each in self._backend.get_added_tokens_decoder().items() if each.special
        }

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of plain text.

        Raises `InvalidRequest` for invalid Unicode (lone surrogates), and `PromptTooLong`.
        """
        try:
            if self._bytes is not None and self._max_tokens is not None:
                least_tokens = self._bytes.least_tokens(text.encode())
                if least_tokens > self._max_tokens:
                    raise PromptTooLong(least_tokens)
            return tuple(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except (UnicodeError, TypeError) as error:
            raise InvalidRequest("prompt", f"is not valid Unicode text ({error}); send UTF-8") from error

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] = NOTHING,
        add_generation_prompt: bool = True,
    ) -> tuple[int, ...]:
        """Token ids of a conversation, each message with "role" and "content", up to the start of the answer.

        A message may have `tool_calls` (with objects as arguments) and other fields that templates know. `tools` are
        passed to the template unchanged; if there are several templates, tools select "tool_use". `template_kwargs` are
        additional variables of the template; one that knows no `reasoning_effort` gets `enable_thinking`. Raises
        `InvalidRequest` if there are no messages or a malformed one, or the template is missing, rejects them, ignores
        tools or calls, or has no such variable.
        """
        if self._templates is None:
            raise InvalidRequest("messages", "this model has no chat template; send a plain prompt instead")
        if not messages:
            raise InvalidRequest("messages", "is empty; send at least one message")
        for index, message in enumerate(messages):
            if not all(isinstance(message.get(part), str) for part in ("role", "content")):
                raise InvalidRequest(f"messages[{index}]", "needs a text 'role' and a text 'content'")
            if message.get("tool_calls") and "tool_calls" not in str(self._templates):
                why = "are ignored by this model's chat template; describe them in the content"
                raise InvalidRequest(f"messages[{index}].tool_calls", why)
        template_kwargs = self._with_effort(template_kwargs)
        self._check_variables(template_kwargs)
        options = dict(template_kwargs) | {"add_generation_prompt": add_generation_prompt}
        text = self._rendered(self._templates, messages, tools, options)
        if tools and text == self._rendered(self._templates, messages, (), options):
            raise InvalidRequest("tools", "are ignored by this model's chat template; describe them in a message")
        return self.encode(text, add_special_tokens=False)  # the template includes them

    def _rendered(
        self,
        templates: Templates,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
    ) -> str:
        try:
            return render(templates, messages, tools, self._special_tokens | dict(options))
        except REJECTIONS as error:
            raise InvalidRequest("messages", f"the model's chat template rejects them: {error}") from error

    def _with_effort(self, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        """`reasoning_effort` as this template knows it: many only think or do not."""
        effort, known = variables.get("reasoning_effort"), self._variables
        if effort is None or known is None or "reasoning_effort" in known:
            return variables
        others = {name: value for name, value in variables.items() if name != "reasoning_effort"}
        for name in ("enable_thinking", "thinking"):
            if name in known:
                return {name: effort != "none"} | others
        return others if effort == "none" else variables

    def _check_variables(self, names: Iterable[str]) -> None:
        for name in names:
            if name in OWN_VARIABLES or (self._variables is not None and name not in self._variables):
                known = ", ".join(sorted((self._variables or frozenset()) - OWN_VARIABLES)) or "none"
                why = f"is no variable of this model's chat template; it has {known}"
                raise InvalidRequest(f"chat_template_kwargs.{name[:64]}", why)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of all tokens. Ids outside the vocabulary are skipped."""
        return str(self._backend.decode(list(tokens), skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a single token, which may be part of a character."""
        text = self.decode((token,), skip_special_tokens=False)
        if _REPLACEMENT not in text:
            return text.encode()
        piece = self._backend.id_to_token(token) or ""
        if piece.startswith("<0x") and len(piece) == 6:  # a byte of a sentencepiece vocabulary
            return bytes.fromhex(piece[3:5])
        letters = [BYTE_OF.get(letter) for letter in piece]
        return text.encode() if None in letters else bytes(byte for byte in letters if byte is not None)

    def check_grammar(self, grammar: Grammar) -> Grammar:
        """The grammar as workers compile it. Raises `InvalidRequest` if they cannot."""
        if not has_grammars():
            raise InvalidRequest("sampling.grammar", f"this gateway has no structured output; {INSTALL}")
        grammar = lark_grammar(grammar)
        self._compiler.check(grammar)
        return grammar

    def load_grammars(self) -> None:
        """Load what `check_grammar` needs, which takes a second."""
        if has_grammars():
            _ = self._compiler

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        """For the gateway, which compiles to check."""
        return grammar_compiler(self._folder)

    def detokenizer(self, *, skip_special_tokens: bool = True, keep: Collection[int] = ()) -> "IncrementalDetokenizer":
        """A new one for one answer. `keep`: special tokens that are not skipped."""
        if not skip_special_tokens or not keep:
            return IncrementalDetokenizer(self, skip_special_tokens)
        return IncrementalDetokenizer(self, False, frozenset(self.special_ids.values()).difference(keep))


def _variables(templates: Templates | None) -> frozenset[str] | None:
    """The variables that chat templates use; None if one cannot be parsed."""
    each = [templates or ""] if isinstance(templates, str | None) else templates.values()
    try:
        found = [jinja2.meta.find_undeclared_variables(environment().parse(template)) for template in each]
    except jinja2.TemplateError:
        return None
    return frozenset().union(*found)


def _trim() -> None:
    """Return freed memory to the system: glibc would keep 30 MiB that parsing a tokenizer has used."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _class_name(folder: Path) -> str | None:
    """As in the folder; transformers may load it with another class."""
    path = folder / "tokenizer_config.json"
    name = json.loads(path.read_text(encoding="utf-8")).get("tokenizer_class") if path.is_file() else None
    return name if isinstance(name, str) else None


class IncrementalDetokenizer:
    """Incremental text of one answer. Never returns half a character; owned by the answer's stream.

    A token's text depends on its neighbors (a leading space, the bytes of one emoji), so a window of tokens is decoded
    twice, without and with the new tokens, and the difference is the new text:

        … returned …  | window: decoded before | new tokens |
                      └ text already returned ─┘└─ pushed ──┘
    """

    def __init__(
        self, tokenizer: ModelTokenizer, skip_special_tokens: bool, skipped: Collection[int] = frozenset()
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []  # tokens as context, then those whose text is still to be returned
        self._returned = 0  # tokens of the window whose text has been returned

    def push(self, tokens: Sequence[int]) -> str:
        """The text that is complete with these tokens; it may be empty."""
        text = ""
        for token in tokens:
            if token in self._skipped:
                continue
            self._window.append(token)
            text += self._advance(final=False)
        return text

    def flush(self) -> str:
        """The remaining text at the end of the answer; incomplete characters become U+FFFD."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        before = self._decode(self._window[: self._returned])
        now = self._decode(self._window)
        waiting = now.endswith(_REPLACEMENT) or len(now) <= len(before)
        if waiting and not final and len(self._window) - self._returned < _MAX_PENDING_TOKENS:
            return ""
        self._window = self._window[self._returned :]
        self._returned = len(self._window)
        return now[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip_special_tokens)
