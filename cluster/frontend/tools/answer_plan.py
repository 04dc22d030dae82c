"""How the answers of a chat are constrained and read, by what its model writes and its request asks for."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from cluster.frontend.text import Tokenizer, text_from
from cluster.frontend.tools.answer import Schemas
from cluster.frontend.tools.call_grammar import answer_grammar
from cluster.frontend.tools.formats import CALLS, AnswerFormat, AnswerParser, answer_format
from workers.errors import InvalidRequest
from workers.request import Grammar

LAST_TOKENS = 32  # of a prompt; where its template has begun the reasoning, they say so
NO_PARSER = (
    "cannot be called: this model's chat template has no known format of calls; leave them out, set tool_choice to "
    f"none, or serve with gateway.tool_call_parser (or --tool-call-parser): {', '.join(CALLS)}"
)


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """Which tools an answer may call. `must_call`: it has a call, and nothing besides reasoning. `is_strict`: the
    arguments of all calls match their schemas.
    """

    schemas: Schemas
    must_call: bool = False
    is_strict: bool = False
    max_calls: int | None = None


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """`make_parser`: of one answer; None: all its text is content. `grammar`: of all of it. `keep`: the special tokens
    whose text the parser needs."""

    make_parser: Callable[[], AnswerParser] | None = None
    grammar: Grammar | None = None
    keep: Collection[int] = ()


class AnswerPlanner:
    """Plans the answers of one model. `calls` and `reasoning`: its formats, as for `answer_format`."""

    def __init__(self, tokenizer: Tokenizer, calls: str, reasoning: str) -> None:
        template = tokenizer.info.get("chat_template")
        texts = template.values() if isinstance(template, dict) else [template or ""]
        self._tokenizer = tokenizer
        self._format = answer_format("\n".join(texts), calls, reasoning)

    @property
    def needs_prompt(self) -> bool:
        """Whether `plan` needs the prompt's tokens."""
        return self._format.reasoning is not None

    @property
    def reads_calls(self) -> bool:
        """Whether the model can call tools."""
        return self._format.calls is not None

    def plan(self, tools: ToolRequest | None, wanted: Grammar | None, prompt: Sequence[int] = ()) -> AnswerPlan:
        """`wanted`: of the content; JSON comes behind reasoning, or a tool call comes instead of it.

        Raises `InvalidRequest` for tools that this model cannot call.
        """
        form, reasoning = self._format, self._format.reasoning
        if tools is None:
            form, tools = AnswerFormat(None, reasoning), ToolRequest({})
        elif form.calls is None:
            raise InvalidRequest("tools", NO_PARSER)
        if form.calls is None and reasoning is None:
            return AnswerPlan()
        is_reasoning = reasoning is not None and reasoning.is_open(text_from(self._tokenizer, prompt[-LAST_TOKENS:]))
        ids = self._tokenizer.special_ids
        special = {each: ids[each] for each in form.markers if each in ids}
        parser = partial(AnswerParser, form, tools.schemas, is_reasoning=is_reasoning, max_calls=tools.max_calls)
        content = wanted.text if wanted is not None and wanted.kind == "json" else None
        grammar = None
        if tools.must_call or tools.is_strict or content is not None:
            grammar = answer_grammar(
                form,
                tools.schemas,
                special,
                is_reasoning=is_reasoning,
                is_single=tools.max_calls == 1,
                content=None if tools.must_call else content or "",
            )
        return AnswerPlan(parser, grammar, special.values())
