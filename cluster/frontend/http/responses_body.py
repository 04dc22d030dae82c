"""The body of OpenAI's responses API, read as the body of a chat, and the conversations that it may continue. Pure.

instructions                            ──> the first message
input, after what `previous_response_id` has: message, function_call, function_call_output, reasoning
                                        ──> messages, tool_calls, messages of role tool, reasoning_content
tools, tool_choice, text, reasoning     ──> those of a chat
"""

import json
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from cluster.frontend.http.bodies import FirstError
from cluster.frontend.http.chat_body import ChatBody, ChatLike, Item, part_text
from cluster.frontend.http.fields import refuse_others
from cluster.frontend.tools.json_calls import SURROGATE
from workers.errors import InvalidRequest
from workers.request import SamplingParams

TYPES = ("message", "function_call", "function_call_output", "reasoning")
TEXTS = ("input_text", "output_text", "reasoning_text", "text")
MAX_RESPONSES = 1024
MAX_BYTES = 64 << 20
History = tuple[bytes, ...]  # lists of items, as JSON


class ResponsesBody(ChatLike):
    """POST /v1/responses."""

    chat_names: ClassVar[Mapping[str, str]] = {
        r"^(tools\[\d+\]|tool_choice)\.function": r"\1",
        r"\.tool_calls\[\d+\](\.function)?": "",
        r"\.tool_call_id$": ".call_id",
        r"^response_format(\.json_schema)?": "text.format",
        "^reasoning_effort$": "reasoning.effort",
    }
    renamed: ClassVar[Mapping[str, str]] = {
        **{"prompt": "input", "prompt.chat": "input"},
        "sampling.max_tokens": "max_output_tokens",
    }
    passing: ClassVar[Collection[str]] = ("user", "prompt_cache_retention", "service_tier", "include", "stream_options")
    limited: ClassVar[Mapping[str, Any]] = {"truncation": "disabled", "background": False, "top_logprobs": 0}

    input: str | Annotated[list[Item], FirstError()]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: Item | None = None
    reasoning: Item | None = None
    truncation: str | None = None
    background: bool | None = None
    # These do not influence the answer; the response repeats them.
    max_tool_calls: int | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def items(self) -> list[Item]:
        return [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input

    def repeated(self, sampling: SamplingParams) -> Item:
        """Fields that the response has, too: what was asked for, or what was used instead. Raises `InvalidRequest`."""
        names = ("instructions", "previous_response_id", "max_output_tokens", "max_tool_calls", "reasoning")
        found = {
            **{name: getattr(self, name) for name in (*names, "safety_identifier", "prompt_cache_key")},
            **{name: getattr(sampling, name) for name in ("temperature", "top_p")},
            **{name: getattr(sampling, name) for name in ("presence_penalty", "frequency_penalty")},
            "tools": [{"description": None, "strict": None, **each} for each in self.tools or ()],
            "tool_choice": self.tool_choice or "auto",
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "text": self.text or {"format": {"type": "text"}},
            "store": self.store is not False,
            "metadata": self.metadata or {},
            "truncation": "disabled",
            "background": False,
            "top_logprobs": 0,
            "service_tier": "default",
        }
        for name, value in found.items():
            if SURROGATE.search(json.dumps(value, ensure_ascii=False)):
                raise InvalidRequest(name, "has half a surrogate pair, which a response cannot repeat; leave it out")
        return found

    def chat_after(self, history: Sequence[Item]) -> ChatBody:
        """This request as a chat, behind these items of the conversation. Raises `InvalidRequest`."""
        for name, value in self.limited.items():
            if getattr(self, name) not in (None, value):
                raise InvalidRequest(name, f"is not supported; leave it out, or send {json.dumps(value)}")
        messages = [("instructions", {"role": "system", "content": self.instructions})] if self.instructions else []
        messages += _messages([*((f"previous_response_id: item {at}", each) for at, each in enumerate(history)),
                               *((f"input[{at}]", each) for at, each in enumerate(self.items))])  # fmt: skip
        return self.as_chat(
            messages,
            max_tokens=self.max_output_tokens,
            tools=None if self.tools is None else [_tool(*each) for each in enumerate(self.tools)],
            tool_choice=_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=_format(self.text),
            reasoning_effort=_effort(self.reasoning),
        )


def _messages(items: Sequence[tuple[str, Any]]) -> Iterator[tuple[str, Item]]:
    """Each message of the chat, and the path of the item that it begins with.

    Reasoning, text and calls in a row are one message of the assistant.
    """
    said: Item = {}
    began = ""
    for where, item in items:
        if not isinstance(item, dict):
            raise InvalidRequest(where, "must be an object")
        part = _assistant_part(where, item)
        if said and not _follows(said, part):
            yield began, {"role": "assistant", "content": "", **said}
            said = {}
        if part is None:
            yield where, _other(where, item)
            continue
        began = began if said else where
        if calls := part.pop("tool_calls", []):
            said.setdefault("tool_calls", []).extend(calls)
        said |= part
    if said:
        yield began, {"role": "assistant", "content": "", **said}


def _follows(said: Item, part: Item | None) -> bool:
    """Whether the part belongs to the same message: reasoning, then text, then calls."""
    if part is None or said.keys() & part.keys() - {"tool_calls"}:
        return False
    return "tool_calls" in part or "tool_calls" not in said


def _assistant_part(where: str, item: Item) -> Item | None:
    match item.get("type", "message"):
        case "message" if item.get("role") == "assistant":
            refuse_others(where, item, {"type", "role", "content", "id", "status", "phase"})
            return {"content": _text(f"{where}.content", item.get("content"))}
        case "reasoning":
            refuse_others(where, item, {"type", "content", "summary", "id", "status"})
            return {"reasoning_content": _text(f"{where}.content", item.get("content") or "")}
        case "function_call":
            refuse_others(where, item, {"type", "call_id", "name", "arguments", "id", "status"})
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            return {"tool_calls": [{"id": item.get("call_id"), "type": "function", "function": function}]}
    return None


def _other(where: str, item: Item) -> Item:
    kind = item.get("type", "message")
    if kind == "function_call_output":
        refuse_others(where, item, {"type", "call_id", "output", "id", "status"})
        return {
            "role": "tool",
            "tool_call_id": item.get("call_id"),
            "content": _text(f"{where}.output", item.get("output")),
        }
    if kind != "message":
        raise InvalidRequest(f"{where}.type", f"is {str(kind)[:40]!r}; only {', '.join(TYPES)} are supported")
    refuse_others(where, item, {"type", "role", "content", "id", "status"})
    role = item.get("role")
    if role not in ("user", "system", "developer"):
        raise InvalidRequest(
            f"{where}.role", f"is {str(role)[:40]!r}; user, assistant, system and developer are supported"
        )
    text = _text(f"{where}.content", item.get("content"))
    return {"role": "system" if role == "developer" else role, "content": text}


def _text(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(where, "must be text or a list of parts with text")
    known = ("annotations", "logprobs")
    return "".join(part_text(f"{where}[{at}]", part, TEXTS, known) for at, part in enumerate(content))


def _tool(index: int, tool: Item) -> Item:
    where = f"tools[{index}]"
    if tool.get("type") != "function":
        raise InvalidRequest(f"{where}.type", f"is {str(tool.get('type'))[:40]!r}; only 'function' is supported")
    refuse_others(where, tool, {"type", "name", "description", "parameters", "strict"})
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _choice(given: Any) -> Any:
    if isinstance(given, dict) and given.get("type") == "function":
        refuse_others("tool_choice", given, {"type", "name"})
        return {"type": "function", "function": {"name": str(given.get("name"))}}
    return given


def _format(text: Item | None) -> Item | None:
    if not text:
        return None
    refuse_others("text", text, {"format"})
    form = text.get("format")
    if form is None:
        return None
    if not isinstance(form, dict):
        raise InvalidRequest("text.format", 'must be an object, such as {"type": "text"}')
    refuse_others("text.format", form, {"type", "name", "schema", "strict", "description"})
    if form.get("type") != "json_schema":
        return {"type": form.get("type")}
    return {"type": "json_schema", "json_schema": {"name": form.get("name"), "schema": form.get("schema")}}


def _effort(reasoning: Item | None) -> str | None:
    """A summary is not made: the reasoning itself is in the answer."""
    if not reasoning:
        return None
    refuse_others("reasoning", reasoning, {"effort", "summary"})
    effort = reasoning.get("effort")
    return None if effort is None else str(effort)


class ResponseStore:
    """The conversations that `previous_response_id` continues, in this gateway's memory.

    Bounded: the least recently used are dropped. A tenant finds only its own. Owned by the routes."""

    def __init__(self, most: int = MAX_RESPONSES, most_bytes: int = MAX_BYTES) -> None:
        self._most = most
        self._max_bytes = most_bytes
        self._kept: OrderedDict[tuple[str, str], History] = OrderedDict()
        self._bytes = 0

    def keep(self, tenant: str, name: str, history: History, new: Sequence[bytes]) -> None:
        """`history`, of an earlier response or empty, and `new` lists: the conversation up to this response's end."""
        self._kept[tenant, name] = kept = (*history, *new)
        self._bytes += size_of(kept)
        while len(self._kept) > self._most or self._bytes > self._max_bytes:
            self._bytes -= size_of(self._kept.popitem(last=False)[1])

    def history(self, tenant: str, name: str | None) -> History:
        """Raises `InvalidRequest`."""
        if name is None:
            return ()
        if (tenant, name) not in self._kept:
            why = f"{name[:80]!r} is not known to this gateway; send the whole conversation as input"
            raise InvalidRequest("previous_response_id", why)
        self._kept.move_to_end((tenant, name))
        return self._kept[tenant, name]


def size_of(history: History) -> int:
    """In bytes."""
    return sum(map(len, history))
