"""Small tokenizers of the three common kinds on disk: bytes as letters, bytes as a fallback, and pieces of words."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

KINDS = ("byte-level", "byte-fallback", "metaspace")
SPECIAL = ("<unk>", "<s>", "</s>")
LETTERS = "▁abcdefghijklmnopqrstuvwxyzé漢"


def write_tokenizer(folder: Path, kind: str, **settings: object) -> Path:
    """A tokenizer.json of this kind, and a tokenizer_config.json with these settings."""
    tokenizer = {"byte-level": _byte_level, "byte-fallback": _byte_fallback, "metaspace": _metaspace}[kind]()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>"} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def _byte_level() -> Tokenizer:
    vocabulary = _numbered([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "Ġa", "ðŁ"])
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b"), ("Ġ", "a"), ("ð", "Ł")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_fallback() -> Tokenizer:
    """As Llama 2 and Mistral have it: a character that is no token becomes one token for each of its bytes."""
    vocabulary = _numbered([*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *LETTERS, "▁a", "ab"])
    merges = [("▁", "a"), ("a", "b")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bytes_again = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(bytes_again)
    return tokenizer


def _metaspace() -> Tokenizer:
    vocabulary = _numbered([*SPECIAL, *LETTERS, *"👩👧\u200d🏳️🇨🇭", "▁a", "ab"])
    merges = [("▁", "a"), ("a", "b")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def _numbered(tokens: list[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(dict.fromkeys(tokens))}
