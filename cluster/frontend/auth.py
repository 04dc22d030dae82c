"""Authentication: a gateway's certificate, the client authorities, and the API keys with their tenants.

Knows files and a header; knows no server. Files are checked on use, at most once in `LOOK_S`. Changed files are read
again; an unusable one is logged once, and the previous contents stay in use.
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

LOOK_S = 1.0
LEAST_KEY_CHARS = 16
KEY = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # what may stand behind "Bearer"
ANY_TENANT = "*"  # of a key that may speak for every tenant
TENANT = re.compile(r"[!-~]{1,128}")

T = TypeVar("T")
Signature = tuple[tuple[int, ...], ...]


class KeyRefused(Exception):
    """A request without a key, or with a wrong one; the message says which."""


class TenantRefused(Exception):
    """A request that names a tenant for which its key does not speak."""


@dataclass(frozen=True, slots=True)
class Tls:
    """What is shown and asked for in a handshake, twice: for Python's ssl, and as PEM for others."""

    context: ssl.SSLContext
    certificate: bytes
    key: bytes = field(repr=False)
    client_ca: bytes | None


class Guard:
    """The authentication of one gateway, shared by its servers. Raises `SpecError` when a file cannot be used."""

    def __init__(self, spec: GatewaySpec, clock: Callable[[], float] = time.monotonic) -> None:
        self._tls = self._keys = None
        if spec.tls_cert_file is not None and spec.tls_key_file is not None:
            files = [path for path in (spec.tls_cert_file, spec.tls_key_file, spec.tls_client_ca_file) if path]
            self._tls = ReloadedFiles(files, lambda: load_tls(*files), clock)
        if spec.api_keys_file is not None:
            file = spec.api_keys_file
            self._keys = ReloadedFiles([file], lambda: digested(read_keys(file)), clock)

    @property
    def tls(self) -> Tls | None:
        """Of now. None: the gateway speaks without TLS."""
        return None if self._tls is None else self._tls.current()

    @property
    def has_keys(self) -> bool:
        return self._keys is not None

    def check(self, header: str | None) -> str:
        """The tenant for whom a request with this `Authorization` speaks, or `ANY_TENANT`, as without keys.

        Raises `KeyRefused`.
        """
        if self._keys is None:
            return ANY_TENANT
        scheme, _, key = (header or "").strip().partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise KeyRefused("this gateway asks for an API key; send it as Authorization: Bearer KEY")
        offered = hashlib.sha256(key.strip().encode()).digest()
        found = [tenant for known, tenant in self._keys.current() if hmac.compare_digest(offered, known)]
        if not found:
            raise KeyRefused("this API key is none that the gateway knows; ask its operator for another one")
        return found[0]

    def tenant(self, header: str | None, named: str) -> str:
        """The tenant of a request with this `Authorization` that names one, or none (empty).

        Raises `KeyRefused`, and `TenantRefused` for a name that is not the key's own.
        """
        tenant = self.check(header)
        if tenant == ANY_TENANT:
            return named
        if named not in ("", tenant):
            whose = f"speaks for tenant {tenant!r}" if tenant else "speaks for no tenant"
            raise TenantRefused(f"this API key {whose}, not for {named[:64]!r}; leave the tenant out")
        return tenant


class ReloadedFiles(Generic[T]):
    """The parsed content of files, reloaded when they change. Thread-safe."""

    def __init__(self, paths: Sequence[str], load: Callable[[], T], clock: Callable[[], float]) -> None:
        self._paths = paths
        self._load = load
        self._clock = clock
        self._lock = threading.Lock()
        self._looked_s = clock()
        self._seen = _signature(paths)  # before reading: what changes meanwhile is read again
        self._value = load()

    def current(self) -> T:
        with self._lock:
            now_s = self._clock()
            if now_s - self._looked_s >= LOOK_S:
                self._looked_s = now_s
                seen = _signature(self._paths)
                if seen != self._seen:
                    self._seen = seen
                    self._renew()
            return self._value

    def _renew(self) -> None:
        try:
            self._value = self._load()
        except SpecError as error:
            logger.error("%s; what was read before stays in use", error)
        else:
            logger.info("read again: %s", ", ".join(self._paths))


def _signature(paths: Sequence[str]) -> Signature:
    """Differs once a file has: another content, another file of the name, or none any more."""
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
        raise SpecError(f"gateway.tls_key_file: {key_file} is encrypted, and nobody is there to ask; decrypt it")

    try:
        context.load_cert_chain(cert_file, key_file, password=no_password)
    except OSError as error:
        if getattr(error, "reason", "") == "KEY_VALUES_MISMATCH":
            wrong = f"{key_file} is not the key of the certificate in {cert_file}"
            raise SpecError(f"gateway.tls_key_file: {wrong}; give the two that belong together") from None
        told = getattr(error, "reason", None) or error.strerror or "no PEM"
        right = "give PEM files of a certificate and of its key"
        raise SpecError(
            f"gateway.tls_cert_file: {cert_file} with {key_file} cannot be used ({told}); {right}"
        ) from None
    client_ca = None if client_ca_file is None else _read("tls_client_ca_file", client_ca_file)
    if client_ca is not None:
        _ask_clients(context, client_ca, str(client_ca_file))
    return Tls(context, certificate, key, client_ca)


def _ask_clients(context: ssl.SSLContext, client_ca: bytes, path: str) -> None:
    try:
        context.load_verify_locations(cadata=client_ca.decode("ascii", errors="replace"))
    except (ssl.SSLError, ValueError):
        right = "give a PEM file with the certificates of authorities"
        raise SpecError(f"gateway.tls_client_ca_file: {path} has no certificate; {right}") from None
    context.verify_mode = ssl.CERT_REQUIRED
    # A resumed session would skip the client certificate, so none can be resumed.
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0


def _read(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise SpecError(
            f"gateway.{name}: {path} cannot be read ({error.strerror}); give a file that is there"
        ) from None


def read_keys(path: str) -> dict[str, str]:
    """Keys and the tenants for whom they speak: `KEY`, `KEY TENANT` or `KEY *` a line.

    Empty lines, and those that begin with #, do not count. Raises `SpecError`, which quotes no key.
    """
    keys: dict[str, str] = {}
    for number, line in enumerate(_read("api_keys_file", path).decode(errors="replace").splitlines(), 1):
        key, *words = line.split() or ("",)
        if not key or key.startswith("#"):
            continue
        if not KEY.fullmatch(key) or len(words) > 1 or not all(map(TENANT.fullmatch, words)):
            right = "write letters, digits and -._~+/ only, then a tenant if there is one, or # before a comment"
            raise SpecError(f"gateway.api_keys_file: line {number} of {path} is no key; {right}")
        if len(key) < LEAST_KEY_CHARS:
            right = f"give it {LEAST_KEY_CHARS}, such as `openssl rand -hex 32` makes"
            raise SpecError(f"gateway.api_keys_file: line {number} of {path} has {len(key)} characters; {right}")
        tenant = words[0] if words else ""
        if keys.setdefault(key, tenant) != tenant:
            right = "give each tenant a key of its own, or write KEY *"
            raise SpecError(f"gateway.api_keys_file: line {number} of {path} has the key of another tenant; {right}")
    if not keys:
        raise SpecError(f"gateway.api_keys_file: {path} has no key; write one a line")
    return keys


def digested(keys: Mapping[str, str]) -> tuple[tuple[bytes, str], ...]:
    """(SHA-256 of a key, tenant) of each."""
    return tuple((hashlib.sha256(key.encode()).digest(), tenant) for key, tenant in keys.items())
