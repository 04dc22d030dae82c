"""One pod as processes: its containers with their rendered commands, probes, hooks and signals, in its own namespaces.

As under Kubernetes: init containers first, then the container, which is started again when it ends; the pod is ready
when its probes say so; to end, the preStop hook, SIGTERM to the first process, and SIGKILL when the grace is over. Each
container has process ids, /proc, /tmp/ray and /dev/shm of its own, and its Secrets below a folder of the pod instead of
`CONFIG`, with the files of its service account beside them. Images, users, limits and other volumes are not taken over,
and probes are asked every PROBE_S at most.
"""

import asyncio
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.helm.chart import ROOT, Object
from tests.helm.pod_network import Place, PodNetwork
from workers.model.content import cache_folder

CONFIG = "/etc/diptych"
PROBE_S = 1.0
AGAIN_S = 2.0
HERE = Path(__file__).parent
RAY = Path("/tmp/ray")


@dataclass
class Pod:
    """Owned by the kubelet. `secret`: the data of a Secret. `account`: files of a service account. `api`: where the API
    server is. `changed`: called when something became of it.
    """

    name: str
    template: Object
    revision: str
    folder: Path
    network: PodNetwork
    secret: Callable[[str], dict[str, str]]
    account: Callable[[str], dict[str, str]]
    api: tuple[str, int]
    changed: Callable[[], None]
    ready: bool = False
    ending: bool = False
    gone: bool = False
    exit_code: int | None = None
    hooks: list[tuple[int, str]] = field(default_factory=list)
    killed: bool = False
    restarts: int = 0
    born_s: float = field(default_factory=time.monotonic)
    ready_s: float | None = None

    def __post_init__(self) -> None:
        self.place: Place = self.network.add(self.name)
        self.folder.mkdir(parents=True)
        self._write_secrets()
        self._first: int | None = None  # process id of the container's process 1
        self._main: asyncio.subprocess.Process | None = None
        self._env: dict[str, str] = {}  # of the container
        self._living = asyncio.ensure_future(self._live())

    @property
    def failure(self) -> BaseException | None:
        """Of this runner, not of what runs."""
        is_over = self._living.done() and not self._living.cancelled()
        return self._living.exception() if is_over else None

    @property
    def spec(self) -> Object:
        spec: Object = self.template["spec"]
        return spec

    @property
    def labels(self) -> dict[str, str]:
        labels: dict[str, str] = self.template["metadata"].get("labels", {})
        return labels

    @property
    def _account(self) -> Path:
        return self.folder / "serviceaccount"

    def log(self, container: str) -> Path:
        return self.folder / f"{container}.log"

    async def _live(self) -> None:
        """Until it is ended; a bare pod until its container ends."""
        for each in self.spec.get("initContainers", []):
            while await (await self._start(each)).wait() != 0:
                await asyncio.sleep(AGAIN_S)
        (container,) = self.spec["containers"]
        self._env = self._environment(container)
        while True:
            self._main = await self._start(container)
            self._first = await self._first_process(self._main)
            probing = asyncio.ensure_future(self._probe(container))
            code = await self._main.wait()
            probing.cancel()
            self._say(f"container ended with {code}")
            self._ready(False)
            if self.ending or self.spec.get("restartPolicy") == "Never":
                self.exit_code = code
                return self.changed()
            self.restarts += 1
            await asyncio.sleep(AGAIN_S)

    async def end(self) -> None:
        """preStop, SIGTERM, and SIGKILL after the grace; then the namespace goes."""
        self.ending = True
        self._ready(False)
        self.changed()
        deadline_s = time.monotonic() + self.spec.get("terminationGracePeriodSeconds", 30)
        hook = self.spec["containers"][0].get("lifecycle", {}).get("preStop", {}).get("exec")
        if self._main is None or self._main.returncode is not None or self._first is None:
            self._living.cancel()
        else:
            if hook:
                said, code = await self.run(*hook["command"], timeout_s=deadline_s - time.monotonic())
                self.hooks.append((code, said.strip()))
                self._say(f"preStop ended with {code}: {said.strip()}")
            self._signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(asyncio.shield(self._living), max(0.1, deadline_s - time.monotonic()))
            except TimeoutError:
                self.killed = True
                self._signal(signal.SIGKILL)
        await asyncio.wait([self._living])
        self.close()

    def close(self) -> None:
        """At once."""
        self._living.cancel()
        self.gone = True
        self.network.remove(self.place)
        self.changed()

    def _signal(self, number: signal.Signals) -> None:
        assert self._first is not None
        try:
            os.kill(self._first, number)
        except ProcessLookupError:
            self._say("it had ended already")

    async def run(self, *command: str, timeout_s: float = 60.0) -> tuple[str, int]:
        """Like `kubectl exec`: what it said, and its exit code."""
        inside = ["nsenter", "-t", str(self._first), "-m", "-n", "-p", "-u", "--", *self._filled(command)]
        process = await asyncio.create_subprocess_exec(
            *("setpriv", "--pdeathsig", "KILL", *inside),
            env=self._env,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            out, _ = await asyncio.wait_for(process.communicate(), timeout_s)
        except TimeoutError:
            process.kill()
            return "it did not end in time", 124
        assert process.returncode is not None
        return out.decode(), process.returncode

    async def _start(self, container: Object) -> asyncio.subprocess.Process:
        command = self._filled(container.get("command", []) + container.get("args", []))
        own = self.folder / "ray"
        for each in (own, RAY):
            each.mkdir(exist_ok=True)
        private = f"mount --bind {own} {RAY} && mount -t tmpfs tmpfs /dev/shm && hostname {self.name}"
        apart = ["unshare", "--pid", "--uts", "--mount-proc", "--kill-child", "--fork"]
        with self.log(container["name"]).open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *self.place.inside(*apart, "sh", "-c", f"{private} && exec {shlex.join(command)}"),
                env=self._environment(container),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    async def _first_process(self, process: asyncio.subprocess.Process) -> int | None:
        while process.returncode is None:
            if found := children_of(process.pid):
                return found[0]
            await asyncio.sleep(0.05)
        return None

    async def _probe(self, container: Object) -> None:
        ports = {each["name"]: each["containerPort"] for each in container.get("ports", [])}
        probes, failed, started = {}, 0, "startupProbe" not in container
        for name in ("startupProbe", "readinessProbe", "livenessProbe"):
            for kind in ("httpGet", "grpc", "tcpSocket"):
                if asked := container.get(name, {}).get(kind):
                    port = ports.get(asked["port"], asked["port"])
                    probes[name] = {kind: asked | {"port": port, "host": self.place.address}}
        command = [sys.executable, str(HERE / "probing.py"), str(PROBE_S), json.dumps(probes)]
        asking = await asyncio.create_subprocess_exec(
            *self.place.inside(*command), env=self._environment(container), stdout=asyncio.subprocess.PIPE
        )
        try:
            assert asking.stdout is not None
            while line := await asking.stdout.readline():
                name, passed = json.loads(line)
                started = started or (name == "startupProbe" and passed)
                if started and name == "readinessProbe":
                    self._ready(passed)
                if started and name == "livenessProbe":
                    failed = 0 if passed else failed + 1
                    period_s = container[name].get("periodSeconds", 10)
                    if failed * PROBE_S > container[name].get("failureThreshold", 3) * period_s and not self.ending:
                        self._say("liveness probe failed")
                        self._signal(signal.SIGKILL)
        finally:
            if asking.returncode is None:
                asking.kill()

    def _ready(self, ready: bool) -> None:
        ready = ready and not self.ending
        if ready != self.ready:
            self.ready = ready
            if ready and self.ready_s is None:
                self.ready_s = time.monotonic()
            self._say("ready" if ready else "not ready")
            self.changed()

    def _write_secrets(self) -> None:
        """Where its containers mount them: below a folder of its own instead of `CONFIG`."""
        volumes = {each["name"]: each["secret"] for each in self.spec.get("volumes", []) if "secret" in each}
        for container in self.spec["containers"]:
            for mount in container.get("volumeMounts", []):
                if (volume := volumes.get(mount["name"])) is None:
                    continue
                data, (at,) = self.secret(volume["secretName"]), self._filled((mount["mountPath"],))
                chosen = {each["key"]: each["path"] for each in volume.get("items", [])} or {key: key for key in data}
                Path(at).mkdir()
                for key, path in chosen.items():
                    (Path(at) / path).write_text(data[key])
        if self.spec.get("automountServiceAccountToken"):
            self._account.mkdir()
            for key, text in self.account(self.spec["serviceAccountName"]).items():
                (self._account / key).write_text(text)

    def _filled(self, command: list[str] | tuple[str, ...]) -> list[str]:
        return [each.replace("$(POD_IP)", self.place.address).replace(CONFIG, str(self.folder)) for each in command]

    def _environment(self, container: Object) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        given = {"PATH": path, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}", "PYTHONUNBUFFERED": "1"}
        for each in container.get("env", []):
            origin = each.get("valueFrom", {})
            if "fieldRef" in origin:
                given[each["name"]] = self.place.address
            elif "secretKeyRef" in origin:
                given[each["name"]] = self.secret(origin["secretKeyRef"]["name"])[origin["secretKeyRef"]["key"]]
            else:
                (given[each["name"]],) = self._filled((each["value"],))
        host, port = self.api
        given |= {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": str(port)}
        return given | {"DIPTYCH_CACHE": str(cache_folder()), "DIPTYCH_SERVICE_ACCOUNT": str(self._account)}

    def _say(self, words: str) -> None:
        with (self.folder.parent / "events.log").open("a") as log:
            log.write(f"{time.monotonic():.1f} {self.name}: {words}\n")


def children_of(pid: int) -> list[int]:
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
