"""The API server's door for pods: HTTPS, a token for each service account, and what its Roles let it do.

No more than RoleBindings of service accounts to Roles of the same namespace: by group, resource, name and verb.
"""

import secrets
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path
from socket import socket
from typing import Any

from tests.frontend.http.certificates import Authority, Pair
from tests.helm.api_server import Handler, Kind, Refused, Store

VERBS = {"GET": "get", "PATCH": "patch", "PUT": "update", "POST": "create", "DELETE": "delete"}


@dataclass
class Accounts:
    """Who has which token. Tokens may be withdrawn."""

    store: Store
    ca: Path
    tokens: dict[str, tuple[str, str]] = field(default_factory=dict)  # namespace and name, by token

    def files(self, namespace: str, name: str) -> dict[str, str]:
        """What is mounted into a pod of this account, with a token of its own."""
        token = secrets.token_urlsafe(32)
        self.tokens[token] = (namespace, name)
        return {"token": token, "ca.crt": self.ca.read_text(), "namespace": namespace}

    def allowed(self, account: tuple[str, str], verb: str, kind: Kind, namespace: str, name: str, part: str) -> bool:
        group = kind.group_version.rpartition("/")[0]
        for binding in self._all("RoleBinding", namespace):
            subjects = [(each.get("namespace"), each["name"]) for each in binding["subjects"]]
            if account not in subjects or binding["roleRef"]["kind"] != "Role":
                continue
            for role in self._all("Role", namespace):
                if role["metadata"]["name"] != binding["roleRef"]["name"]:
                    continue
                for rule in role["rules"]:
                    named = not rule.get("resourceNames") or name in rule["resourceNames"]
                    what = group in rule["apiGroups"] and kind.plural + part in rule["resources"]
                    if what and named and verb in rule["verbs"]:
                        return True
        return False

    def _all(self, kind: str, namespace: str) -> list[dict[str, Any]]:
        known = next(each for each in self.store.kinds if each.name == kind)
        return self.store.all(known, namespace, {})


class PodsHandler(Handler):
    """One request of a pod."""

    @property
    def accounts(self) -> Accounts:
        accounts: Accounts = self.server.accounts  # type: ignore[attr-defined]
        return accounts

    def check(self, kind: Kind, namespace: str, name: str, part: str = "") -> None:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        account = self.accounts.tokens.get(token)
        if account is None:
            raise Refused(401, "Unauthorized", "Unauthorized")
        verb = VERBS[self.command]
        if not self.accounts.allowed(account, verb, kind, namespace, name, part):
            group, _, _ = kind.group_version.rpartition("/")
            user = f"system:serviceaccount:{':'.join(account)}"
            what = f'cannot {verb} resource "{kind.plural}{part}" in API group "{group}" in the namespace "{namespace}"'
            raise Refused(403, "Forbidden", f'{kind.plural}.{group} "{name}" is forbidden: User "{user}" {what}')


@contextmanager
def door_for_pods(
    store: Store, authority: Authority, pair: Pair, listening: socket, handler: type[PodsHandler] = PodsHandler
) -> Iterator[Accounts]:
    """On this socket, wherever it is."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.cert, pair.key)
    server = ThreadingHTTPServer(listening.getsockname()[:2], handler, bind_and_activate=False)
    server.daemon_threads = True
    server.socket.close()
    server.socket = context.wrap_socket(listening, server_side=True, do_handshake_on_connect=False)
    server.store = store  # type: ignore[attr-defined]
    accounts = server.accounts = Accounts(store, authority.ca)  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield accounts
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
