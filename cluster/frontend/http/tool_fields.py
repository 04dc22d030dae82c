"""`tools`, `tool_choice` and `parallel_tool_calls`, and the calls and results in messages. Pure."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.frontend.http.fields import refuse_others
from cluster.frontend.text import check_depth
from cluster.frontend.tools.answer import Schemas
from cluster.frontend.tools.answer_plan import ToolRequest
from workers.errors import InvalidRequest

MAX_TOOLS = 128  # OpenAI's limit
MAX_TOOLS_BYTES = 256 << 10
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
TOOL_FIELDS, FUNCTION_FIELDS = {"type", "function"}, {"name", "description", "parameters", "strict"}
CHOICES = "none, auto, required and {'type': 'function', 'function': {'name': ...}}"
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def tool_request(tools: Sequence[Mapping[str, Any]] | None, choice: Any, parallel: bool | None) -> ToolRequest | None:
    """None: the answer calls no tools. Raises `InvalidRequest`."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice", "asks for a call, but there are no tools; send tools, or leave it out")
        return None
    schemas = _schemas(tools)
    is_strict = any(tool["function"].get("strict") is True for tool in tools)
    max_calls = 1 if parallel is False else None
    match choice:
        case "none":
            return None
        case None | "auto":
            return ToolRequest(schemas, is_strict=is_strict, max_calls=max_calls)
        case "required":
            return ToolRequest(schemas, must_call=True, max_calls=max_calls)
        case {"type": "function", "function": {"name": str(name), **rest}, **more} if not rest and not more:
            if name not in schemas:
                raise InvalidRequest(
                    "tool_choice.function.name", f"{name[:64]!r} is none of the tools; name one of them"
                )
            return ToolRequest({name: schemas[name]}, must_call=True, max_calls=1)
    raise InvalidRequest("tool_choice", f"is not supported; {CHOICES} are")


def _schemas(tools: Sequence[Mapping[str, Any]]) -> Schemas:
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest("tools", f"has {len(tools)} tools; a request has at most {MAX_TOOLS}")
    schemas: dict[str, Any] = {}
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        check_depth(where, tool)
        if tool.get("type") != "function":
            raise InvalidRequest(f"{where}.type", f"is {str(tool.get('type'))[:40]!r}; only 'function' is supported")
        function = tool.get("function")
        if not isinstance(function, dict):
            raise InvalidRequest(f"{where}.function", "is missing; give an object with name and parameters")
        refuse_others(where, tool, TOOL_FIELDS)
        name = _name(f"{where}.function.name", function)
        refuse_others(f"{where}.function", function, FUNCTION_FIELDS)
        if name in schemas:
            raise InvalidRequest(f"{where}.function.name", f"{name!r} is the name of another tool; rename one")
        for field, kind, wanted in (("parameters", dict, "a JSON schema"), ("strict", bool, "true or false")):
            if not isinstance(function.get(field), kind | None):
                raise InvalidRequest(f"{where}.function.{field}", f"must be {wanted}")
        if not isinstance(function.get("description"), str | None):
            raise InvalidRequest(f"{where}.function.description", "must be text")
        schemas[name] = parameters = function.get("parameters") or NO_PARAMETERS
        if parameters.get("type", "object") != "object":
            raise InvalidRequest(f"{where}.function.parameters.type", "must be object: arguments have names")
    if (size := len(json.dumps(tools))) > MAX_TOOLS_BYTES:
        raise InvalidRequest("tools", f"have {size} bytes; a request has at most {MAX_TOOLS_BYTES}")
    return schemas


def _name(where: str, function: Mapping[str, Any]) -> str:
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InvalidRequest(where, "must be 1 to 64 letters, digits, '_', '-' and '.'")
    return name


class CallHistory:
    """Reads the calls and results of a conversation, message by message: a result must belong to an earlier call."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # of tools, by the ids of their calls

    def read(self, index: int, role: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """What the chat template gets besides role and content. Raises `InvalidRequest`."""
        where = f"messages[{index}]"
        calls, call_id = fields.get("tool_calls"), fields.get("tool_call_id")
        if role != "assistant" and calls:
            raise InvalidRequest(
                f"{where}.tool_calls", f"are in a message of role {role[:40]!r}; only an assistant calls"
            )
        if role != "tool" and call_id:
            raise InvalidRequest(f"{where}.tool_call_id", f"is in a message of role {role[:40]!r}; only tools answer")
        if role == "tool":
            return self._result(f"{where}.tool_call_id", call_id)
        if not calls:
            return {}
        if not isinstance(calls, list) or len(calls) > MAX_TOOLS:
            raise InvalidRequest(f"{where}.tool_calls", f"must be a list of at most {MAX_TOOLS} calls")
        return {"tool_calls": [self._call(f"{where}.tool_calls[{at}]", call) for at, call in enumerate(calls)]}

    def _result(self, where: str, call_id: Any) -> dict[str, Any]:
        if not isinstance(call_id, str) or not call_id:
            raise InvalidRequest(where, "is missing; give the id of the call that this message answers")
        if call_id not in self._names:
            raise InvalidRequest(where, f"{call_id[:64]!r} is no call of an earlier message; send its tool_calls too")
        return {"tool_call_id": call_id, "name": self._names[call_id]}

    def _call(self, where: str, call: Any) -> dict[str, Any]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or call.get("type", "function") != "function":
            raise InvalidRequest(where, "must have an id, type 'function', and a function with name and arguments")
        call_id = call.get("id")
        if not isinstance(call_id, str) or not call_id:
            raise InvalidRequest(f"{where}.id", "is missing; give the id that the answer had")
        refuse_others(where, call, {"id", "type", "function", "index"})
        refuse_others(f"{where}.function", function, {"name", "arguments"})
        name = self._names[call_id] = _name(f"{where}.function.name", function)
        arguments = _arguments(f"{where}.function.arguments", function.get("arguments"))
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(where: str, given: Any) -> dict[str, Any]:
    """As an object, which chat templates expect."""
    try:
        value = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidRequest(where, "must be the text of a JSON object, such as '{}'")
    check_depth(where, value)
    return value
