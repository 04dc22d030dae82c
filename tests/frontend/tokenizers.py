"""Tokenizers for servers under test: every byte is a token.

Processes of the preprocessing load them by name: this module imports little, so that each of these starts fast.
"""

import codecs
import json
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from workers.request import Grammar


class ByteDetokenizer:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, tokens: Sequence[int]) -> str:
        return self._decoder.decode(bytes(tokens))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class ByteTokenizer:
    longest_text_bytes: int | None = None
    special_ids: Mapping[str, int] = MappingProxyType({})

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        return tuple(text.encode())

    has_chat_template = True
    info: Mapping[str, Any] = MappingProxyType({"tokenizer_class": "ByteTokenizer", "chat_template": None})

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> tuple[int, ...]:
        named = "".join(f"[{tool.get('function', tool)['name']}]" for tool in tools)
        return self.encode(named + "".join(f"<{message['role']}>{message['content']}\n" for message in messages))

    def token_bytes(self, token: int) -> bytes:
        return bytes((token,))

    def check_grammar(self, grammar: Grammar) -> Grammar:
        return grammar

    def load_grammars(self) -> None:
        """Nothing to load."""

    def detokenizer(self, *, skip_special_tokens: bool = True, keep: Collection[int] = ()) -> ByteDetokenizer:
        return ByteDetokenizer()


class ToolTokenizer(ByteTokenizer):
    info: Mapping[str, Any] = {"chat_template": '{{ tools }}<tool_call>{"arguments"}</tool_call></think>'}

    def apply_chat_template(self, messages: Any, *, tools: Any = (), template_kwargs: Any = None) -> tuple[int, ...]:
        return self.encode(json.dumps([messages, tools]))


class OpenTokenizer(ToolTokenizer):
    def apply_chat_template(self, messages: Any, *, tools: Any = (), template_kwargs: Any = None) -> tuple[int, ...]:
        return self.encode("<think>no</think> hi <think>\n")


class Homebound(ByteTokenizer):
    """Remembers the largest text that was encoded in the gateway's own process."""

    largest = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        Homebound.largest = max(Homebound.largest, len(text))
        return super().encode(text)
