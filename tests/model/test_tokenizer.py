import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model.tiny import write_tiny_llama
from tests.model.vocabularies import KINDS, write_tokenizer
from workers.errors import InvalidRequest, ModelError
from workers.model.folder import ModelFolder
from workers.model.tokenizer import ModelTokenizer

TEXT = "Plain words, naïve café, 漢字かな, العربية, code_{x};\n\t 👩‍👩‍👧 🏳️‍🌈 🇨🇭"


@pytest.fixture(scope="module")
def tokenizer(tiny: ModelFolder) -> ModelTokenizer:
    return ModelTokenizer(tiny.path)


def grown(tokenizer: ModelTokenizer, tokens: list[int], step: int = 1) -> tuple[list[str], str]:
    detokenizer = tokenizer.detokenizer()
    parts = [detokenizer.push(tokens[start : start + step]) for start in range(0, len(tokens), step)]
    return parts, detokenizer.flush()


def assert_grows_whole(tokenizer: ModelTokenizer, rng: random.Random) -> None:
    tokens = list(tokenizer.encode("".join(rng.choice(TEXT) for _ in range(60))))
    parts, rest = grown(tokenizer, tokens, step=rng.choice([1, 1, 2, 5]))
    assert "".join(parts) + rest == tokenizer.decode(tokens)
    assert not any("\ufffd" in part for part in parts), "half a character came out"


@pytest.mark.parametrize("seed", range(20))
def test_growing_text_equals_the_whole_and_never_splits_a_character(tokenizer: ModelTokenizer, seed: int) -> None:
    assert_grows_whole(tokenizer, random.Random(seed))


@pytest.mark.model
def test_growing_text_equals_the_whole_on_the_real_vocabulary(smollm2: ModelFolder) -> None:
    tokenizer, rng = ModelTokenizer(smollm2.path), random.Random(0)
    for _ in range(100):
        assert_grows_whole(tokenizer, rng)
        tokens = [rng.randrange(tokenizer.vocab_size) for _ in range(40)]
        parts, rest = grown(tokenizer, tokens)
        assert "".join(parts) + rest == tokenizer.decode(tokens)


def test_an_answer_that_ends_within_a_character_shows_the_replacement(tokenizer: ModelTokenizer) -> None:
    parts, rest = grown(tokenizer, list(tokenizer.encode("ok 👩"))[:-1])
    assert "".join(parts) == "ok " and rest == "\ufffd"


def test_bytes_that_never_become_text_do_not_stall_the_stream(tokenizer: ModelTokenizer) -> None:
    bad = tokenizer.encode("é")[0]  # a leading byte without its second
    parts, _ = grown(tokenizer, [bad] * 200)
    assert sum(bool(part) for part in parts) > 5


def test_plain_text_comes_back(tokenizer: ModelTokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_chat_template_ends_where_the_answer_begins(tokenizer: ModelTokenizer) -> None:
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
def test_malformed_messages_are_refused(tokenizer: ModelTokenizer, messages: list[dict[str, str]], field: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: "):
        tokenizer.apply_chat_template(messages)


def test_a_template_that_rejects_is_the_callers_fault(tmp_path: Path, tiny: ModelFolder) -> None:
    for template, words in (("{{ raise_exception('roles must alternate') }}", "alternate"), ("{% if %}", "template")):
        (tmp_path / "tokenizer.json").write_bytes((tiny.path / "tokenizer.json").read_bytes())
        (tmp_path / "chat_template.jinja").write_text(template)
        with pytest.raises(InvalidRequest, match=words):
            ModelTokenizer(tmp_path).apply_chat_template([{"role": "user", "content": "x"}])


def test_no_template_says_to_send_a_prompt(tmp_path: Path, tiny: ModelFolder) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tiny.path / "tokenizer.json").read_bytes())
    with pytest.raises(InvalidRequest, match="no chat template; send a plain prompt"):
        ModelTokenizer(tmp_path).apply_chat_template([{"role": "user", "content": "x"}])


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        ModelTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be loaded"):
        ModelTokenizer(tmp_path)


def test_importing_the_tokenizer_leaves_torch_out() -> None:
    code = "import sys, workers.model.tokenizer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode == 0


@pytest.fixture(scope="module")
def by_kind(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelTokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return {kind: ModelTokenizer(write_tokenizer(folder / kind, kind)) for kind in KINDS}


PIECES = st.sampled_from(["a", "b", " ", "  ", "é", "漢", "👩‍👩‍👧", "🏳️‍🌈", "🇨🇭", "\u200d", "́", "ab ", "\n"])
CHARACTERS = st.characters(codec="utf-8", exclude_characters="\ufffd")  # no lone surrogates: those are refused
TEXTS = st.lists(PIECES, max_size=30).map("".join) | st.text(CHARACTERS, max_size=40)
STEPS = st.integers(1, 7)


@settings(max_examples=150, deadline=None)
@given(kind=st.sampled_from(KINDS), text=TEXTS, step=STEPS)
def test_any_text_grows_whole_with_any_kind_of_tokenizer(
    by_kind: dict[str, ModelTokenizer], kind: str, text: str, step: int
) -> None:
    tokens = list(by_kind[kind].encode(text))
    parts, rest = grown(by_kind[kind], tokens, step)
    whole = by_kind[kind].decode(tokens)
    assert "".join(parts) + rest == whole
    assert not any("\ufffd" in part for part in [*parts, rest]), "half a character came out"
    if kind != "metaspace":  # it has no token for most characters
        assert whole == text


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(["byte-level", "metaspace"]),
    numbers=st.lists(st.integers(0, 10**6), max_size=60),
    step=STEPS,
    skip=st.booleans(),
)
def test_any_tokens_grow_into_what_they_decode_to(
    by_kind: dict[str, ModelTokenizer], kind: str, numbers: list[int], step: int, skip: bool
) -> None:
    tokenizer = by_kind[kind]
    tokens = [number % tokenizer.vocab_size for number in numbers]
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    parts = [detokenizer.push(tokens[start : start + step]) for start in range(0, len(tokens), step)]
    assert "".join(parts) + detokenizer.flush() == tokenizer.decode(tokens, skip_special_tokens=skip)


@settings(max_examples=150, deadline=None)
@given(numbers=st.lists(st.integers(0, 10**6), max_size=60), text=TEXTS)
def test_invalid_fallback_bytes_do_not_damage_the_text_after_them(
    by_kind: dict[str, ModelTokenizer], numbers: list[int], text: str
) -> None:
    tokenizer = by_kind["byte-fallback"]
    noise = [number % tokenizer.vocab_size for number in numbers]
    tokens = [*noise, *tokenizer.encode("a"), *tokenizer.encode(text)]
    parts, rest = grown(tokenizer, tokens)
    assert ("".join(parts) + rest).endswith(text)


def test_special_tokens_have_text_when_they_are_not_skipped(by_kind: dict[str, ModelTokenizer]) -> None:
    tokenizer = by_kind["byte-level"]
    tokens = [*tokenizer.encode("ab"), 2]
    for skip, expected in ((True, "ab"), (False, "ab</s>")):
        detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
        assert detokenizer.push(tokens) + detokenizer.flush() == expected


PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
WITH_TOOLS = "{% for t in tools or [] %}<{{ t.name }}>{% endfor %}" + PLAIN
TALK = [{"role": "user", "content": "ab"}]
TOOLS = [{"name": "weather"}, {"name": "time"}]


@pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.jinja", "chat_template.json"])
def test_the_template_is_found_wherever_models_keep_it(tmp_path: Path, place: str) -> None:
    settings = {"chat_template": WITH_TOOLS} if place == "tokenizer_config.json" else {}
    folder = write_tokenizer(tmp_path / "model", "byte-level", **settings)
    if place.endswith(".jinja"):
        (folder / place).write_text(WITH_TOOLS)
    elif place == "chat_template.json":
        (folder / place).write_text(json.dumps({"chat_template": WITH_TOOLS}))
    tokenizer = ModelTokenizer(folder)
    assert tokenizer.decode(tokenizer.apply_chat_template(TALK)) == "[user]ab"
    assert tokenizer.decode(tokenizer.apply_chat_template(TALK, tools=TOOLS)) == "<weather><time>[user]ab"


def test_of_several_templates_the_one_for_tools_is_taken_when_there_are_any(tmp_path: Path) -> None:
    named = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": WITH_TOOLS}]
    config = ModelTokenizer(write_tokenizer(tmp_path / "config", "byte-level", chat_template=named))
    folder = write_tokenizer(tmp_path / "files", "byte-level")
    (folder / "chat_template.jinja").write_text(PLAIN)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(WITH_TOOLS)
    for tokenizer in (config, ModelTokenizer(folder)):
        assert tokenizer.decode(tokenizer.apply_chat_template(TALK)) == "[user]ab"
        assert tokenizer.decode(tokenizer.apply_chat_template(TALK, tools=TOOLS)) == "<weather><time>[user]ab"


def with_template(folder: Path, template: str) -> ModelTokenizer:
    return ModelTokenizer(write_tokenizer(folder, "byte-level", chat_template=template))


def test_tools_that_the_template_ignores_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="tools: are ignored by this model's chat template"):
        with_template(tmp_path / "model", PLAIN).apply_chat_template(TALK, tools=TOOLS)


def test_further_variables_reach_the_template_and_others_are_refused(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path / "model", "{% if enable_thinking %}<think>{% endif %}" + PLAIN)
    for wanted, expected in ((True, "<think>[user]ab"), (False, "[user]ab")):
        tokens = tokenizer.apply_chat_template(TALK, template_kwargs={"enable_thinking": wanted})
        assert tokenizer.decode(tokens) == expected
    for name in ("enable_thought", "messages", "tokenize", "bos_token"):
        with pytest.raises(InvalidRequest, match=f"chat_template_kwargs.{name}: is no variable .* enable_thinking"):
            tokenizer.apply_chat_template(TALK, template_kwargs={name: True})


@pytest.mark.parametrize(
    ("template", "effort", "expected"),
    [
        ("{% if reasoning_effort %}<{{ reasoning_effort }}>{% endif %}", "low", "<low>"),
        ("{% if enable_thinking %}<think>{% endif %}", "low", "<think>"),
        ("{% if enable_thinking %}<think>{% endif %}", "none", ""),
        ("{% if thinking %}<think>{% endif %}", "high", "<think>"),
        ("", "none", ""),
    ],
)
def test_the_effort_of_reasoning_is_what_the_template_knows(
    tmp_path: Path, template: str, effort: str, expected: str
) -> None:
    tokenizer = with_template(tmp_path / "model", template + PLAIN)
    tokens = tokenizer.apply_chat_template(TALK, template_kwargs={"reasoning_effort": effort})
    assert tokenizer.decode(tokens) == f"{expected}[user]ab"


def test_effort_is_refused_where_the_template_knows_none(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"chat_template_kwargs\.reasoning_effort: is no variable"):
        with_template(tmp_path / "model", PLAIN).apply_chat_template(TALK, template_kwargs={"reasoning_effort": "low"})


CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": {"at": "é"}}}
CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
]


@pytest.mark.parametrize(
    "shown", ["call.function.arguments | tojson", "'' + call.function.arguments + ''", "call.function.arguments"]
)
def test_the_arguments_of_a_call_are_an_object_and_where_a_text_is_wanted_its_json(tmp_path: Path, shown: str) -> None:
    calls = "{% for call in message.tool_calls or [] %}{{ call.function.name }}{{ " + shown + " }}{% endfor %}"
    template = "{% for message in messages %}" + calls + "{% endfor %}"
    tokenizer = with_template(tmp_path / "model", template)
    assert tokenizer.decode(tokenizer.apply_chat_template(CALLED)) == 'look{"at": "é"}'


def test_calls_that_the_template_ignores_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[1\]\.tool_calls: are ignored"):
        with_template(tmp_path / "model", PLAIN).apply_chat_template(CALLED)


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_can_be_kept_one_by_one(tmp_path: Path, skip: bool) -> None:
    tokenizer = ModelTokenizer(write_tiny_llama(tmp_path / "model"))
    begin, end = (tokenizer.special_ids[each] for each in ("<|im_start|>", "<|im_end|>"))
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip, keep=[end])
    text = detokenizer.push([begin, *tokenizer.encode("a"), end, *tokenizer.encode("b")]) + detokenizer.flush()
    assert text == ("a<|im_end|>b" if skip else "<|im_start|>a<|im_end|>b")


def test_a_template_that_recurses_into_what_a_client_sends_rejects_it(tmp_path: Path) -> None:
    endless = "{% macro down(x) %}{{ down([x]) }}{% endmacro %}{{ down(messages) }}"
    with pytest.raises(InvalidRequest, match="chat template rejects them"):
        with_template(tmp_path / "model", endless).apply_chat_template(TALK)


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_the_bytes_of_a_characters_parts_make_the_character(by_kind: dict[str, ModelTokenizer], kind: str) -> None:
    tokenizer = by_kind[kind] if kind in by_kind else next(iter(by_kind.values()))
    tokens = tokenizer.encode("\U0001f41a", add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, tokens)).endswith("\U0001f41a".encode())


def test_the_tokenizer_exports_as_json_what_another_one_needs(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "model", "byte-level", chat_template="{{ messages }}", bos_token="<s>")
    tokenizer = ModelTokenizer(folder)
    assert json.loads(json.dumps(tokenizer.info)) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "vocab_size": tokenizer.vocab_size,
        **{"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        "chat_template": "{{ messages }}",
    }


def test_a_damaged_template_file_is_named(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "model", "byte-level")
    (folder / "chat_template.json").write_text("[]")
    with pytest.raises(ModelError, match=r"chat_template\.json has no chat_template"):
        ModelTokenizer(folder)


def test_a_tokenizer_without_the_models_end_token_is_refused(tmp_path: Path, tiny: ModelFolder) -> None:
    folder = write_tokenizer(tmp_path / "model", "metaspace")
    config = json.loads((tiny.path / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 300}))
    with pytest.raises(ModelError, match=r"end token 300, which its tokenizer\.json does not have"):
        ModelTokenizer(folder)
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [300, 2]}))
    ModelTokenizer(folder)
