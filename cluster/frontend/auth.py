"""Authentication: a gateway's certificate, the CAs of its clients, and the API keys with their tenants.

Knows files and a header; knows no server. Files are checked on use, at most once per `RECHECK_S`, and reloaded when
they change. An unusable file is logged once, and the previous content stays in use.
"""

import hashlib
import hmac
import logging
import os
import re
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from cluster.spec import GatewaySpec, SpecError

logger = logging.getLogger(__name__)

RECHECK_S = 1.0
MIN_KEY_CHARS = 16
KEY = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # what may follow "Bearer"
ANY_TENANT = "*"  # the tenant of a key that is valid for every tenant
TENANT = re.compile(r"[!-~]{1,128}")

T = TypeVar("T")
Signature = tuple[tuple[int, ...], ...]


class KeyRefused(Exception):
    """The request has no key, or an unknown one; the message says which."""


class TenantRefused(Exception):
    """The request names a tenant that its key does not belong to."""


@dataclass(frozen=True, slots=True)
class Tls:
    """The TLS settings of a gateway, in two forms: an `SSLContext` for Python's ssl, and PEM for gRPC."""

    context: ssl.SSLContext
    certificate: bytes
    key: bytes = field(repr=False)
    client_ca: bytes | None


class Authenticator:
    """The authentication of one gateway, shared by its servers. Raises `SpecError` when a file cannot be used."""

    def __init__(self, spec: GatewaySpec, clock: Callable[[], float] = time.monotonic) -> None:
        self._tls = self._keys = None
        if spec.tls_cert_file is not None and spec.tls_key_file is not None:
            files = [path for path in (spec.tls_cert_file, spec.tls_key_file, spec.tls_client_ca_file) if path]
            self._tls = ReloadedFiles(files, lambda: load_tls(*files), clock)
        if spec.api_keys_file is not None:
            file = spec.api_keys_file
            self._keys = ReloadedFiles([file], lambda: key_digests(read_keys(file)), clock)

    @property
    def tls(self) -> Tls | None:
        """The current settings. None: the gateway does not use TLS."""
        return None if self._tls is None else self._tls.current()

    @property
    def has_keys(self) -> bool:
        return self._keys is not None

    def check(self, header: str | None) -> str:
        """The tenant of the key in this `Authorization` header; `ANY_TENANT` where no keys are configured.

        Raises `KeyRefused`.
        """
        if self._keys is None:
            return ANY_TENANT
        scheme, _, key = (header or "").strip().partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise KeyRefused("this gateway requires an API key; send it as Authorization: Bearer KEY")
        offered = hashlib.sha256(key.strip().encode()).digest()
        found = [tenant for known, tenant in self._keys.current() if hmac.compare_digest(offered, known)]
        if not found:
            raise KeyRefused("this gateway does not know this API key; ask its operator for another one")
        return found[0]

    def tenant(self, header: str | None, named: str) -> str:
        """The tenant of a request with this `Authorization` header. `named`: the one it names; empty: none.

        Raises `KeyRefused`, and `TenantRefused` if the key belongs to another tenant.
        """
        tenant = self.check(header)
        if tenant == ANY_TENANT:
            return named
        if named not in ("", tenant):
            owner = f"tenant {tenant!r}" if tenant else "no tenant"
            raise TenantRefused(f"this API key belongs to {owner}, not to {named[:64]!r}; leave the tenant out")
        return tenant


class ReloadedFiles(Generic[T]):
    """The parsed content of files, reloaded when they change. Thread-safe."""

    def __init__(self, paths: Sequence[str], load: Callable[[], T], clock: Callable[[], float]) -> None:
        self._paths = paths
        self._load = load
        self._clock = clock
        self._lock = threading.Lock()
        self._checked_s = clock()
        self._seen = _signature(paths)  # before loading, so that a change during it causes a reload
        self._value = load()

    def current(self) -> T:
        with self._lock:
            now_s = self._clock()
            if now_s - self._checked_s >= RECHECK_S:
                self._checked_s = now_s
                seen = _signature(self._paths)
                if seen != self._seen:
                    self._seen = seen
                    self._reload()
            return self._value

    def _reload(self) -> None:
        try:
            self._value = self._load()
        except SpecError as error:
            logger.error("%s; the previous content stays in use", error)
        else:
            logger.info("reloaded: %s", ", ".join(self._paths))


def _signature(paths: Sequence[str]) -> Signature:
    """Changes when a file is modified, replaced or removed."""
    found: list[tuple[int, ...]] = []
    for path in paths:
        try:
            stat = os.stat(path)
        except OSError:
            found.append(())
        else:
            found.append((stat.st_ino, stat.st_mtime_ns, stat.st_size))
    return tuple(found)


def load_tls(cert_file: str, key_file: str, client_ca_file: str | None = None) -> Tls:
    """Raises `SpecError`."""
    certificate, key = _read("tls_cert_file", cert_file), _read("tls_key_file", key_file)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])

    def no_password() -> str:
        raise SpecError(f"gateway.tls_key_file: {key_file} is encrypted; give a key without a password")

    try:
        context.load_cert_chain(cert_file, key_file, password=no_password)
    except OSError as error:
        if getattr(error, "reason", "") == "KEY_VALUES_MISMATCH":
            wrong = f"{key_file} is not the key of the certificate in {cert_file}"
            raise SpecError(f"gateway.tls_key_file: {wrong}; give a certificate and its own key") from None
        reason = getattr(error, "reason", None) or error.strerror or "no PEM"
        right = "give PEM files of a certificate and of its key"
        raise SpecError(
            f"gateway.tls_cert_file: {cert_file} with {key_file} cannot be used ({reason}); {right}"
        ) from None
    client_ca = None if client_ca_file is None else _read("tls_client_ca_file", client_ca_file)
    if client_ca is not None:
        _require_client_certificates(context, client_ca, str(client_ca_file))
    return Tls(context, certificate, key, client_ca)


def _require_client_certificates(context: ssl.SSLContext, client_ca: bytes, path: str) -> None:
    try:
        context.load_verify_locations(cadata=client_ca.decode("ascii", errors="replace"))
    except (ssl.SSLError, ValueError):
        right = "give a PEM file with CA certificates"
        raise SpecError(f"gateway.tls_client_ca_file: {path} has no certificate; {right}") from None
    context.verify_mode = ssl.CERT_REQUIRED
    # A resumed session would skip the client certificate, so none can be resumed.
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0


def _read(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise SpecError(f"gateway.{name}: {path} cannot be read ({error.strerror}); give an existing file") from None


def read_keys(path: str) -> dict[str, str]:
    """The tenant of each key. A line is `KEY`, `KEY TENANT` or `KEY *`.

    Ignores empty lines and lines that begin with #. Raises `SpecError`, which never quotes a key.
    """
    keys: dict[str, str] = {}
    for number, line in enumerate(_read("api_keys_file", path).decode(errors="replace").splitlines(), 1):
        key, *words = line.split() or ("",)
        if not key or key.startswith("#"):
            continue
        if not KEY.fullmatch(key) or len(words) > 1 or not all(map(TENANT.fullmatch, words)):
            right = "write letters, digits and -._~+/ only, then a tenant if there is one, or # before a comment"
            raise SpecError(f"gateway.api_keys_file: line {number} of {path} is not a key; {right}")
        if len(key) < MIN_KEY_CHARS:
            right = f"give it {MIN_KEY_CHARS}, such as `openssl rand -hex 32` makes"
            raise SpecError(f"gateway.api_keys_file: line {number} of {path} has {len(key)} characters; {right}")
        tenant = words[0] if words else ""
        if keys.setdefault(key, tenant) != tenant:
            right = "give each tenant a key of its own, or write KEY *"
            raise SpecError(f"gateway.api_keys_file: line {number} of {path} has the key of another tenant; {right}")
    if not keys:
        raise SpecError(f"gateway.api_keys_file: {path} has no key; write one per line")
    return keys


def key_digests(keys: Mapping[str, str]) -> tuple[tuple[bytes, str], ...]:
    """(SHA-256 of the key, tenant) for each key."""
    return tuple((hashlib.sha256(key.encode()).digest(), tenant) for key, tenant in keys.items())
