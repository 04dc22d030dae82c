"""Prompts as plain text, for servers that take no token ids: one word for each token. Pure.

Words that most vocabularies have as one token each. How many tokens they are in the end, the server counts.
"""

from collections.abc import Sequence
from typing import Protocol

from cluster.offline.workload.prompts import FIRST_TOKEN

_TEXT = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power hour
game line end member law car city
"""
WORDS = tuple(_TEXT.split())
VOCAB_SIZE = FIRST_TOKEN + len(WORDS)


class Tokens(Protocol):
    """What a tokenizer must do here."""

    def encode(self, text: str) -> Sequence[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


def text_of(prompt: Sequence[int], tokenizer: Tokens | None = None) -> str:
    """A word for each token id below `VOCAB_SIZE`; with a tokenizer, cut to as many of its tokens."""
    text = " ".join(WORDS[token - FIRST_TOKEN] for token in prompt)
    if tokenizer is None:
        return text
    return tokenizer.decode(tokenizer.encode(text)[: len(prompt)])
