"""A small Kubernetes API server on loopback, as far as helm and kubectl talk to one: the real programs, no cluster.

It stores objects, refuses those that Kubernetes or KubeRay would (`validate`), and takes the place of all controllers:
whatever is written is ready at once, unless somebody runs pods (`kubelet`) and says otherwise. Knows nothing of our
chart; schedules nothing and runs nothing.

    discovery  /version /api /apis /openapi/v3      objects  GET, POST, PUT, PATCH (apply, merge), DELETE, watch
    the scale of workloads  GET, PATCH

helm asks over plain HTTP and may do everything; pods have a door of their own (`service_accounts`).
"""

import base64
import copy
import json
import queue
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlparse

import kubernetes_validate
import yaml

from tests.helm.apply_rules import forbidden, merged, repeated, without
from tests.helm.kuberay import mistakes

VERSION = "1.37"
WATCH_S = 60.0
BORN = "2026-01-01T00:00:00Z"

Object = dict[str, Any]


class Refused(Exception):
    """The answer is a Status with this code and reason."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason


@dataclass(frozen=True)
class Kind:
    """A kind of objects and where they are asked for."""

    group_version: str
    plural: str
    name: str
    namespaced: bool = True

    @property
    def root(self) -> str:
        return f"/{'apis' if '/' in self.group_version else 'api'}/{self.group_version}"


def kinds(text: str) -> list[Kind]:
    rows = (line.split() for line in text.strip().splitlines())
    return [Kind(version, name.lower() + ending, name) for version, name, ending in rows]


BUILT_IN = [
    Kind("v1", "namespaces", "Namespace", namespaced=False),
    *kinds("""
        v1 Pod s
        v1 Service s
        v1 Secret s
        v1 ConfigMap s
        v1 ServiceAccount s
        v1 PersistentVolumeClaim s
        apps/v1 Deployment s
        apps/v1 StatefulSet s
        apps/v1 ReplicaSet s
        batch/v1 Job s
        policy/v1 PodDisruptionBudget s
        autoscaling/v2 HorizontalPodAutoscaler s
        rbac.authorization.k8s.io/v1 Role s
        rbac.authorization.k8s.io/v1 RoleBinding s
    """),
    Kind("networking.k8s.io/v1", "networkpolicies", "NetworkPolicy"),
    Kind("networking.k8s.io/v1", "ingresses", "Ingress"),
]
SCALED = ("StatefulSet", "Deployment")
KUBERAY = kinds("ray.io/v1 RayCluster s\nray.io/v1 RayJob s")


class Store:
    """All objects, by kind, namespace and name. Whoever watches is told of each change."""

    def __init__(self, kinds: list[Kind]) -> None:
        self.kinds = kinds
        self.lock = threading.RLock()
        self._objects: dict[tuple[Kind, str, str], Object] = {}
        self._applied: dict[tuple[Kind, str, str], Object] = {}  # what the only owner of an object wrote last
        self._watching: list[tuple[Kind, str, queue.Queue[Object]]] = []
        self._revision = 100
        self.status: Callable[[Object], Object] = ready  # of what is written; whoever runs pods knows better

    def names(self) -> list[str]:
        """Kind/name of everything but namespaces."""
        with self.lock:
            return sorted(f"{kind.name}/{name}" for kind, _, name in self._objects if kind.namespaced)

    def get(self, kind: Kind, namespace: str, name: str) -> Object:
        found = self._objects.get((kind, namespace, name))
        if found is None:
            raise Refused(404, "NotFound", f'{kind.plural} "{name}" not found')
        return found

    def all(self, kind: Kind, namespace: str, query: dict[str, str]) -> list[Object]:
        with self.lock:
            found = [
                each for (other, place, _), each in self._objects.items() if other == kind and namespace in ("", place)
            ]
        return [each for each in found if selected(each, query)]

    def write(self, kind: Kind, namespace: str, name: str, data: Object, *, how: str, dry: bool) -> Object:
        """`how` is apply (by the server), merge (a patch) or replace."""
        with self.lock:
            old = self._objects.get((kind, namespace, name))
            new = copy.deepcopy(data)
            if old and how == "apply":
                new = merged(without(old, self._applied.get((kind, namespace, name), {})), data)
            elif old and how == "merge":
                new = merged(old, data)
            new |= {"apiVersion": kind.group_version, "kind": kind.name}
            if kind.name == "Service":
                new["spec"].setdefault("clusterIP", "10.96.0.1")
            if kind.name in SCALED:
                new["spec"].setdefault("replicas", 1)
            validate({key: value for key, value in new.items() if key != "status"}, old)
            self._revision += 1
            metadata = new["metadata"]
            generation = (old or {"metadata": {}})["metadata"].get("generation", 0) + 1
            metadata |= {"generation": generation, "resourceVersion": str(self._revision)}
            metadata.setdefault("uid", str(uuid.uuid4()))
            metadata.setdefault("creationTimestamp", BORN)
            if kind.namespaced:
                metadata["namespace"] = namespace
            new["status"] = self.status(new)
            if not dry:
                self._objects[kind, namespace, name] = new
                if how != "merge":
                    self._applied[kind, namespace, name] = copy.deepcopy(data)
                self._tell("MODIFIED" if old else "ADDED", kind, namespace, new)
            return new

    def observe(self, kind: Kind, namespace: str, name: str, status: Object) -> None:
        """What has become of an object."""
        with self.lock:
            if (known := self._objects.get((kind, namespace, name))) is None:
                return
            self._revision += 1
            metadata = known["metadata"] | {"resourceVersion": str(self._revision)}
            new = self._objects[kind, namespace, name] = known | {"metadata": metadata, "status": status}
            self._tell("MODIFIED", kind, namespace, new)

    def delete(self, kind: Kind, namespace: str, name: str) -> None:
        with self.lock:
            gone = self.get(kind, namespace, name)
            del self._objects[kind, namespace, name]
            self._applied.pop((kind, namespace, name), None)
            self._tell("DELETED", kind, namespace, gone)

    def watch(self, kind: Kind, namespace: str, query: dict[str, str]) -> Iterator[Object]:
        """Changes from now on; before them, if asked for, what there is, and a bookmark that ends it."""
        news: queue.Queue[Object] = queue.Queue()
        entry = (kind, namespace, news)
        with self.lock:
            there, revision = self.all(kind, namespace, query), str(self._revision)
            self._watching.append(entry)
        try:
            if query.get("sendInitialEvents") == "true":
                yield from ({"type": "ADDED", "object": each} for each in there)
                metadata = {"resourceVersion": revision, "annotations": {"k8s.io/initial-events-end": "true"}}
                bookmark = {"kind": kind.name, "apiVersion": kind.group_version, "metadata": metadata}
                yield {"type": "BOOKMARK", "object": bookmark}
            while True:
                try:
                    change = news.get(timeout=WATCH_S)
                except queue.Empty:
                    return
                if selected(change["object"], query):
                    yield change
        finally:
            with self.lock:
                self._watching.remove(entry)

    def _tell(self, change: str, kind: Kind, namespace: str, about: Object) -> None:
        for watched, place, news in self._watching:
            if watched == kind and place in ("", namespace):
                news.put({"type": change, "object": copy.deepcopy(about)})


def selected(candidate: Object, query: dict[str, str]) -> bool:
    """By `name=value` pairs of label and field selectors."""
    metadata = candidate["metadata"]
    labels = _pairs(query.get("labelSelector", ""))
    fields = _pairs(query.get("fieldSelector", ""))
    named = fields.get("metadata.name", metadata["name"]) == metadata["name"]
    return named and all(metadata.get("labels", {}).get(key) == value for key, value in labels.items())


def _pairs(selector: str) -> dict[str, str]:
    parts = (part.replace("==", "=").split("=", 1) for part in selector.split(",") if "=" in part)
    return {key.strip(): value.strip() for key, value in parts}


def validate(data: Object, old: Object | None = None) -> None:
    """Raises `Refused` for what Kubernetes or KubeRay would not take, instead of the old one."""
    found = mistakes(data) if data["apiVersion"].startswith("ray.io/") else _shape_mistakes(data)
    found += repeated(data) + (forbidden(old, data) if old else [])
    if found:
        raise Refused(422, "Invalid", f'{data["kind"]} "{data["metadata"]["name"]}" is invalid: {"; ".join(found)}')


def _shape_mistakes(data: Object) -> list[str]:
    try:
        kubernetes_validate.validate(copy.deepcopy(data), VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [str(error).splitlines()[0]]
    return []


def ready(data: Object) -> Object:
    """The status that the kind's controller would come to."""
    replicas, generation = data.get("spec", {}).get("replicas", 1), data["metadata"]["generation"]
    counts = {key: replicas for key in ("replicas", "readyReplicas", "updatedReplicas", "availableReplicas")}
    done = {"lastTransitionTime": BORN, "status": "True"}
    match data["kind"]:
        case "Deployment":
            conditions = [
                {"type": "Available", **done},
                {"type": "Progressing", "reason": "NewReplicaSetAvailable", **done},
            ]
            return {"observedGeneration": generation, **counts, "conditions": conditions}
        case "StatefulSet":
            revisions = {"currentRevision": "1", "updateRevision": "1", "currentReplicas": replicas}
            return {"observedGeneration": generation, **counts, **revisions}
        case "Pod":
            return {"phase": "Succeeded", "conditions": [{"type": "Ready", "reason": "PodCompleted", **done}]}
        case "Job":
            return {"succeeded": 1, "conditions": [{"type": "Complete", **done}]}
        case "Service":
            return {"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]}}
        case "PersistentVolumeClaim":
            return {"phase": "Bound"}
        case "Namespace":
            return {"phase": "Active"}
        case "PodDisruptionBudget":
            return {"observedGeneration": generation}
        case _:
            return {}


def decoded(body: bytes) -> Object:
    """JSON or YAML, or the protobuf in which helm writes the Secrets of its releases."""
    if not body.startswith(b"k8s\0"):
        loaded: Object = yaml.load(body, Loader=yaml.CSafeLoader) or {}
        return loaded
    envelope = _fields(body[4:])
    about, raw = _fields(envelope[1][0]), _fields(envelope.get(2, [b""])[0])
    kind = about[2][0].decode()
    data: Object = {"apiVersion": about[1][0].decode(), "kind": kind}
    if kind != "Secret":  # such as the options of a delete
        return data
    metadata = _fields(raw[1][0])
    data["metadata"] = {"name": metadata[1][0].decode(), "labels": _text(metadata.get(11, []))}
    data["data"] = {key: base64.b64encode(value).decode() for key, value in _entries(raw.get(2, []))}
    data["type"] = raw[3][0].decode()
    return data


def _text(entries: list[bytes]) -> dict[str, str]:
    return {key: value.decode() for key, value in _entries(entries)}


def _entries(entries: list[bytes]) -> list[tuple[str, bytes]]:
    pairs = [_fields(each) for each in entries]
    return [(pair[1][0].decode(), pair.get(2, [b""])[0]) for pair in pairs]


def _fields(message: bytes) -> dict[int, list[bytes]]:
    """Length-delimited fields of a protobuf message by number; numbers are skipped."""
    found: dict[int, list[bytes]] = {}
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        tag = number()
        if tag & 7 == 2:
            length = number()
            found.setdefault(tag >> 3, []).append(message[at : at + length])
            at += length
        else:
            assert tag & 7 == 0, "fixed-width fields stand in no Secret"
            number()
    return found


class Handler(BaseHTTPRequestHandler):
    """One request. The store is the server's."""

    protocol_version = "HTTP/1.1"

    @property
    def store(self) -> Store:
        store: Store = self.server.store  # type: ignore[attr-defined]
        return store

    def log_message(self, *_: object) -> None:
        pass

    def answer(self) -> None:
        url = urlparse(self.path)
        if (
            url.path == "/openapi/v2"
        ):  # asked for kinds that /openapi/v3 does not have; empty protobuf: it has none either
            self._reply(200, "application/com.github.proto-openapi.spec.v2.v1.0+protobuf", b"")
            return
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        body = decoded(self.rfile.read(int(self.headers.get("Content-Length") or 0)))
        try:
            found = self._discovered(url.path.rstrip("/"))
            if found is None:
                found = self._object(url.path, query, body)
        except Refused as refusal:
            status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
            received = {"code": refusal.code, "reason": refusal.reason, "message": str(refusal)}
            self._send(refusal.code, status | received)
        else:
            if found is not None:
                self._send(201 if self.command == "POST" else 200, found)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer

    def _send(self, code: int, data: Object) -> None:
        self._reply(code, "application/json", json.dumps(data).encode())

    def _reply(self, code: int, content_type: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _discovered(self, path: str) -> Object | None:
        versions = sorted({kind.group_version for kind in self.store.kinds})
        groups = [each for each in versions if "/" in each]
        if path == "/version":
            return {"major": VERSION[0], "minor": VERSION[2:], "gitVersion": f"v{VERSION}.0"}
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(each) for each in groups]}
        if path == "/openapi/v3":
            roots = [f"{'apis/' if '/' in each else 'api/'}{each}" for each in versions]
            return {"paths": {root: {"serverRelativeURL": f"/openapi/v3/{root}"} for root in roots}}
        here = [kind for kind in self.store.kinds if path == f"/openapi/v3{kind.root}"]
        if here:
            document = {"openapi": "3.0.0", "info": {"title": "kinds", "version": "1"}, "components": {"schemas": {}}}
            return document | {"paths": dict(map(_patched, here))}
        here = [kind for kind in self.store.kinds if path == kind.root]
        if here:
            listed = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": here[0].group_version}
            return listed | {"resources": [_resource(kind) for kind in here]}
        return None

    def _object(self, path: str, query: dict[str, str], body: Object) -> Object | None:
        """None: a watch, which has been answered."""
        if path.endswith("/scale"):
            kind, namespace, name = self._place(path.removesuffix("/scale"))
            self.check(kind, namespace, name, "/scale")
            return self._scale(kind, namespace, name, body)
        kind, namespace, name = self._place(path)
        self.check(kind, namespace, name)
        if self.command == "GET" and query.get("watch") in ("1", "true"):
            self._watch(kind, namespace, query)
            return None
        if self.command == "GET" and not name:
            items = self.store.all(kind, namespace, query)
            listed = {"kind": f"{kind.name}List", "apiVersion": kind.group_version, "items": items}
            return listed | {"metadata": {"resourceVersion": "1"}}
        if self.command == "GET":
            return self.store.get(kind, namespace, name)
        if self.command == "DELETE":
            self.store.delete(kind, namespace, name)
            return {"kind": "Status", "apiVersion": "v1", "status": "Success"}
        applied = "apply-patch" in self.headers.get("Content-Type", "")
        dry = "dryRun" in query
        if self.command == "POST":
            name = body["metadata"]["name"]
            if any(each["metadata"]["name"] == name for each in self.store.all(kind, namespace, {})):
                raise Refused(409, "AlreadyExists", f'{kind.plural} "{name}" already exists')
        elif not applied:
            self.store.get(kind, namespace, name)
        how = "apply" if applied else "merge" if self.command == "PATCH" else "replace"
        return self.store.write(kind, namespace, name, body, how=how, dry=dry)

    def check(self, kind: Kind, namespace: str, name: str, part: str = "") -> None:
        """Raises `Refused` for what whoever asks may not do."""

    def _scale(self, kind: Kind, namespace: str, name: str, body: Object) -> Object:
        if kind.name not in SCALED or self.command not in ("GET", "PATCH"):
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        found = self.store.get(kind, namespace, name)
        if self.command == "PATCH":
            if self.headers.get("Content-Type") != "application/merge-patch+json":
                raise Refused(415, "UnsupportedMediaType", "a scale takes merge patches here")
            replicas = body["spec"]["replicas"]
            if not isinstance(replicas, int) or replicas < 0:
                raise Refused(422, "Invalid", "spec.replicas: must be greater than or equal to 0")
            patch = {"metadata": {"name": name}, "spec": {"replicas": replicas}}
            found = self.store.write(kind, namespace, name, patch, how="merge", dry=False)
        metadata = {key: found["metadata"][key] for key in ("name", "namespace", "uid", "resourceVersion")}
        spec = {"replicas": count} if (count := found["spec"]["replicas"]) else {}  # 0 is left out
        status = {"replicas": found["status"].get("replicas", 0)}
        received = {"kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": metadata}
        return received | {"spec": spec, "status": status}

    def _place(self, path: str) -> tuple[Kind, str, str]:
        """Which kind, in which namespace, of which name, as far as the path says."""
        for kind in self.store.kinds:
            rest = path.removeprefix(kind.root + "/").split("/") if path.startswith(kind.root + "/") else []
            namespace = rest[1] if kind.namespaced and rest[:1] == ["namespaces"] and len(rest) > 2 else ""
            rest = rest[2:] if namespace else rest
            if rest[:1] == [kind.plural] and len(rest) <= 2:
                return kind, namespace, rest[1] if len(rest) == 2 else ""
        raise Refused(404, "NotFound", f"the server has nothing at {path}")

    def _watch(self, kind: Kind, namespace: str, query: dict[str, str]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.close_connection = True
        try:
            for change in self.store.watch(kind, namespace, query):
                line = json.dumps(change).encode() + b"\n"
                self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                self.wfile.flush()
        except OSError:
            return  # whoever watched has seen enough


def _group(group_version: str) -> Object:
    name, _, version = group_version.partition("/")
    named = {"groupVersion": group_version, "version": version}
    return {"name": name, "versions": [named], "preferredVersion": named}


def _resource(kind: Kind) -> Object:
    verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
    named = {"name": kind.plural, "singularName": kind.name.lower(), "kind": kind.name}
    return named | {"namespaced": kind.namespaced, "verbs": verbs}


def _patched(kind: Kind) -> tuple[str, Object]:
    """Where clients look whether a kind can be applied by the server."""
    group, _, version = kind.group_version.rpartition("/")
    inside = "/namespaces/{namespace}" if kind.namespaced else ""
    known = [{"name": name, "in": "query"} for name in ("dryRun", "fieldValidation", "fieldManager", "force")]
    meant = {"group": group, "version": version, "kind": kind.name}
    patch = {"x-kubernetes-action": "patch", "x-kubernetes-group-version-kind": meant, "parameters": known}
    return f"{kind.root}{inside}/{kind.plural}/{{name}}", {"patch": patch}


@contextmanager
def api_server(*, kuberay: bool) -> Iterator[tuple[str, Store]]:
    """Its address and what it stores."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.store = Store(BUILT_IN + (KUBERAY if kuberay else []))  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", server.store  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
