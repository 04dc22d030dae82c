"""Our rendering of chat templates, and our cached copy of a tokenizer, beside those of transformers."""

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers import PreTrainedTokenizerFast

from tests.model.vocabularies import KINDS, write_tokenizer
from workers.model import tokenizer_files
from workers.model.chat_template import render
from workers.model.folder import ModelFolder
from workers.model.tokenizer import ModelTokenizer

TALK = [
    {"role": "system", "content": 'Say "<b>é</b>" & stop'},
    {"role": "user", "content": "  hi\n"},
    {"role": "assistant", "content": "漢"},
]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"b": 1, "a": ["é", None, True, 1.5]}}}]
TEMPLATES = (
    "{% for m in messages %}\n  {{ bos_token }}[{{ m['role'] }}]{{ m.content | trim }}\n{% endfor %}\n",
    "{{ tools | tojson }}{{ tools | tojson(indent=2) }}{{ messages | tojson(ensure_ascii=True, sort_keys=True) }}",
    "{{ messages | tojson(separators=(',', ':')) }}{{ documents is none }}{{ tools is none }}{{ missing is defined }}",
    "{% set ns = namespace(found=false, self=1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.found = true %}{% break %}{% endif %}{% continue %}{% endfor %}{{ ns.found }}{{ ns.self }}",
    "{{ dict(a=1) }}{{ dict.fromkeys(['x'], 2) }}{{ eos_token }}{{ add_generation_prompt }}{{ strftime_now('%Y') }}",
    "{% set x = 1 %}{% for m in messages %}{% generation %}\n{% set x = 2 %}{{ loop.index }}{{ m.content }}{{ x }}\n"
    "{% endgeneration %}{{ x }}{% endfor %}",
    "{{ '%s' | format(messages[0].content) }}{{ messages | map(attribute='role') | join(',') }}",
    "{%- macro show(m) -%}{{ m.role | upper }}{%- endmacro -%}{{ show(messages[-1]) }}",
)
FORBIDDEN = (
    "{{ messages.append({}) }}",
    "{{ messages[0].update({}) }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ dict.__init__ }}{{ dict.mro() }}",
    "{% set ns = namespace(__init__=1) %}",
    "{% set ns = namespace() %}{% set ns._x = 1 %}",
    "{{ raise_exception('no') }}",
    "{{ messages[0].content.format_map({}).missing.missing }}",
    "{{ range(10000000) | list }}",
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "cache"))


def folder_with(folder: Path, template: Any) -> Path:
    return write_tokenizer(folder, "byte-level", chat_template=template, bos_token="<s>")


def theirs(folder: Path, tools: list[dict[str, Any]], **options: Any) -> str:
    loaded = PreTrainedTokenizerFast.from_pretrained(str(folder))
    return str(loaded.apply_chat_template(TALK, tools=tools or None, tokenize=False, **options))


def ours(folder: Path, tools: list[dict[str, Any]], **options: Any) -> str:
    files = tokenizer_files.read_tokenizer(folder)
    assert files.chat_template is not None
    return render(files.chat_template, TALK, tools, files.special_tokens | options)


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_renders_as_transformers_renders_it(tmp_path: Path, template: str) -> None:
    folder = folder_with(tmp_path / "model", template)
    for tools in ([], TOOLS):
        for prompt in (True, False):
            expected = theirs(folder, tools, add_generation_prompt=prompt)
            assert ours(folder, tools, add_generation_prompt=prompt) == expected


@pytest.mark.model
def test_the_real_template_renders_as_transformers_renders_it(smollm2: ModelFolder) -> None:
    for prompt in (True, False):
        expected = theirs(smollm2.path, [], add_generation_prompt=prompt)
        assert ours(smollm2.path, [], add_generation_prompt=prompt) == expected


@pytest.mark.parametrize("template", FORBIDDEN)
def test_what_transformers_forbids_a_template_is_forbidden_here(tmp_path: Path, template: str) -> None:
    folder = folder_with(tmp_path / "model", template)
    with pytest.raises((jinja2.TemplateError, OverflowError)):
        theirs(folder, [])
    with pytest.raises((jinja2.TemplateError, OverflowError)):
        ours(folder, [])


def test_several_templates_without_a_default_one_are_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "model", [{"name": "rag", "template": "x"}])
    with pytest.raises(ValueError, match="no default specified"):
        theirs(folder, [])
    with pytest.raises(ValueError, match="there is none called default; there are rag"):
        ours(folder, [])


@pytest.mark.parametrize("kind", KINDS)
def test_the_cached_tokenizer_equals_that_of_transformers(tmp_path: Path, kind: str) -> None:
    # Tokens that only the configuration has are added by transformers.
    folder = write_tokenizer(tmp_path / kind, kind, pad_token="<pad>", extra_special_tokens=["<|x|>"])
    for splits in (False, True):
        config = json.loads((folder / "tokenizer_config.json").read_text()) | {"split_special_tokens": splits}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        loaded = PreTrainedTokenizerFast.from_pretrained(str(folder))
        for tokenizer in (ModelTokenizer(folder), ModelTokenizer(folder)):  # the second one from the cache
            for text in ("ab a é漢 👩", "<s>ab</s><pad>ab <|x|> a", ""):
                for special in (True, False):
                    expected = loaded.backend_tokenizer.encode(text, add_special_tokens=special).ids
                    assert list(tokenizer.encode(text, add_special_tokens=special)) == expected
            assert tokenizer.vocab_size == len(loaded)


def test_the_cache_serves_the_files_as_they_are_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_with(tmp_path / "model", "{{ messages[0].role }}")
    assert tokenizer_files.read_tokenizer(folder).chat_template == "{{ messages[0].role }}"
    monkeypatch.setattr(tokenizer_files, "_by_transformers", lambda folder: pytest.fail("it is in the cache"))
    assert tokenizer_files.read_tokenizer(folder).chat_template == "{{ messages[0].role }}"
    monkeypatch.undo()
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "cache"))
    (folder / "chat_template.jinja").write_text("new")
    assert tokenizer_files.read_tokenizer(folder).chat_template == "new"
    for path in (tmp_path / "cache" / "tokenizers").iterdir():
        path.write_bytes(path.read_bytes()[:100])
    assert tokenizer_files.read_tokenizer(folder).chat_template == "new", "a damaged file is written again"
    assert tokenizer_files.read_tokenizer(folder).chat_template == "new"


def test_the_cache_keeps_the_newest_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_files, "MAX_FILES", 2)
    for number in range(4):
        tokenizer_files.read_tokenizer(folder_with(tmp_path / f"model-{number}", f"template {number}"))
    kept = [path.read_text() for path in (tmp_path / "cache" / "tokenizers").iterdir()]
    assert len(kept) == 2
    assert {number for number in range(4) if any(f"template {number}" in each for each in kept)} == {2, 3}


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "file"))
    folder = folder_with(tmp_path / "model", "x")
    assert ModelTokenizer(folder).has_chat_template
