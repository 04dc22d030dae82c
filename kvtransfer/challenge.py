"""Proof that two processes share the cluster's secret, without sending it.

Each side sends a fresh nonce and answers the other's with an HMAC over both nonces, its own role and the incarnation
at stake; the role keeps an answer from being reflected, the nonces keep it from being replayed. It authenticates the
two ends and binds the connection to one incarnation; it does not encrypt what follows.
"""

import hashlib
import hmac
import secrets

NONCE_BYTES = 32
PROOF_BYTES = 32


def require_secret(secret: bytes) -> bytes:
    """Refuse to start with a secret that anybody can guess at once."""
    if not secret:
        raise ValueError("the cluster's secret is empty: anybody could read the KV pool")
    return secret


def nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def proof(secret: bytes, role: bytes, owner_nonce: bytes, reader_nonce: bytes, incarnation: str) -> bytes:
    """What `role` ("owner" or "reader", with the protocol's name) answers. All parts but the last have fixed sizes."""
    role_digest = hashlib.sha256(role).digest()
    return hmac.digest(secret, role_digest + owner_nonce + reader_nonce + incarnation.encode(), "sha256")


def proves(given: bytes, expected: bytes) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(given, expected)
