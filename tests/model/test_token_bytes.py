"""No text is refused by its length if its tokens would fit, for any kind of tokenizer."""

import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from tests.model.vocabularies import KINDS, write_tokenizer
from workers.errors import PromptTooLong
from workers.model import tokenizer as gateways
from workers.model.token_bytes import SHRINK, TokenBytes, byte_letters, token_bytes

NORMALIZERS = {
    "none": None,
    "NFC": normalizers.NFC(),
    "NFKC": normalizers.NFKC(),
    "NFD and lower case": normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()]),
    "shorter": normalizers.Replace("aaa", "b"),
    "longer": normalizers.Prepend("abc"),
}
# Texts that parts of tokenizers make much shorter, or into few tokens.
PIECES = ["\x04", " " * 9, "aaa", "ab", "e\u0301", "\u1100\u1161\u11a8", "\U0001fbf9", "\u0390", "\u212a", "漢"]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=40).map("".join)


def byte_level(*without: str) -> Tokenizer:
    letters = [letter for letter in sorted(pre_tokenizers.ByteLevel.alphabet()) if letter not in without]
    vocabulary = {token: number for number, token in enumerate([*letters, "ab", "Ġ" * 2, "Ġ" * 4])}
    merges = [("a", "b"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


@pytest.mark.parametrize("name", NORMALIZERS)
@given(text=TEXTS)
def test_no_text_has_fewer_tokens_than_its_length_tells(name: str, text: str) -> None:
    tokenizer = byte_level()
    if NORMALIZERS[name] is not None:
        tokenizer.normalizer = NORMALIZERS[name]
    bound = token_bytes(tokenizer)
    assert bound is not None
    assert len(tokenizer.encode(text).ids) >= bound.least_tokens(text.encode())


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = write_tokenizer(tmp_path_factory.mktemp("tokenizer"), request.param)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@given(text=TEXTS)
def test_the_bound_holds_for_each_kind_of_vocabulary(kind: Tokenizer, text: str) -> None:
    bound = token_bytes(kind)
    assert bound is not None
    assert len(kind.encode(text, add_special_tokens=False).ids) >= bound.least_tokens(text.encode())


def test_bytes_without_a_token_do_not_count() -> None:
    tokenizer = byte_level(byte_letters()[4])
    bound = token_bytes(tokenizer)
    assert bound == TokenBytes(4.0, b"\x04")
    assert bound.least_tokens(b"\x04" * 1000) == 0 == len(tokenizer.encode("\x04" * 1000).ids)
    assert bound.least_tokens(b" " * 1000) == 250 == len(tokenizer.encode(" " * 1000).ids)


def _spaces(token: str) -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken(token, lstrip=True)])
    return tokenizer


def _with(normalizer: Any = None, cutter: Any = None, model: Any = None) -> Tokenizer:
    tokenizer = byte_level()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if cutter is not None:
        tokenizer.pre_tokenizer = cutter
    if model is not None:
        tokenizer.model = model
    return tokenizer


def _truncated() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.enable_truncation(8)
    return tokenizer


WORDS = {"a": 0, "[UNK]": 1}


@pytest.mark.parametrize(
    "tokenizer",
    [
        pytest.param(_with(normalizers.Strip()), id="strips spaces"),
        pytest.param(_with(normalizers.StripAccents()), id="strips accents"),
        pytest.param(_with(normalizers.Replace(" ", "")), id="deletes"),
        pytest.param(_with(normalizers.Sequence([normalizers.NFC(), normalizers.BertNormalizer()])), id="cleans"),
        pytest.param(_with(cutter=pre_tokenizers.Whitespace()), id="drops spaces"),
        pytest.param(_with(cutter=pre_tokenizers.Split(" ", "removed")), id="drops what it splits at"),
        pytest.param(_with(model=models.WordPiece(WORDS, unk_token="[UNK]")), id="long words are unknown"),
        pytest.param(_with(model=models.WordLevel(WORDS, unk_token="[UNK]")), id="unknown words are one token"),
        pytest.param(
            _with(cutter=pre_tokenizers.Metaspace(), model=models.BPE(WORDS, [], unk_token="[UNK]", fuse_unk=True)),
            id="runs of unknown letters are one token",
        ),
        pytest.param(_with(cutter=pre_tokenizers.Metaspace(), model=models.BPE(WORDS, [])), id="drops unknown letters"),
        pytest.param(_spaces("<mask>"), id="a token that takes spaces"),
        pytest.param(_truncated(), id="truncates"),
    ],
)
def test_what_may_drop_any_amount_of_text_has_no_bound(tokenizer: Tokenizer) -> None:
    assert token_bytes(tokenizer) is None


@pytest.mark.full
@pytest.mark.parametrize(("form", "parts"), [("NFC", "NFD"), ("NFKC", "NFKD")])
def test_normal_forms_shrink_no_text_further(form: Any, parts: Any) -> None:
    """A composed character comes from its parts at most, each in the longest way to write it."""
    characters = [chr(point) for point in range(0x110000) if not 0xD800 <= point < 0xE000]
    longest: dict[str, int] = {}
    whole = {}
    for each in characters:
        split = whole[each] = unicodedata.normalize(parts, each)
        if len(split) == 1:
            longest[split] = max(longest.get(split, 0), len(each.encode()))
    for each, split in whole.items():
        most = sum(longest[part] for part in split)
        assert most >= len(each.encode())
        assert most <= SHRINK[form] * len(unicodedata.normalize(form, each).encode())
        assert len(each.encode()) <= SHRINK[parts] * len(split.encode())


def test_letters_of_bytes_are_those_of_the_library() -> None:
    assert sorted(byte_letters()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = byte_level()
    for byte in range(128):
        assert tokenizer.encode(chr(byte)).tokens == [byte_letters()[byte]]


def test_a_text_that_cannot_fit_is_refused_unread(tmp_path: Path) -> None:
    tokenizer = gateways.ModelTokenizer(write_tokenizer(tmp_path, "byte-level"), most_tokens=10)
    assert tokenizer.longest_text_bytes == 50  # of ten <unk>
    assert len(tokenizer.encode("x" * 50)) == 50  # it may have fitted; the caller counts
    with pytest.raises(PromptTooLong) as refusal:
        tokenizer.encode("ab" * 26)
    assert refusal.value.least_tokens == 11
