"""The network of pods that are processes: a namespace with an address for each, on one bridge, names in /etc/hosts.

All names begin with the number of this process, so runs do not meet, and what a killed one left is found and taken
down by the next. Knows no pod.
"""

import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SUBNET = "10.88"
NAMES = Path("/etc/netns")  # `ip netns exec` binds what lies here for a namespace over /etc
RUN = re.compile(r"dp(\d+)[-bv]")
HOSTS_BYTES = 8192  # files keep their length and are written at once: whoever reads meanwhile finds a whole one


def why_not() -> str:
    """Why pods cannot be processes here; empty: they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [each for each in ("ip", "unshare", "nsenter", "setpriv") if not shutil.which(each)]
    return f"there is no {', '.join(missing)} (iproute2, util-linux)" if missing else ""


@dataclass(frozen=True)
class Place:
    """A network namespace. `name` is what /etc/hosts calls it there."""

    namespace: str
    address: str
    name: str

    def inside(self, *command: str) -> list[str]:
        """The command there; it dies with this process."""
        return ["setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", self.namespace, *command]


class PodNetwork:
    """Owned by `pod_network`."""

    def __init__(self) -> None:
        self._run = f"dp{os.getpid()}"
        self._next = 1
        self._places: dict[Place, None] = {}
        self._known = ""

    def open(self) -> None:
        _ip("link", "add", f"{self._run}b", "type", "bridge")
        _ip("link", "set", f"{self._run}b", "up")

    def add(self, name: str) -> Place:
        index, self._next = self._next, self._next + 1
        place = Place(f"{self._run}-{index}", f"{SUBNET}.{index // 250}.{index % 250 + 2}", name)
        cable = f"{self._run}v{index}"
        folder = NAMES / place.namespace
        folder.mkdir(parents=True)
        (folder / "hosts").write_text(self._hosts(place))
        (folder / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
        self._places[place] = None
        space = place.namespace
        _ip("netns", "add", space)
        _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("link", "set", cable, "master", f"{self._run}b", "up")
        _ip("-n", space, "addr", "add", f"{place.address}/16", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", space, "link", "set", device, "up")
        _ip("-n", space, "route", "add", "default", "dev", "eth0")
        return place

    def listen(self, place: Place, port: int) -> socket.socket:
        """A socket there for somebody who is here."""
        opened: list[socket.socket] = []

        def enter() -> None:  # this thread alone, and it ends
            with open(f"/var/run/netns/{place.namespace}") as there:
                if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), 0) != 0:
                    raise OSError(ctypes.get_errno(), f"cannot enter {place.namespace}")
            opened.append(socket.create_server((place.address, port)))

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        (found,) = opened
        return found

    def remove(self, place: Place) -> None:
        """Whatever runs there ends."""
        self._places.pop(place, None)
        _remove(place.namespace)

    def names(self, known: dict[str, list[str]]) -> None:
        """The addresses of each name, everywhere and from now on."""
        self._known = "".join(f"{address} {name}\n" for name, found in sorted(known.items()) for address in found)
        for place in self._places:
            with (NAMES / place.namespace / "hosts").open("r+") as file:
                file.write(self._hosts(place))

    def _hosts(self, place: Place) -> str:
        return f"127.0.0.1 localhost\n{place.address} {place.name}\n{self._known}".ljust(HOSTS_BYTES, "\n")

    def close(self) -> None:
        _sweep(self._run)


def _ip(*args: str) -> None:
    done = subprocess.run(["ip", *args], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(args)}: {done.stderr.strip()}"


def _namespaces() -> list[str]:
    said = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    return [line.split()[0] for line in said.splitlines() if line]


def _links() -> list[str]:
    said = subprocess.run(["ip", "-o", "link", "show"], capture_output=True, text=True).stdout
    return [line.split(": ")[1].split("@")[0] for line in said.splitlines()]


def _remove(namespace: str) -> None:
    found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True)
    for pid in found.stdout.split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue  # with its parent
    subprocess.run(["ip", "netns", "del", namespace], capture_output=True)
    shutil.rmtree(NAMES / namespace, ignore_errors=True)


def _sweep(run: str) -> None:
    """Take everything of a run down."""
    for name in _namespaces():
        if name.startswith(f"{run}-"):
            _remove(name)
    for name in _links():
        if re.match(rf"{run}[bv]", name):
            subprocess.run(["ip", "link", "del", name], capture_output=True)
    for folder in NAMES.glob(f"{run}-*") if NAMES.exists() else ():
        shutil.rmtree(folder, ignore_errors=True)


def sweep_dead() -> None:
    """What runs left that were killed."""
    there = [*_namespaces(), *_links(), *(each.name for each in NAMES.glob("dp*"))]
    for pid in {found.group(1) for each in there if (found := RUN.match(each))}:
        if pid == str(os.getpid()) or not Path(f"/proc/{pid}").exists():
            _sweep(f"dp{pid}")


@contextmanager
def pod_network() -> Iterator[PodNetwork]:
    sweep_dead()
    network = PodNetwork()
    try:
        network.open()
        yield network
    finally:
        network.close()
