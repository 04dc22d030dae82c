"""What can go wrong when KV moves.

    TransferError                    base; the pull failed, the prompt can be recomputed
    ├── PeerLost                     the owner of the memory is gone (restart, crash, broken link)
    ├── PeerRefused                  the handshake failed: wrong token, version, model or layout
    ├── LoanRefused                  a worker has no blocks to lend
    ├── LeaseLost                    the lease expired, was released, or belongs to another epoch
    ├── DigestMismatch               bytes arrived that are not the bytes the owner computed
    ├── TransferTimeout              the deadline passed; its target blocks may be written until the read settles
    ├── TransportUnavailable         a backend cannot work here (module missing, probe failed)
    └── Unlinked                     the reader could not connect to the owner, or its link failed preflight

Every message says what happened, to which peer or lease, and what the reader may do.
"""

import errno


class TransferError(Exception):
    """A transfer did not deliver; the target blocks hold nothing usable."""


class PeerLost(TransferError):
    """The owner died, restarted under a new incarnation, or its link is broken."""


class PeerRefused(TransferError):
    """The peer answered but does not accept this process, or its KV is not compatible."""


class LoanRefused(TransferError):
    """A worker has no blocks to lend; another one may have. `reason`: one of `diptych.view.REFUSALS`."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message, reason)
        self.reason = reason

    def __str__(self) -> str:
        return str(self.args[0])


class LeaseLost(TransferError):
    """The owner no longer holds these blocks for this reader: nothing read so far may be used."""


class DigestMismatch(TransferError):
    """The bytes that arrived differ from those the owner computed."""


class TransferTimeout(TransferError):
    """The deadline passed. The target blocks stay quarantined until the read has settled."""


class TransportUnavailable(TransferError):
    """This backend cannot work in this process or for this pair."""


class Unlinked(TransferError):
    """This reader cannot pull from this owner now: it could not connect, or the link failed preflight."""


def not_connected(peer: str) -> PeerLost:
    return PeerLost(f"{peer} is not connected: connect to its present incarnation first")


def is_gone(peer: str) -> PeerLost:
    return PeerLost(f"{peer} is gone: compute the prompt again or ask another owner")


_OURS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def unreachable(where: str, error: Exception) -> TransferError:
    """The error for a failed connection to `where`: the owner is gone, or this process lacks resources."""
    if isinstance(error, OSError) and error.errno in _OURS:
        return TransportUnavailable(
            f"this process cannot connect to {where}: {error.strerror}; raise the limit of open files (ulimit -n)"
        )
    return PeerLost(f"{where} is gone: {error}; compute the prompt again or ask another owner")
