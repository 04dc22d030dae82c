"""Reads and writes the scale of StatefulSets at the Kubernetes API server of this pod.

Kubernetes rotates the files of a service account (token, ca.crt, namespace), so every session reads them again.
Every call has a timeout. Knows no pool.
"""

import json
import os
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
CALL_S = 10.0
PATCH = "application/merge-patch+json"


class ScaleError(Exception):
    """The API server refused, or did not answer. The message is one line."""


@dataclass(frozen=True, slots=True)
class ApiServer:
    """`address`: https://HOST:PORT. `account`: the folder of the pod's service account."""

    address: str
    account: Path
    call_s: float = CALL_S

    @asynccontextmanager
    async def session(self) -> AsyncIterator["Scales"]:
        """A session with fresh credentials. Raises `ScaleError`."""
        try:
            token = (self.account / "token").read_text().strip()
            namespace = (self.account / "namespace").read_text().strip()
            context = ssl.create_default_context(cafile=str(self.account / "ca.crt"))
            context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # Python 3.13 sets it; EKS and MicroK8s have simpler CAs
        except OSError as error:
            raise ScaleError(f"the service account cannot be read: {error}") from None
        async with aiohttp.ClientSession(
            self.address,
            headers={"Authorization": f"Bearer {token}", "Accept": "application/json"},
            timeout=aiohttp.ClientTimeout(total=self.call_s),
            connector=aiohttp.TCPConnector(ssl=context),
        ) as http:
            yield Scales(http, namespace)


def api_server(account: Path, environment: Mapping[str, str] = os.environ) -> ApiServer:
    """The API server of this pod. Raises `ScaleError` outside of Kubernetes."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise ScaleError("KUBERNETES_SERVICE_HOST is not set: this is not a Kubernetes pod")
    if not (account / "token").exists():
        raise ScaleError(f"{account} has no token; the pod needs automountServiceAccountToken: true")
    return ApiServer(f"https://{f'[{host}]' if ':' in host else host}:{port}", account)


class Scales:
    """One session with the API server, for the replicas of StatefulSets."""

    def __init__(self, http: aiohttp.ClientSession, namespace: str) -> None:
        self._http = http
        self._namespace = namespace

    async def read(self, name: str) -> int:
        """Errors: `ScaleError`."""
        return await self._call("GET", name)

    async def write(self, name: str, replicas: int) -> int:
        """Errors: `ScaleError`."""
        body = json.dumps({"spec": {"replicas": replicas}})
        return await self._call("PATCH", name, data=body, headers={"Content-Type": PATCH})

    async def _call(self, method: str, name: str, **options: Any) -> int:
        path = f"/apis/apps/v1/namespaces/{self._namespace}/statefulsets/{name}/scale"
        try:
            async with self._http.request(method, path, **options) as answer:
                text = await answer.text(errors="replace")
        except TimeoutError:
            raise ScaleError(f"{method} the scale of {name}: the API server did not answer in time") from None
        except aiohttp.ClientError as error:
            raise ScaleError(f"{method} the scale of {name}: {_one_line(str(error))}") from None
        if answer.status != 200:
            raise ScaleError(f"{method} the scale of {name}: {answer.status} {_status_message(text)}")
        try:
            return int(json.loads(text)["spec"].get("replicas", 0))  # Kubernetes omits 0
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ScaleError(f"{method} the scale of {name}: the answer is no Scale: {_one_line(text)[:100]}") from None


def _status_message(text: str) -> str:
    """The message of a Kubernetes Status."""
    try:
        return _one_line(str(json.loads(text)["message"]))
    except (ValueError, KeyError, TypeError):
        return _one_line(text)[:200]


def _one_line(text: str) -> str:
    return " ".join(text.split())
