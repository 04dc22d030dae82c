"""The body of Anthropic's messages API, read as the body of a chat. Pure.

system, messages with blocks        ──> messages
text, tool_use, thinking            ──> an assistant's content, tool_calls, reasoning_content
tool_result                         ──> a message of role tool
tools, tool_choice, stop_sequences  ──> tools, tool_choice and parallel_tool_calls, stop
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar

from cluster.frontend.http.bodies import NOTHING, FirstError
from cluster.frontend.http.chat_body import ChatBody, ChatLike, part_text
from cluster.frontend.http.fields import refuse_others
from workers.errors import InvalidRequest

IGNORED = {"cache_control", "citations", "caller"}  # of a block: they do not influence the answer
CHOICES: Mapping[str, str] = {"auto": "auto", "any": "required", "none": "none"}


class MessagesBody(ChatLike):
    """POST /v1/messages."""

    chat_names: ClassVar[Mapping[str, str]] = {
        r"^(tools\[\d+\]|tool_choice)\.function": r"\1",
        r"\.parameters": ".input_schema",
        r"\.tool_call_id$": ".tool_use_id",
        r"^response_format(\.json_schema)?": "output_config.format",
    }
    renamed: ClassVar[Mapping[str, str]] = {
        "sampling.stop": "stop_sequences",
        "chat_template_kwargs.enable_thinking": "thinking",
    }
    passing: ClassVar[Collection[str]] = ("metadata", "service_tier", "inference_geo", "cache_control")
    needs_max_tokens: ClassVar[bool] = True

    messages: Annotated[list[dict[str, Any]], FirstError()]
    max_tokens: int | None = None
    system: str | Annotated[list[dict[str, Any]], FirstError()] | None = None
    stop_sequences: Annotated[list[str], FirstError()] | None = None
    top_k: int | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None

    @cached_property
    def chat(self) -> ChatBody:
        """The same request as a chat. Raises `InvalidRequest`."""
        if self.max_tokens is None and self.needs_max_tokens:
            raise InvalidRequest("max_tokens", "is missing; give the most tokens that an answer may have")
        messages = [("system", each) for each in _system(self.system)]
        messages += _messages(self.messages)
        choice, parallel = _choice(self.tool_choice)
        return self.as_chat(
            messages,
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            top_k=self.top_k,
            tools=None if self.tools is None else [_tool(*each) for each in enumerate(self.tools)],
            tool_choice=choice,
            parallel_tool_calls=parallel,
            response_format=_format(self.output_config),
            **_thinking(self.thinking),
        )


class CountTokensBody(MessagesBody):
    """POST /v1/messages/count_tokens."""

    needs_max_tokens: ClassVar[bool] = False


def _system(given: str | list[dict[str, Any]] | None) -> Iterator[dict[str, Any]]:
    if given:
        text = given if isinstance(given, str) else "\n\n".join(_text(f"system[{at}]", b) for at, b in enumerate(given))
        yield {"role": "system", "content": text}


def _messages(given: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each message of the chat, and the path of what it is made from."""
    for index, message in enumerate(given):
        where = f"messages[{index}]"
        role, content = message.get("role"), message.get("content")
        refuse_others(where, message, {"role", "content"})
        if role not in ("user", "assistant"):
            raise InvalidRequest(f"{where}.role", f"is {str(role)[:40]!r}; user and assistant are supported")
        if isinstance(content, str):
            yield where, {"role": role, "content": content}
        elif not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
            raise InvalidRequest(f"{where}.content", "must be text or a list of blocks")
        elif role == "user":
            yield from _user(where, content)
        else:
            yield where, _assistant(where, content)
    if given and given[-1].get("role") == "assistant":
        raise InvalidRequest(f"messages[{len(given) - 1}]", "is the assistant's; an answer cannot continue it")


def _user(where: str, blocks: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Results first, as templates expect them behind their calls."""
    texts = []
    for at, block in enumerate(blocks):
        here = f"{where}.content[{at}]"
        if block.get("type") != "tool_result":
            texts.append(_text(here, block))
            continue
        refuse_others(here, block, {"type", "tool_use_id", "content", "is_error", *IGNORED})
        content = block.get("content") or ""
        if not isinstance(content, str | list):
            raise InvalidRequest(f"{here}.content", "must be text or a list of blocks with text")
        if isinstance(content, list):
            content = "".join(_text(f"{here}.content[{number}]", each) for number, each in enumerate(content))
        yield here, {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}
    if texts or not blocks:
        yield where, {"role": "user", "content": "".join(texts)}


def _assistant(where: str, blocks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for at, block in enumerate(blocks):
        here = f"{where}.content[{at}]"
        match block.get("type"):
            case "tool_use":
                refuse_others(here, block, {"type", "id", "name", "input", *IGNORED})
                function = {"name": block.get("name"), "arguments": block.get("input") or {}}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "thinking":
                refuse_others(here, block, {"type", "thinking", "signature", *IGNORED})
                thoughts.append(str(block.get("thinking") or ""))
            case _:
                texts.append(_text(here, block))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    message |= {"reasoning_content": "".join(thoughts)} if thoughts else {}
    return message | ({"tool_calls": calls} if calls else {})


def _text(where: str, block: Any) -> str:
    return part_text(where, block, ("text",), IGNORED)


def _tool(index: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    where = f"tools[{index}]"
    if tool.get("type") not in (None, "custom"):
        raise InvalidRequest(f"{where}.type", f"is {str(tool['type'])[:40]!r}; only custom tools are supported")
    refuse_others(where, tool, {"type", "name", "description", "input_schema", "strict", *IGNORED})
    renamed = {"name": "name", "description": "description", "input_schema": "parameters", "strict": "strict"}
    return {"type": "function", "function": {ours: tool[theirs] for theirs, ours in renamed.items() if theirs in tool}}


def _choice(given: Mapping[str, Any] | None) -> tuple[Any, bool | None]:
    """`tool_choice` and `parallel_tool_calls` of a chat."""
    if given is None:
        return None, None
    kind = given.get("type")
    refuse_others("tool_choice", given, {"type", "name", "disable_parallel_tool_use"})
    parallel = False if given.get("disable_parallel_tool_use") else None
    if kind == "tool":
        return {"type": "function", "function": {"name": str(given.get("name"))}}, parallel
    if not isinstance(kind, str) or kind not in CHOICES:
        raise InvalidRequest("tool_choice.type", f"is {str(kind)[:40]!r}; auto, any, tool and none are supported")
    return CHOICES[kind], parallel


def _thinking(given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The fields of a chat for it."""
    if given is None:
        return NOTHING
    refuse_others("thinking", given, {"type", "budget_tokens", "display"})
    match given.get("type"):
        case "enabled":
            return {"chat_template_kwargs": {"enable_thinking": True}}
        case "disabled":
            return {"reasoning_effort": "none"}  # passes where a template knows no reasoning
        case "adaptive":
            return NOTHING
        case kind:
            why = f"is {str(kind)[:40]!r}; enabled, adaptive and disabled are supported"
            raise InvalidRequest("thinking.type", why)


def _format(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if not given:
        return None
    refuse_others("output_config", given, {"format"})
    form = given.get("format")
    if form is None:
        return None
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        raise InvalidRequest("output_config.format", "must be of type json_schema")
    refuse_others("output_config.format", form, {"type", "schema"})
    return {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
