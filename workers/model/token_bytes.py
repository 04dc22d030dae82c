"""The most bytes of text that one token can encode: refuses a text that is too long before it is tokenized.

A tokenizer that may drop text, or join any amount of it into one token (stripped spaces, an unknown word as one token),
has no such bound: every text must be encoded.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE

MAX_CHARACTER_BYTES = 4  # of UTF-8
# The largest ratio of a text's bytes to its normal form's; a test checks every code point.
SHRINK = {"NFC": 3.5, "NFKC": 4.0, "NFD": 3.5, "NFKD": 4.0, "Lowercase": 3.0, "Prepend": 1.0, "ByteLevel": 1.0}
KEEP_ALL = ("ByteLevel", "Metaspace", "Digits")  # pre-tokenizers that drop no text

Part = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Each token encodes at most `most` bytes of UTF-8, not counting the bytes in `dropped`, which have no token."""

    most: float
    dropped: bytes = b""

    def least_tokens(self, text: bytes) -> int:
        """A lower bound of the number of tokens of this text."""
        return math.ceil(len(text.translate(None, self.dropped)) / self.most)


def token_bytes(tokenizer: Tokenizer) -> TokenBytes | None:
    """None: this tokenizer has no bound."""
    normalizer, cutter, model = _state(tokenizer.normalizer), _state(tokenizer.pre_tokenizer), tokenizer.model
    shrink = 1.0 if normalizer is None else _shrink(normalizer)
    added = tokenizer.get_added_tokens_decoder().values()
    if shrink is None or tokenizer.truncation is not None or any(_takes_spaces(each) for each in added):
        return None
    if not isinstance(model, BPE) or not _keeps_all(cutter):
        return None
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    is_byte_level = "ByteLevel" in _names(normalizer) | _names(cutter)  # then each character of a token is a byte
    lengths = [len(token) if is_byte_level else len(token.encode()) for token in vocabulary]
    most = shrink * max(MAX_CHARACTER_BYTES, *lengths, *(len(each.content.encode()) for each in added))
    if is_byte_level:
        dropped = bytes(byte for byte, letter in enumerate(byte_letters()) if letter not in vocabulary)
        # Normalization may turn a character into dropped bytes: then there is no bound for the original text.
        return TokenBytes(most, dropped) if normalizer is None or not dropped else None
    has_bytes = model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    each_unknown_counts = model.unk_token is not None and not model.fuse_unk
    return TokenBytes(most) if has_bytes or each_unknown_counts else None


def _state(part: Any) -> Part | None:
    return None if part is None else json.loads(part.__getstate__())


def _names(part: Part | None) -> set[str]:
    """The types of the part and its inner parts."""
    if part is None:
        return set()
    inner = part.get("normalizers", part.get("pretokenizers", ()))
    return {str(part["type"])}.union(*map(_names, inner))


def _shrink(part: Part) -> float | None:
    match part["type"]:
        case "Sequence":
            total = 1.0
            for each in part["normalizers"]:
                factor = _shrink(each)
                if factor is None:
                    return None
                total *= factor
            return total
        case "Replace":
            pattern, content = part["pattern"].get("String"), part["content"]
            if not pattern or not content:
                return None  # a regular expression, or text that is removed
            return max(1.0, len(pattern.encode()) / len(content.encode()))
        case kind:
            return SHRINK.get(kind)


def _keeps_all(part: Part | None) -> bool:
    if part is None:
        return True
    match part["type"]:
        case "Sequence":
            return all(map(_keeps_all, part["pretokenizers"]))
        case "Split" | "Punctuation":
            return bool(part["behavior"] != "Removed")
        case kind:
            return kind in KEEP_ALL


def _takes_spaces(token: AddedToken) -> bool:
    """Whether the token absorbs any number of adjacent spaces."""
    return bool(token.lstrip or token.rstrip)


def byte_letters() -> list[str]:
    """The character for each byte in byte-level vocabularies: itself if printable, else one from 256 on."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in seen else next(others)) for byte in range(256)]
