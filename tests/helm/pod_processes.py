"""Pods of rendered manifests as plain processes: a network namespace each, on one bridge, names in /etc/hosts.

Knows containers, environment, arguments and signals. Images, users, limits and volumes are not taken over, but for
private /tmp/ray and /dev/shm, and for the cluster file, which is written where each argument then points.
"""

import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chart import ROOT, Object, cluster_file, of_kind

from workers.model.store import cache_folder

CONFIG = "/etc/diptych"
TOKEN = "a" * 64


def why_not() -> str:
    """Why pods cannot be processes here; empty: they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    return "" if shutil.which("ip") else "there is no ip (iproute2)"


class PodProcesses:
    """Owned by `pod_processes`. `names` are those of workloads without the release's."""

    def __init__(self, objects: tuple[Object, ...], folder: Path) -> None:
        workloads = of_kind(objects, "StatefulSet") + of_kind(objects, "Deployment")
        self.specs = {each["metadata"]["name"]: each["spec"]["template"]["spec"] for each in workloads}
        self.addresses = {name: f"10.88.7.{index + 2}" for index, name in enumerate(self.specs)}
        self.bridge = f"pods{secrets.token_hex(4)}"
        self._folder = folder
        (folder / "cluster.yaml").write_text(cluster_file(objects))

    def namespace(self, name: str) -> str:
        return f"{self.bridge}-{name}"

    def files(self, name: str) -> Path:
        return Path("/etc/netns") / self.namespace(name)

    def open(self, services: dict[str, str]) -> None:
        """`services`: for each name of a Service the pod behind it."""
        _ip("link", "add", self.bridge, "type", "bridge")
        _ip("link", "set", self.bridge, "up")
        known = "".join(f"{self.addresses[pod]} {service}\n" for service, pod in services.items())
        for index, (name, address) in enumerate(self.addresses.items()):
            space, cable = self.namespace(name), f"{self.bridge}-{index}"
            _ip("netns", "add", space)
            _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", cable, "master", self.bridge, "up")
            _ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", space, "link", "set", device, "up")
            _ip("-n", space, "route", "add", "default", "dev", "eth0")
            self.files(name).mkdir(parents=True)
            (self.files(name) / "hosts").write_text("127.0.0.1 localhost\n" + known)
            (self.files(name) / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")

    def start(self, name: str, container: Object) -> subprocess.Popen[bytes]:
        """The container in this pod. What it says goes to `log`."""
        command = [
            each.replace("$(POD_IP)", self.addresses[name]).replace(CONFIG, str(self._folder))
            for each in container.get("command", []) + container.get("args", [])
        ]
        own = self._folder / f"ray-{name}"
        own.mkdir(exist_ok=True)
        private = f"mkdir -p /tmp/ray && mount --bind {own} /tmp/ray && mount -t tmpfs tmpfs /dev/shm"
        with self.log(name, container).open("wb") as log:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.namespace(name), "sh", "-c", f"{private} && exec {shlex.join(command)}"],
                env=self._environment(name, container),
                stdout=log,
                stderr=log,
            )

    def log(self, name: str, container: Object) -> Path:
        return self._folder / f"{name}-{container['name']}.log"

    def status(self, caller: str, url: str) -> str:
        """The HTTP status that a URL has for this pod."""
        ask = f"import urllib.request as r; print(r.urlopen({url!r}, timeout=5).status)"
        done = subprocess.run(
            ["ip", "netns", "exec", self.namespace(caller), sys.executable, "-c", ask], capture_output=True, text=True
        )
        return done.stdout.strip() or done.stderr.strip().splitlines()[-1]

    def _environment(self, name: str, container: Object) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        given = {"PATH": path, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}
        for each in container["env"]:
            origin = each.get("valueFrom", {})
            fallback = self.addresses[name] if "fieldRef" in origin else TOKEN
            given[each["name"]] = each.get("value", fallback)
        return given | {"DIPTYCH_CACHE": str(cache_folder())}

    def close(self) -> None:
        """Everything in the namespaces ends, and they go."""
        for index, name in enumerate(self.addresses):
            found = subprocess.run(["ip", "netns", "pids", self.namespace(name)], capture_output=True, text=True)
            for pid in found.stdout.split():
                os.kill(int(pid), signal.SIGKILL)
            for gone in (("link", "del", f"{self.bridge}-{index}"), ("netns", "del", self.namespace(name))):
                subprocess.run(["ip", *gone], capture_output=True)
            shutil.rmtree(self.files(name), ignore_errors=True)
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True)


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True)


@contextmanager
def pod_processes(objects: tuple[Object, ...], folder: Path, services: dict[str, str]) -> Iterator[PodProcesses]:
    pods = PodProcesses(objects, folder)
    try:
        pods.open(services)
        yield pods
    finally:
        pods.close()
