"""Bodies of other APIs that are read as the body of a chat: what they have in common. Pure."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

from cluster.frontend.http.bodies import Body, ChatBody, FirstError
from cluster.frontend.http.unsupported import refuse_others
from workers.errors import InvalidRequest

Item = dict[str, Any]
C = TypeVar("C", bound=ChatBody)
SAME = ("model", "stream", "temperature", "top_p")  # names and meaning are those of a chat


class ChatLike(Body):
    chat_names: ClassVar[Mapping[str, str]]  # patterns in the paths of a chat's fields, and what this API has there
    passing: ClassVar[Collection[str]]  # fields that do not influence the answer

    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: Annotated[list[Item], FirstError()] | None = None

    @classmethod
    def known_fields(cls) -> Collection[str]:
        return {*cls.model_fields, *cls.passing}

    def as_chat(self, kind: type[C], messages: Sequence[tuple[str, Item]], **more: Any) -> C:
        """`messages`: with the path of what each is made from. `more`: fields of the chat. Raises `InvalidRequest`."""
        more |= {name: getattr(self, name) for name in SAME} | {"messages": [message for _, message in messages]}
        chat = kind.model_validate(more)
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


def part_text(where: str, part: Any, types: Collection[str], known: Collection[str] = ()) -> str:
    """The text of a part of a message. `known`: its other fields. Raises `InvalidRequest`."""
    kind = part.get("type") if isinstance(part, dict) else part
    if not isinstance(part, dict) or kind not in types or not isinstance(part.get("text"), str):
        raise InvalidRequest(where, f"is of type {str(kind)[:40]!r}; only text is supported here")
    refuse_others(where, part, {"type", "text", *known})
    return str(part["text"])
