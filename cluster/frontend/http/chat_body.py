"""The body of a chat, of what is tokenized as one, and what bodies of other APIs that are read as one have in common.

Pure; as `cluster.frontend.http.bodies`.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar

from cluster.frontend.http.bodies import Body, BodyPart, CompletionBody, FirstError, Generation
from cluster.frontend.http.fields import MESSAGE_FIELDS, check_off, refuse_others
from cluster.frontend.http.structured import grammar_from
from cluster.frontend.http.tool_fields import CallHistory, tool_request
from cluster.frontend.text import ChatPrompt, RawPrompt, TextPrompt, check_depth
from cluster.frontend.tools.answer_plan import ToolRequest
from workers.errors import InvalidRequest

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
EFFORT_NAME = {"chat_template_kwargs.reasoning_effort": "reasoning_effort"}
Item = dict[str, Any]
SAME = ("model", "stream", "temperature", "top_p")  # names and meaning are those of a chat


class TextPart(BodyPart):
    type: str
    text: str | None = None


class ChatMessage(BodyPart):
    """`name` is not passed to the chat template; a tool's message has the name of the tool instead."""

    off = MESSAGE_FIELDS

    role: str
    content: str | Annotated[list[TextPart], FirstError()] | None = None
    name: str | None = None
    tool_calls: Any = None
    tool_call_id: Any = None
    reasoning_content: str | None = None


class ChatBody(Generation):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], FirstError()]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[dict[str, Any]], FirstError()] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def client_names(self) -> Mapping[str, str]:
        tokens = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        names = {"prompt": "messages", "sampling.max_tokens": tokens, "sampling.logprobs": "top_logprobs"}
        return {"sampling.grammar": "tools", **super().client_names, **names, **EFFORT_NAME}

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs", "is given without logprobs; set logprobs to true")
        return (self.top_logprobs or 0) if self.logprobs else None

    def prompts(self) -> list[RawPrompt]:
        return self._prompts

    @cached_property
    def _prompts(self) -> list[RawPrompt]:
        return [_chat_prompt(self, [] if self.tool_request is None else self.tools)]

    @cached_property
    def tool_request(self) -> ToolRequest | None:
        """None: the answer calls no tools, and the model sees none. Raises `InvalidRequest`."""
        asked, wanted = tool_request(self.tools, self.tool_choice, self.parallel_tool_calls), grammar_from(vars(self))
        if asked is not None and wanted is not None and wanted[1].kind != "json":
            raise InvalidRequest(wanted[0], "leaves no room for a tool call; leave it out, or set tool_choice to none")
        return asked


class TokenizeBody(Body):
    """POST /tokenize: a text or messages, tokenized as a completion or a chat would.

    Accepts the body of a completion or a chat too, and ignores its other fields.
    """

    harmless: ClassVar[str] = "Ignored: the body of a completion or a chat is accepted too."

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], FirstError()] | None = None
    tools: Annotated[list[dict[str, Any]], FirstError()] | None = None
    tool_choice: Any = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    @classmethod
    def known_fields(cls) -> Collection[str]:
        return {*cls.model_fields, *CompletionBody.model_fields, *ChatBody.model_fields}

    @property
    def client_names(self) -> Mapping[str, str]:
        return {} if self.messages is None else {"prompt": "messages", **EFFORT_NAME}

    def input(self) -> RawPrompt:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("prompt", "or messages is needed, and not both")
        if self.prompt is not None:
            return TextPrompt(self.prompt, self.add_special_tokens is not False)
        asked = tool_request(self.tools, self.tool_choice, None)  # refuses what a chat would
        return _chat_prompt(self, [] if asked is None else self.tools)


def _chat_prompt(body: ChatBody | TokenizeBody, tools: list[dict[str, Any]] | None) -> ChatPrompt:
    if body.add_special_tokens:
        raise InvalidRequest("add_special_tokens", "is not supported with messages; the chat template has them")
    messages = tuple((each.role, _content(index, each)) for index, each in enumerate(body.messages or ()))
    fields = _message_fields(body.messages or ())
    for index, tool in enumerate(tools or ()):
        check_depth(f"tools[{index}]", tool)
    check_depth("chat_template_kwargs", body.chat_template_kwargs)
    variables = json.dumps(_variables(body)) if _variables(body) else ""
    return ChatPrompt(messages, tuple(map(json.dumps, tools or ())), variables, fields)


def _variables(body: ChatBody | TokenizeBody) -> dict[str, Any]:
    """Of the chat template."""
    effort = body.reasoning_effort
    if effort is None:
        return body.chat_template_kwargs or {}
    if effort not in EFFORTS:
        raise InvalidRequest("reasoning_effort", f"{effort[:40]!r} is not supported; {', '.join(EFFORTS)} are")
    return {"reasoning_effort": effort, **(body.chat_template_kwargs or {})}


def _message_fields(messages: Sequence[ChatMessage]) -> tuple[str, ...]:
    """As `ChatPrompt.message_fields`."""
    calls, found = CallHistory(), []
    for index, message in enumerate(messages):
        fields = calls.read(
            index, message.role, {"tool_calls": message.tool_calls, "tool_call_id": message.tool_call_id}
        )
        if message.reasoning_content:
            fields["reasoning_content"] = message.reasoning_content
        found.append(fields)
    return tuple(map(json.dumps, found)) if any(found) else ()


def _content(index: int, message: ChatMessage) -> str:
    check_off(f"messages[{index}]", message.model_extra or {}, MESSAGE_FIELDS)
    where = f"messages[{index}].content"
    if message.content is None and message.role != "assistant":
        raise InvalidRequest(where, "is missing; give text, which may be empty")
    if not isinstance(message.content, list):
        return message.content or ""
    for part in message.content:
        if part.type != "text" or part.text is None:
            raise InvalidRequest(where, f"has a part of type {part.type[:40]!r}; only parts with text are supported")
        if part.model_extra:
            raise InvalidRequest(f"{where}.{next(iter(part.model_extra))[:64]}", "is unknown; leave it out")
    return "".join(part.text or "" for part in message.content)


class ChatLike(Body):
    chat_names: ClassVar[Mapping[str, str]]  # patterns in the paths of a chat's fields, and what this API has there
    renamed: ClassVar[Mapping[str, str]]  # as `client_names`, where that differs
    passing: ClassVar[Collection[str]]  # fields that do not influence the answer

    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: Annotated[list[Item], FirstError()] | None = None

    @classmethod
    def known_fields(cls) -> Collection[str]:
        return {*cls.model_fields, *cls.passing}

    def as_chat(self, messages: Sequence[tuple[str, Item]], **more: Any) -> ChatBody:
        """`messages`: with the path of what each is made from. `more`: fields of the chat. Raises `InvalidRequest`."""
        more |= {name: getattr(self, name) for name in SAME} | {"messages": [message for _, message in messages]}
        chat = TranslatedChat.model_validate(more)
        chat._api = type(self)
        try:
            _ = chat.tool_request, chat.prompts()
        except InvalidRequest as error:
            raise InvalidRequest(self.client_path(error.field, [path for path, _ in messages]), error.message) from None
        return chat

    @classmethod
    def client_path(cls, field: str, paths: Sequence[str] = ()) -> str:
        """The client's name of a field of the chat. `paths`: of what its messages are made from."""
        if paths and (found := re.match(r"messages\[(\d+)\]", field)):
            field = paths[int(found[1])] + field[found.end() :]
        for pattern, theirs in cls.chat_names.items():
            field = re.sub(pattern, theirs, field)
        return field


class TranslatedChat(ChatBody):
    """A chat whose errors name the fields of the body that it was read from."""

    _api: type[ChatLike]

    @property
    def client_names(self) -> Mapping[str, str]:
        renamed = {ours: self._api.client_path(theirs) for ours, theirs in super().client_names.items()}
        return {**renamed, **self._api.renamed}

    def _client_name(self, field: str) -> str:
        return self._api.client_path(super()._client_name(field))


def part_text(where: str, part: Any, types: Collection[str], known: Collection[str]) -> str:
    """The text of a part of a message. `known`: its other fields. Raises `InvalidRequest`."""
    kind = part.get("type") if isinstance(part, dict) else part
    if not isinstance(part, dict) or kind not in types or not isinstance(part.get("text"), str):
        raise InvalidRequest(where, f"is of type {str(kind)[:40]!r}; only text is supported here")
    refuse_others(where, part, {"type", "text", *known})
    return str(part["text"])
