"""What Kubernetes does with a release, as far as it matters here: StatefulSets, Deployments, bare pods and Services.

Follows the objects of the API server (`api_server.Store`), rolls pods by the strategies of their workloads, lets names
lead to pods, and writes statuses back, so that `helm --wait` waits for real pods. Runs in a thread of its own.
"""

import asyncio
import base64
import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tests.frontend.http.certificates import Authority
from tests.helm import api_server
from tests.helm.api_server import BORN, Kind, Store
from tests.helm.chart import Object
from tests.helm.pod import Pod
from tests.helm.pod_network import Place, PodNetwork, pod_network
from tests.helm.service_accounts import Accounts, door_for_pods

LOOK_S = 0.2
NAMESPACE, API_PORT = "llm", 6443
HERE = Path(__file__).parent

T = TypeVar("T")


@dataclass(frozen=True)
class Door:
    """A Service with an address of its own."""

    place: Place
    ready: Path
    process: "subprocess.Popen[bytes]"


class Kubelet:
    """Owned by `kubelet`. Everything but `call` and what it reads happens on its own loop."""

    def __init__(self, store: Store, network: PodNetwork, folder: Path, accounts: Accounts, api: Place) -> None:
        self.folder = folder
        self.pods: list[Pod] = []
        self.past: list[Pod] = []
        self._store = store
        self._network = network
        self._accounts = accounts
        self._api = api
        self._doors: dict[str, Door] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._count = 0
        self._published: object = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.failure: BaseException | None = None
        store.status = self._status

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float = 120.0) -> T:
        """Run this where the pods live."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def pods_of(self, component: str) -> list[Pod]:
        label = "app.kubernetes.io/component"
        return [each for each in self.pods if each.labels.get(label) == component and not each.gone]

    def told(self) -> str:
        """The last words of all pods."""
        logs = sorted(self.folder.rglob("*.log"))
        return "\n".join(f"== {each}\n{each.read_text(errors='replace')[-1500:]}" for each in logs)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        async def ended() -> None:
            self._following.cancel()
            for task in self._ending:
                task.cancel()
            for each in self.pods:
                each.close()

        self.call(ended())
        for door in self._doors.values():
            door.process.kill()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._following = self._loop.create_task(self._follow())
        self._loop.run_forever()

    async def _follow(self) -> None:
        while True:
            try:
                self._look()
            except Exception as error:
                self.failure = error
                raise
            await asyncio.sleep(LOOK_S)

    # ---- workloads -------------------------------------------------------------------------------------------

    def _all(self, kind: str) -> list[tuple[Kind, Object]]:
        known = next(each for each in self._store.kinds if each.name == kind)
        return [(known, each) for each in self._store.all(known, NAMESPACE, {})]

    def _look(self) -> None:
        self.past += [each for each in self.pods if each.gone]
        self.pods = [each for each in self.pods if not each.gone]
        wanted = set()
        for kind, workload in self._all("StatefulSet") + self._all("Deployment"):
            name = workload["metadata"]["name"]
            wanted.add(name)
            own = [each for each in self.pods if each.folder.parent.name == name]
            roll = self._stateful if kind.name == "StatefulSet" else self._deployed
            roll(name, workload["spec"], own, revision_of(workload["spec"]["template"]))
            self._tell(kind, workload, own)
        for kind, bare in self._all("Pod"):
            wanted.add(bare["metadata"]["name"])
            self._once(kind, bare)
        for each in self.pods:
            if each.failure is not None:
                raise each.failure
            if each.folder.parent.name not in wanted:
                self._end(each)
        self._lead()

    def _stateful(self, name: str, spec: Object, own: list[Pod], revision: str) -> None:
        """All at once to begin with; one at a time, the last first, when the template is another one."""
        names = [f"{name}-{ordinal}" for ordinal in range(spec["replicas"])]
        there = {each.name: each for each in own}
        for each in own:
            if each.name not in names:
                self._end(each)
        for missing in [each for each in names if each not in there]:
            self._begin(missing, name, spec["template"], revision)
        if any(not each.ready or each.ending for each in own) or len(own) < len(names):
            return
        old = [each for each in names if there[each].revision != revision]
        if old:
            self._end(there[old[-1]])

    def _deployed(self, name: str, spec: Object, own: list[Pod], revision: str) -> None:
        new = [each for each in own if each.revision == revision and not each.ending]
        old = [each for each in own if each.revision != revision and not each.ending]
        replicas = spec["replicas"]
        if spec["strategy"]["type"] == "Recreate":
            for each in old:
                self._end(each)
            if not own:
                self._begin(f"{name}-{revision[:6]}", name, spec["template"], revision)
            return
        if len(new) < replicas and len(new) + len(old) < replicas + spec["strategy"]["rollingUpdate"]["maxSurge"]:
            self._count += 1
            self._begin(f"{name}-{revision[:6]}-{self._count}", name, spec["template"], revision)
        for each in new[replicas:]:
            self._end(each)
        spare = sum(each.ready for each in new + old) - replicas
        for each in sorted(old, key=lambda each: each.ready):
            if not each.ready or spare > 0:
                spare -= each.ready
                self._end(each)

    def _once(self, kind: Kind, bare: Object) -> None:
        name = bare["metadata"]["name"]
        found = next((each for each in self.pods + self.past if each.name == name), None)
        if found is None:
            template = {"metadata": bare["metadata"], "spec": bare["spec"]}
            self._begin(name, name, template, revision_of(template))
        elif found.exit_code is not None and bare["status"]["phase"] == "Pending":
            phase = "Succeeded" if found.exit_code == 0 else "Failed"
            self._store.observe(kind, NAMESPACE, name, api_server.ready(bare) | {"phase": phase})

    def _begin(self, name: str, owner: str, template: Object, revision: str) -> None:
        self._count += 1
        folder = self.folder / owner / f"{name}.{self._count}"
        secrets, api = (self._secret, self._account), (self._api.address, API_PORT)
        pod = Pod(name, template, revision, folder, self._network, *secrets, api, self._lead)
        (config,) = [each for _, each in self._all("ConfigMap") if "cluster.yaml" in each["data"]]
        (folder / "cluster.yaml").write_text(config["data"]["cluster.yaml"])
        self.pods.append(pod)

    def _end(self, pod: Pod) -> None:
        if not pod.ending:
            task = asyncio.ensure_future(pod.end())
            self._ending.add(task)
            task.add_done_callback(self._ended)
            pod.ending = True

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._ending.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.failure = task.exception()

    def _secret(self, name: str) -> dict[str, str]:
        (secret,) = [each for _, each in self._all("Secret") if each["metadata"]["name"] == name]
        data = {key: base64.b64decode(value).decode() for key, value in secret.get("data", {}).items()}
        return data | secret.get("stringData", {})

    def _account(self, name: str) -> dict[str, str]:
        assert name in [each["metadata"]["name"] for _, each in self._all("ServiceAccount")], f"{name} is not there"
        return self._accounts.files(NAMESPACE, name)

    # ---- statuses --------------------------------------------------------------------------------------------

    def _status(self, written: Object) -> Object:
        """Of an object that was just written."""
        match written["kind"]:
            case "StatefulSet" | "Deployment":
                return written.get("status") or {"observedGeneration": 0, "replicas": 0}
            case "Pod":
                return {"phase": "Pending"}
            case _:
                return api_server.ready(written)

    def _tell(self, kind: Kind, workload: Object, own: list[Pod]) -> None:
        revision = revision_of(workload["spec"]["template"])
        updated = [each for each in own if each.revision == revision and not each.ending]
        counts = {
            "replicas": len(own),
            "readyReplicas": sum(each.ready for each in own),
            "availableReplicas": sum(each.ready for each in own),
            "updatedReplicas": len(updated),
        }
        done = len(own) == len(updated) == workload["spec"]["replicas"] == counts["readyReplicas"]
        status = {"observedGeneration": workload["metadata"]["generation"]} | counts
        if kind.name == "StatefulSet":
            status |= {"updateRevision": revision, "currentRevision": revision if done else "old"}
            status |= {"currentReplicas": len(updated)}
        else:
            reason = "NewReplicaSetAvailable" if done else "ReplicaSetUpdated"
            stamp = {"lastTransitionTime": BORN}
            available = {"type": "Available", "status": "True" if done else "False", **stamp}
            status |= {"conditions": [available, {"type": "Progressing", "status": "True", "reason": reason, **stamp}]}
        if status != workload.get("status"):
            self._store.observe(kind, NAMESPACE, workload["metadata"]["name"], status)

    # ---- Services --------------------------------------------------------------------------------------------

    def _lead(self) -> None:
        """Let names lead to pods."""
        known: dict[str, list[str]] = {}
        for _, service in self._all("Service"):
            name, spec = service["metadata"]["name"], service["spec"]
            chosen = [each for each in self.pods if not each.gone and spec["selector"].items() <= each.labels.items()]
            ready = sorted(each.place.address for each in chosen if each.ready)
            if spec.get("clusterIP") == "None":
                anyhow = spec.get("publishNotReadyAddresses")
                known[name] = sorted(each.place.address for each in chosen) if anyhow else ready
                continue
            door = self._doors.get(name) or self._open(name, spec["ports"])
            part = door.ready.with_suffix(".part")  # whoever reads meanwhile finds a whole one
            part.write_text("\n".join(ready))
            part.replace(door.ready)
            known[name] = [door.place.address]
        known |= {f"{name}.{NAMESPACE}.svc": addresses for name, addresses in known.items()}
        if known != self._published:
            self._published = known
            self._network.names(known)

    def _open(self, name: str, ports: list[Object]) -> Door:
        place, ready = self._network.add(name), self.folder / f"{name}.ready"
        ready.write_text("")
        pairs = [f"{each['port']}:{each['targetPort']}" for each in ports]
        command = [sys.executable, str(HERE / "service_proxy.py"), str(ready), place.address, *pairs]
        self._doors[name] = Door(place, ready, subprocess.Popen(place.inside(*command)))
        return self._doors[name]


def revision_of(template: Object) -> str:
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()


@contextmanager
def kubelet(store: Store, folder: Path) -> Iterator[tuple[Kubelet, Place]]:
    """And a place for those who ask from outside of all pods."""
    with pod_network() as network, ExitStack() as stack:
        api = network.add("kubernetes")
        authority = Authority(folder, "kubernetes")
        listening = network.listen(api, API_PORT)
        pair = authority.sign("kubernetes", api.address)
        accounts = stack.enter_context(door_for_pods(store, authority, pair, listening))
        running = Kubelet(store, network, folder, accounts, api)
        outside = network.add("outside")
        running.start()
        try:
            yield running, outside
        finally:
            running.close()
