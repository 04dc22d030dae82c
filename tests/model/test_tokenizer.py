import random
import subprocess
import sys
from pathlib import Path

import pytest

from workers.errors import InvalidRequest, ModelError
from workers.model.folder import ModelFolder
from workers.tokenizer import Tokenizer

TEXT = "Plain words, naïve café, 漢字かな, العربية, code_{x};\n\t 👩‍👩‍👧 🏳️‍🌈 🇨🇭"


@pytest.fixture(scope="module")
def tokenizer(tiny: ModelFolder) -> Tokenizer:
    return Tokenizer(tiny.path)


def grown(tokenizer: Tokenizer, tokens: list[int], step: int = 1) -> tuple[list[str], str]:
    detokenizer = tokenizer.detokenizer()
    parts = [detokenizer.push(tokens[start : start + step]) for start in range(0, len(tokens), step)]
    return parts, detokenizer.flush()


def assert_grows_whole(tokenizer: Tokenizer, rng: random.Random) -> None:
    tokens = list(tokenizer.encode("".join(rng.choice(TEXT) for _ in range(60))))
    parts, rest = grown(tokenizer, tokens, step=rng.choice([1, 1, 2, 5]))
    assert "".join(parts) + rest == tokenizer.decode(tokens)
    assert not any("\ufffd" in part for part in parts), "half a character came out"


@pytest.mark.parametrize("seed", range(20))
def test_growing_text_equals_the_whole_and_never_splits_a_character(tokenizer: Tokenizer, seed: int) -> None:
    assert_grows_whole(tokenizer, random.Random(seed))


@pytest.mark.model
def test_growing_text_equals_the_whole_on_the_real_vocabulary(smollm2: ModelFolder) -> None:
    tokenizer, rng = Tokenizer(smollm2.path), random.Random(0)
    for _ in range(100):
        assert_grows_whole(tokenizer, rng)
        tokens = [rng.randrange(tokenizer.vocab_size) for _ in range(40)]
        parts, rest = grown(tokenizer, tokens)
        assert "".join(parts) + rest == tokenizer.decode(tokens)


def test_an_answer_that_ends_within_a_character_shows_the_replacement(tokenizer: Tokenizer) -> None:
    parts, rest = grown(tokenizer, list(tokenizer.encode("ok 👩"))[:-1])
    assert "".join(parts) == "ok " and rest == "\ufffd"


def test_bytes_that_never_become_text_do_not_stall_the_stream(tokenizer: Tokenizer) -> None:
    bad = tokenizer.encode("é")[0]  # a leading byte without its second
    parts, _ = grown(tokenizer, [bad] * 200)
    assert sum(bool(part) for part in parts) > 5


def test_plain_text_comes_back(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_chat_template_ends_where_the_answer_begins(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(tokens, skip_special_tokens=False).endswith("<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ([{"role": "user"}], r"messages\[0\]"),
        ([{"role": "user", "content": "x"}, {"content": "y"}], r"messages\[1\]"),
        ([{"role": "user", "content": "\ud800"}], "prompt"),
    ],
)
def test_malformed_messages_are_refused(tokenizer: Tokenizer, messages: list[dict[str, str]], field: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: "):
        tokenizer.apply_chat_template(messages)


def test_a_template_that_rejects_is_the_callers_fault(tmp_path: Path, tiny: ModelFolder) -> None:
    for template, words in (("{{ raise_exception('roles must alternate') }}", "alternate"), ("{% if %}", "template")):
        (tmp_path / "tokenizer.json").write_bytes((tiny.path / "tokenizer.json").read_bytes())
        (tmp_path / "chat_template.jinja").write_text(template)
        with pytest.raises(InvalidRequest, match=words):
            Tokenizer(tmp_path).apply_chat_template([{"role": "user", "content": "x"}])


def test_no_template_says_to_send_a_prompt(tmp_path: Path, tiny: ModelFolder) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tiny.path / "tokenizer.json").read_bytes())
    with pytest.raises(InvalidRequest, match="no chat template; send a plain prompt"):
        Tokenizer(tmp_path).apply_chat_template([{"role": "user", "content": "x"}])


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be loaded"):
        Tokenizer(tmp_path)


def test_importing_the_tokenizer_leaves_torch_out() -> None:
    code = "import sys, workers.tokenizer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode == 0
