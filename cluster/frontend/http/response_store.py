"""The conversations that `previous_response_id` continues, in this gateway's memory."""

from collections import OrderedDict
from collections.abc import Sequence

from workers.errors import InvalidRequest

MAX_RESPONSES = 1024
MAX_BYTES = 64 << 20
History = tuple[bytes, ...]  # lists of items, as JSON


class ResponseStore:
    """Bounded: the least recently used are dropped. A tenant finds only its own. Owned by the routes."""

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
