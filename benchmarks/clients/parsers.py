"""Our parsers of answers for canitoolcall, which replays what models wrote. Runs in its environment.

A token is a character, so that answers are cut at more places than a tokenizer would cut them.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from canitoolcall.adapters.base import Adapter, ReplayInput, Support
from canitoolcall.results import ParseResult, StreamAccumulator

from cluster.frontend.tools.formats import CALLS, REASONING, AnswerFormat, AnswerParser

# By family: tool calls and reasoning.
FORMATS = {
    "deepseek": ("deepseek_v3", "deepseek_r1"),
    "gemma4": ("gemma4", "gemma4"),
    "glm": ("glm45", "glm45"),
    "gpt-oss": ("openai", "openai_gptoss"),
    "llama": ("llama3_json", "none"),
    "mistral": ("mistral", "mistral"),
    "qwen3-hermes": ("hermes", "qwen3"),
    "qwen3-xml": ("qwen3_coder", "qwen3"),
}
OTHER_CALLS = {"DeepSeek-V3.1": "deepseek_v31", "Llama-4": "pythonic"}  # by a part of the model's name
UNSUPPORTED = ("DeepSeek-V3.2", "DeepSeek-V4")


class Diptych(Adapter):  # type: ignore[misc]  # untyped where the library is not installed
    name = "diptych"
    pinned_version = "0.1.0"

    def version(self) -> str:
        return self.pinned_version

    def supports(self, family: str, model: str) -> Support:
        return Support(family in FORMATS and not any(each in model for each in UNSUPPORTED), "no parser")

    def parser_config(self, raw: ReplayInput) -> dict[str, Any]:
        calls, reasoning = FORMATS[raw.family]
        other = next((name for part, name in OTHER_CALLS.items() if part in raw.model), calls)
        return {"calls": other, "reasoning": reasoning}

    def units(self, raw: ReplayInput) -> list[int]:
        return list(map(ord, raw.text))

    def parse(self, raw: ReplayInput, tools: Sequence[Mapping[str, Any]]) -> ParseResult:
        return self._parsed(raw, tools, [raw.text])

    def parse_stream(
        self, raw: ReplayInput, chunks: Sequence[Sequence[int]], tools: Sequence[Mapping[str, Any]]
    ) -> ParseResult:
        return self._parsed(raw, tools, ("".join(map(chr, chunk)) for chunk in chunks))

    def _parsed(self, raw: ReplayInput, tools: Sequence[Mapping[str, Any]], pieces: Iterable[str]) -> ParseResult:
        names = self.parser_config(raw)
        reasoning = REASONING.get(names["reasoning"])
        form = AnswerFormat(CALLS[names["calls"]] if tools else None, reasoning)
        schemas = {each["function"]["name"]: each["function"].get("parameters") or {} for each in tools}
        is_reasoning = reasoning is not None and reasoning.is_open(raw.generation_prompt or "")
        parser, found = AnswerParser(form, schemas, is_reasoning=is_reasoning), StreamAccumulator()
        for delta in (*map(parser.push, pieces), parser.flush()):
            found.add_content(delta.content)
            found.add_reasoning(delta.reasoning)
            for call in delta.calls:
                found.add_tool_call(call.index, call.name, call.arguments)
        return found.result()
