"""Replies of OpenAI's responses API: a response is a list of items, which are reasoning, messages and calls. Pure."""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from cluster.frontend.http.chat_body import Item
from cluster.frontend.http.failures import Failure
from cluster.frontend.http.wire import Usage
from cluster.frontend.text import TextDelta, TextEnd
from cluster.frontend.tools.answer import AnswerDelta
from cluster.frontend.tools.formats import AnswerParser
from workers.request import FinishReason

PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
PARTS = {"reasoning": "reasoning_text", "message": "output_text"}  # also the names of their events


class ResponsesWire:
    """One response. Owned by its reply. `keep` gets the items when it has ended."""

    def __init__(
        self,
        name: str,
        model: str,
        asked: Mapping[str, Any],
        make_parser: Callable[[], AnswerParser],
        keep: Callable[[list[Item]], None],
    ) -> None:
        """`name`: of the response. `asked`: fields of the request that it repeats."""
        self._parser = make_parser()
        self._keep = keep
        self._number = 0  # of the next event
        self._output: list[Item] = []  # the last one may be open
        self._pieces: list[str] = []  # of the open item's text
        self._is_open = False
        self._is_cut = False
        self._fields: dict[str, Any] = {
            "id": name,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "incomplete_details": None,
            **asked,
        }

    # ---- whole ---------------------------------------------------------------------------------------------------

    def answer(self, index: int, text: TextDelta, end: TextEnd) -> bytes:
        """The events are made, and dropped: what they build is the document's."""
        self._add(self._parser.push(text.text).joined(self._parser.flush()))
        self._close(end)
        return b""

    def document(self, answers: Sequence[bytes], usage: Usage) -> bytes:
        self._keep(self._output)
        return msgspec.json.encode(self._response(usage))

    # ---- events --------------------------------------------------------------------------------------------------

    def begin(self, usage: Usage) -> bytes:
        begun = self._response(None)
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def part(self, index: int, delta: TextDelta, usage: Usage) -> bytes:
        return self._add(self._parser.push(delta.text)) if delta.text else b""

    def end(self, index: int, end: TextEnd, usage: Usage) -> bytes:
        return self._add(self._parser.flush()) + self._close(end)

    def last(self, usage: Usage) -> bytes:
        self._keep(self._output)
        response = self._response(usage)
        return self._event(f"response.{response['status']}", response=response)

    def failed(self, failure: Failure) -> bytes:
        code = "rate_limit_exceeded" if failure.status == 429 else "server_error"
        error = {"code": code, "message": failure.message}
        return self._event("response.failed", response=self._response(None) | {"status": "failed", "error": error})

    def _response(self, usage: Usage | None) -> dict[str, Any]:
        """`usage` None: it is in progress."""
        status = "in_progress" if usage is None else "incomplete" if self._is_cut else "completed"
        details = {"reason": "max_output_tokens"} if self._is_cut else None
        return self._fields | {
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": details,
            "output": self._output,
            "usage": None if usage is None else _usage(usage),
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = msgspec.json.encode({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"

    # ---- items ---------------------------------------------------------------------------------------------------

    def _add(self, delta: AnswerDelta) -> bytes:
        """What an answer has more. Reasoning precedes text, and text precedes calls."""
        events = []
        if delta.reasoning:
            events.append(self._open("reasoning", summary=[], content=[]) + self._more(delta.reasoning))
        if delta.content:
            events.append(self._open("message", role="assistant", content=[]) + self._more(delta.content))
        for call in delta.calls:
            if call.name:
                named = {"call_id": _id("call"), "name": call.name, "arguments": ""}
                events.append(self._done("completed") + self._open("function_call", **named))
            if call.arguments:
                events.append(self._more(call.arguments))
        return b"".join(events)

    def _open(self, kind: str, **fields: Any) -> bytes:
        """An item of this kind, unless it is open."""
        if self._is_open and self._output[-1]["type"] == kind:
            return b""
        events = self._done("completed")
        item = {"id": _id(PREFIXES[kind]), "type": kind, "status": "in_progress", **fields}
        self._output.append(item)
        self._is_open = True
        events += self._event("response.output_item.added", output_index=len(self._output) - 1, item=item)
        if kind in PARTS:
            events += self._event("response.content_part.added", **self._place(), part=_part(kind, ""))
        return events

    def _more(self, text: str) -> bytes:
        self._pieces.append(text)
        kind = self._output[-1]["type"]
        if kind not in PARTS:
            place = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}
            return self._event("response.function_call_arguments.delta", **place, delta=text)
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        return self._event(f"response.{PARTS[kind]}.delta", **self._place(), delta=text, **more)

    def _done(self, status: str) -> bytes:
        """The open item ends, if there is one."""
        if not self._is_open:
            return b""
        self._is_open = False
        item, text = self._output[-1], "".join(self._pieces)
        self._pieces.clear()
        kind, place = item["type"], self._place()
        if kind in PARTS:
            more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            part = _part(kind, text)
            events = self._event(f"response.{PARTS[kind]}.done", **place, text=text, **more)
            events += self._event("response.content_part.done", **place, part=part)
            item |= {"content": [part]}
        else:
            item |= {"arguments": text}
            del place["content_index"]
            name = item["name"]
            events = self._event("response.function_call_arguments.done", **place, name=name, arguments=text)
        item |= {"status": status}
        return events + self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _close(self, end: TextEnd) -> bytes:
        self._is_cut = end.finish is FinishReason.LENGTH
        return self._done("incomplete" if self._is_cut else "completed")

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1, "content_index": 0}


def _part(kind: str, text: str) -> Item:
    more: Item = {"annotations": [], "logprobs": []} if kind == "message" else {}
    return {"type": PARTS[kind], "text": text, **more}


def _usage(usage: Usage) -> dict[str, Any]:
    """Reasoning is not counted apart."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
