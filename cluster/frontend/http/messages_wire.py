"""Replies of Anthropic's messages API: a message is a list of blocks. Pure.

message_start, then for each block content_block_start, content_block_delta ..., content_block_stop; message_delta,
message_stop
"""

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from cluster.frontend.http.failures import Failure
from cluster.frontend.http.wire import Usage
from cluster.frontend.text import TextDelta, TextEnd
from cluster.frontend.tools.answer import AnswerDelta
from cluster.frontend.tools.formats import AnswerParser
from cluster.frontend.tools.json_calls import is_json
from workers.request import FinishReason


class MessagesWire:
    """One answer. Owned by its reply."""

    def __init__(self, name: str, model: str, make_parser: Callable[[], AnswerParser]) -> None:
        """`name`: of the request."""
        self._parser = make_parser()
        self._has_calls = False
        self._block = -1  # the latest one
        self._kind = ""  # of the block that is open
        self._ended: TextEnd | None = None
        self._fields: dict[str, Any] = {
            "id": f"msg_{name}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "container": None,
        }

    def answer(self, index: int, text: TextDelta, end: TextEnd) -> bytes:
        found = self._parser.push(text.text).joined(self._parser.flush())
        self._has_calls, self._ended = bool(found.calls), end
        blocks: list[Any] = []
        if found.reasoning:
            blocks.append({"type": "thinking", "thinking": found.reasoning, "signature": ""})
        if found.content:
            blocks.append({"type": "text", "text": found.content, "citations": None})
        for call in found.calls:
            is_complete = is_json(call.arguments)  # not if the answer was cut
            arguments = msgspec.Raw(call.arguments.encode()) if is_complete else {}
            blocks.append({"type": "tool_use", **_call(call.name), "input": arguments})
        return msgspec.json.encode(blocks)

    def document(self, answers: Sequence[bytes], usage: Usage) -> bytes:
        fields = self._fields | self._stopped() | {"content": msgspec.Raw(answers[0]), "usage": _usage(usage)}
        return msgspec.json.encode(fields)

    def begin(self, usage: Usage) -> bytes:
        return _event("message_start", message=self._fields | {"usage": _usage(usage)})

    def part(self, index: int, delta: TextDelta, usage: Usage) -> bytes:
        return self._blocks(self._parser.push(delta.text)) if delta.text else b""

    def end(self, index: int, end: TextEnd, usage: Usage) -> bytes:
        self._ended = end
        return self._blocks(self._parser.flush()) + self._closed()

    def last(self, usage: Usage) -> bytes:
        return _event("message_delta", delta=self._stopped(), usage=_usage(usage)) + _event("message_stop")

    def failed(self, failure: Failure) -> bytes:
        return b"event: error\ndata: " + failure.messages_body + b"\n\n"

    def _blocks(self, delta: AnswerDelta) -> bytes:
        """Events for what an answer has more. Reasoning precedes text, and text precedes calls."""
        events = []
        if delta.reasoning:
            events.append(self._opened("thinking", thinking="", signature=""))
            events.append(self._delta(type="thinking_delta", thinking=delta.reasoning))
        if delta.content:
            events.append(self._opened("text", text="", citations=None))
            events.append(self._delta(type="text_delta", text=delta.content))
        for call in delta.calls:
            if call.name:
                self._has_calls = True
                events.append(self._closed() + self._opened("tool_use", **_call(call.name), input={}))
            if call.arguments:
                events.append(self._delta(type="input_json_delta", partial_json=call.arguments))
        return b"".join(events)

    def _opened(self, kind: str, **fields: Any) -> bytes:
        """A block of this kind, unless it is open."""
        if self._kind == kind:
            return b""
        closed = self._closed()
        self._kind = kind
        self._block += 1
        return closed + _event("content_block_start", index=self._block, content_block={"type": kind, **fields})

    def _delta(self, **fields: Any) -> bytes:
        return _event("content_block_delta", index=self._block, delta=fields)

    def _closed(self) -> bytes:
        if not self._kind:
            return b""
        self._kind = ""
        return _event("content_block_stop", index=self._block)

    def _stopped(self) -> dict[str, Any]:
        assert self._ended is not None, "the answer has ended"
        if self._ended.finish is FinishReason.LENGTH:
            reason = "max_tokens"
        elif self._ended.stop:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if self._has_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": self._ended.stop or None}


def _usage(usage: Usage) -> dict[str, Any]:
    cached = usage.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "output_tokens": usage.completion_tokens,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        **dict.fromkeys(("cache_creation", "inference_geo", "output_tokens_details", "server_tool_use")),
        "service_tier": "standard",
    }


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode({"type": kind, **fields}) + b"\n\n"


def _call(name: str) -> dict[str, Any]:
    return {"id": f"toolu_{secrets.token_hex(12)}", "name": name, "caller": {"type": "direct"}}
