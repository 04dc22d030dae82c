"""Bodies of other APIs that are read as the body of a chat: what they have in common. Pure."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from cluster.frontend.http.bodies import Body, FirstError
from cluster.frontend.http.chat_body import ChatBody
from cluster.frontend.http.unsupported import refuse_others
from workers.errors import InvalidRequest

Item = dict[str, Any]
SAME = ("model", "stream", "temperature", "top_p")  # names and meaning are those of a chat


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


def part_text(where: str, part: Any, types: Collection[str], known: Collection[str] = ()) -> str:
    """The text of a part of a message. `known`: its other fields. Raises `InvalidRequest`."""
    kind = part.get("type") if isinstance(part, dict) else part
    if not isinstance(part, dict) or kind not in types or not isinstance(part.get("text"), str):
        raise InvalidRequest(where, f"is of type {str(kind)[:40]!r}; only text is supported here")
    refuse_others(where, part, {"type", "text", *known})
    return str(part["text"])
