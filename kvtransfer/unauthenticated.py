"""Connections whose peer has not proven the secret yet: a bounded number of them, shared fairly among addresses.

Pure: whoever owns the sockets asks which of them to close. Not safe for threads; the caller holds a lock.
"""

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

MAX_UNAUTHENTICATED = 64

Connection = TypeVar("Connection", bound=Hashable)


class Unauthenticated(Generic[Connection]):
    """At most `limit` connections. A newcomer beyond that displaces the oldest one of the address that has the most.

    A handshake takes milliseconds, so whoever waits longest is a stranger, and a flood from one address displaces its
    own connections and nobody else's.
    """

    def __init__(self, limit: int = MAX_UNAUTHENTICATED) -> None:
        self._limit = limit
        self._addresses: dict[Connection, str] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._addresses)

    def add(self, connection: Connection, address: str) -> Connection | None:
        """Answers the connection to close, if there is one too many."""
        self._addresses[connection] = address
        if len(self._addresses) <= self._limit:
            return None
        [(busiest, _)] = Counter(self._addresses.values()).most_common(1)
        oldest = next(each for each, its in self._addresses.items() if its == busiest)
        del self._addresses[oldest]
        return oldest

    def discard(self, connection: Connection) -> None:
        """It has proven the secret, or is closed."""
        self._addresses.pop(connection, None)


def too_many_readers(limit: int) -> str:
    """Why an owner turns one more reader away, and what to do."""
    return (
        f"serves {limit} readers already, as many as its transfer.max_readers allows: raise that, and the limit of "
        "open files (ulimit -n) with it"
    )
