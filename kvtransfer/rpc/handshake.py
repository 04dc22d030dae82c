"""The handshake: both ends prove that they share the cluster's secret, without sending it.

    listener -> caller   Hello(protocol, versions, nonce)
    caller -> listener   Claim(nonce, target, proof, version)     target: the end that the caller expects
    listener -> caller   Verdict(proof, error, body)     welcome, or an error of `kvtransfer.errors` and its reason

Both use the newest version that both know, and ignore fields that they do not know, so that processes of
consecutive releases work together while a cluster is upgraded.

A proof is an HMAC over the protocol, the version, the role of its sender, both nonces and the content sent with it. The
role keeps a proof from being reflected, the nonces keep it from being replayed. The handshake authenticates both ends;
it doesn't encrypt what follows. Pure: bytes in, bytes out; knows no socket.
"""

import hmac
import secrets
from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

import msgspec

import kvtransfer.errors
from kvtransfer.errors import PeerRefused, TransferError

VERSION = 5  # of handshake and frames
OLDEST_VERSION = 5  # that this release still speaks
HANDSHAKE_BYTES = 4096  # the longest frame that a peer may send before it has proven the secret
HANDSHAKE_S = 5.0
MAX_UNAUTHENTICATED = 64
NONCE_BYTES = 32


class Hello(msgspec.Struct, frozen=True):
    protocol: str
    version: int  # the newest
    nonce: bytes
    oldest: int = 0  # 0: `version`


class Claim(msgspec.Struct, frozen=True):
    nonce: bytes
    target: str
    proof: bytes
    version: int = 4


class Verdict(msgspec.Struct, frozen=True):
    proof: bytes  # empty for a caller that doesn't know the secret
    error: str  # the name of a TransferError, or "" for welcome
    body: bytes  # what the protocol sends to welcome a caller, or the reason of the error


def require_secret(secret: bytes) -> bytes:
    """Refuse to start with an empty secret."""
    if not secret:
        raise ValueError("the cluster's secret is empty: any process could read the KV pool")
    return secret


class ListenerHandshake:
    """The listener's half, for one connection: send `hello`, `verify` the claim, then send `welcome` or `refusal`."""

    def __init__(self, protocol: str, secret: bytes) -> None:
        self._protocol = protocol
        self._secret = secret
        self._ours = secrets.token_bytes(NONCE_BYTES)
        self._theirs: bytes | None = None  # of a caller that has proven the secret
        self._version = VERSION
        self.hello = msgspec.msgpack.encode(Hello(protocol, VERSION, self._ours, OLDEST_VERSION))

    def verify(self, data: bytes) -> str:
        """The target of a caller that knows the secret. Raises `PeerRefused`, or msgspec's errors for invalid bytes."""
        claim = msgspec.msgpack.decode(data, type=Claim)
        if not OLDEST_VERSION <= claim.version <= VERSION:
            raise PeerRefused(f"the caller speaks version {claim.version}, this process {_versions()}: run one release")
        self._version = claim.version
        expected = _proof(self._secret, self._protocol, claim.version, "caller", self._ours, claim.nonce, claim.target)
        if not hmac.compare_digest(claim.proof, expected):
            raise PeerRefused("the caller doesn't know the cluster's secret")
        self._theirs = claim.nonce
        return claim.target

    def welcome(self, body: bytes = b"") -> bytes:
        return self._verdict("", body)

    def refusal(self, error: TransferError) -> bytes:
        return self._verdict(type(error).__name__, str(error).encode())

    def _verdict(self, error: str, body: bytes) -> bytes:
        proof = b""
        if self._theirs is not None:
            content = (error, body)
            proof = _proof(self._secret, self._protocol, self._version, "listener", self._ours, self._theirs, content)
        return msgspec.msgpack.encode(Verdict(proof, error, body))


class CallerHandshake:
    """The caller's half, for one connection: `claim` is the reply to the hello, `accept` reads the verdict.

    `target`: the end that the caller expects; `listener` names the other end in errors.
    """

    def __init__(self, protocol: str, secret: bytes, target: str, listener: str) -> None:
        self._protocol = protocol
        self._secret = secret
        self._target = target
        self._listener = listener
        self._ours = secrets.token_bytes(NONCE_BYTES)
        self._theirs = b""
        self._version = VERSION

    def claim(self, data: bytes) -> bytes:
        """Raises `PeerRefused` when the listener speaks another protocol or version."""
        hello = self._decoded(data, Hello)
        if hello.protocol != self._protocol:
            raise self.wrong_protocol(f"it speaks {hello.protocol}")
        self._version = min(VERSION, hello.version)
        oldest = hello.oldest or hello.version
        if self._version < max(OLDEST_VERSION, oldest):
            theirs = f"versions {oldest} to {hello.version}"
            raise self.wrong_protocol(f"it speaks {theirs}, this process {_versions()}")
        self._theirs = hello.nonce
        proof = _proof(self._secret, self._protocol, self._version, "caller", hello.nonce, self._ours, self._target)
        return msgspec.msgpack.encode(Claim(self._ours, self._target, proof, self._version))

    def accept(self, data: bytes) -> bytes:
        """The body of the welcome. Raises `PeerRefused` for another secret, or the error that the listener sent."""
        verdict = self._decoded(data, Verdict)
        content = (verdict.error, verdict.body)
        expected = _proof(self._secret, self._protocol, self._version, "listener", self._theirs, self._ours, content)
        if not hmac.compare_digest(verdict.proof, expected):
            raise PeerRefused(
                f"{self._listener} and this process don't share one secret: start both with the same cluster secret"
            )
        if verdict.error:
            reason = verdict.body.decode(errors="replace")
            raise _error_class(verdict.error)(f"{self._listener} refused the connection: {reason}")
        return verdict.body

    def _decoded(self, data: bytes, kind: type["_Message"]) -> "_Message":
        try:
            return msgspec.msgpack.decode(data, type=kind)
        except msgspec.MsgspecError as error:
            raise self.wrong_protocol(str(error)) from error

    def wrong_protocol(self, reason: str) -> PeerRefused:
        return PeerRefused(
            f"{self._listener} doesn't speak our {self._protocol} protocol ({reason}): check host and port, and run "
            "one release on both sides"
        )


_Message = TypeVar("_Message", Hello, Verdict)


def _versions() -> str:
    return f"versions {OLDEST_VERSION} to {VERSION}"


def _proof(
    secret: bytes, protocol: str, version: int, role: str, listener_nonce: bytes, caller_nonce: bytes, content: object
) -> bytes:
    signed = msgspec.msgpack.encode((protocol, version, role, listener_nonce, caller_nonce, content))
    return hmac.digest(secret, signed, "sha256")


def _error_class(name: str) -> type[TransferError]:
    found = getattr(kvtransfer.errors, name, None)
    return found if isinstance(found, type) and issubclass(found, TransferError) else PeerRefused


ConnectionT = TypeVar("ConnectionT", bound=Hashable)


class Unauthenticated(Generic[ConnectionT]):
    """At most `limit` unauthenticated connections. Another one replaces the oldest one of the address with the most.

    A handshake takes milliseconds, so the oldest connection is the least likely to be a member of the cluster, and many
    connections from one address replace only each other. Not safe for threads: the caller holds a lock.
    """

    def __init__(self, limit: int = MAX_UNAUTHENTICATED) -> None:
        self._limit = limit
        self._addresses: dict[ConnectionT, str] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._addresses)

    def add(self, connection: ConnectionT, address: str) -> ConnectionT | None:
        """Returns the connection to close, if there is one too many."""
        self._addresses[connection] = address
        if len(self._addresses) <= self._limit:
            return None
        [(busiest, _)] = Counter(self._addresses.values()).most_common(1)
        oldest = next(each for each, its in self._addresses.items() if its == busiest)
        del self._addresses[oldest]
        return oldest

    def discard(self, connection: ConnectionT) -> None:
        """The connection has proven the secret, or is closed."""
        self._addresses.pop(connection, None)


def too_many_readers(limit: int) -> str:
    """The reason for refusing one more reader, and how to fix it."""
    return (
        f"serves {limit} readers already, as many as its transfer.max_readers allows: raise that, and the limit of "
        "open files (ulimit -n) with it"
    )
