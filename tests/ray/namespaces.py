"""Two nodes on one machine: a network namespace each, a veth pair between them, a Ray node in each.

    host (tests) ── relay ── │ left 10.77.0.1 ══ veth ══ right 10.77.0.2 │
                             └──────── one pid namespace of both ────────┘

Nothing here has a name or a file outside: the namespaces live as long as two `cat`s that read from this process. When
it ends, in whatever way, they do too; the kernel then kills every process inside and takes link and files away.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.ray.served import ROOT, START_S, STOP_S

LEFT, RIGHT, PREFIX = "10.77.0.1", "10.77.0.2", 24
DEVICE = "link0"
RAY_PORT = 6379
RAY_FOLDER = "/dev/shm/ray"  # short, because socket paths are limited
COMMAND_S = 10.0
RAY_START_S = 90.0
TBF = ("burst", "128kb", "latency", "50ms")
BURST_BYTES = 128 << 10
CLONE_NEWNET = 0x40000000
ALONE = ("unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
OWN_FILES = "mount -t sysfs sysfs /sys && mount -t tmpfs tmpfs /dev/shm"  # /sys of this network namespace
TRIAL = (
    f"{OWN_FILES} && ip link add name {DEVICE} type veth peer name {DEVICE}b && "
    f"tc qdisc add dev {DEVICE} root tbf rate 1gbit {' '.join(TBF)}"
)


def why_not() -> str:
    """Why two nodes cannot be created here, or an empty text."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc", "unshare", "nsenter", "pgrep") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} not found (packages iproute2, util-linux and procps)"
    done = subprocess.run([*ALONE, "sh", "-c", TRIAL], capture_output=True, text=True, timeout=COMMAND_S)
    return f"namespaces, veth or tbf are not permitted here: {done.stderr.strip()}" if done.returncode else ""


@dataclass(frozen=True)
class Node:
    """A network namespace with one address; the process `holder` keeps it alive."""

    address: str
    holder: psutil.Process

    def inside(self, *command: str) -> tuple[str, ...]:
        """The command line that runs `command` on this node."""
        return ("nsenter", f"--target={self.holder.pid}", "--net", "--pid", "--mount", *command)

    def run(self, *command: str, env: dict[str, str] | None = None, timeout_s: float = COMMAND_S) -> str:
        """The output of `command`, which must succeed."""
        done = subprocess.run(self.inside(*command), capture_output=True, text=True, env=env, timeout=timeout_s)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def network(self, pid: int | str = "self") -> str:
        """The network namespace of a process, by its pid inside the nodes."""
        return self.run("readlink", f"/proc/{pid}/ns/net")

    def socket(self) -> socket.socket:
        """A socket of this node in our process: a socket stays in the namespace of the thread that created it."""
        with ThreadPoolExecutor(1) as thread, open(f"/proc/{self.holder.pid}/ns/net") as network:
            return thread.submit(_socket_in, network.fileno()).result()


def _socket_in(network: int) -> socket.socket:
    """Move this thread into the node's network for good; the thread must end afterwards."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(network, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns to a node")
    return socket.socket()


@dataclass(frozen=True)
class Link:
    """The veth pair between the nodes."""

    left: Node
    right: Node

    def shape(self, bits_per_s: int) -> None:
        """Limit each side to BURST_BYTES + bits_per_s / 8 * t bytes in any time t."""
        for node in (self.left, self.right):
            node.run("tc", "qdisc", "replace", "dev", DEVICE, "root", "tbf", "rate", f"{bits_per_s}bit", *TBF)

    def free(self) -> None:
        for node in (self.left, self.right):
            node.run("tc", "qdisc", "replace", "dev", DEVICE, "root", "pfifo")

    def cut(self) -> None:
        """Lose every packet on its way, and tell nobody: frames go to an address that nobody has."""
        for node, other in self._ways:
            nobody = ("lladdr", "02:00:00:00:00:99", "nud", "permanent", "dev", DEVICE)
            node.run("ip", "neighbor", "replace", other.address, *nobody)

    def heal(self) -> None:
        for node, other in self._ways:
            node.run("ip", "neighbor", "del", other.address, "dev", DEVICE)

    @property
    def _ways(self) -> tuple[tuple[Node, Node], ...]:
        return (self.left, self.right), (self.right, self.left)


@contextmanager
def linked_nodes() -> Iterator[Link]:
    """Both namespaces and their link; all processes inside are killed at the end."""
    with _nodes() as (left, right):
        cable = ("link", "add", "name", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", str(right.holder.pid))
        into = ("nsenter", f"--target={left.holder.pid}", "--net")  # not its pid namespace: ip gets a pid of ours
        subprocess.run([*into, "ip", *cable], check=True, timeout=COMMAND_S)
        for node in (left, right):
            node.run("ip", "address", "add", f"{node.address}/{PREFIX}", "dev", DEVICE)
            for device in ("lo", DEVICE):
                node.run("ip", "link", "set", device, "up")
        yield Link(left, right)


@contextmanager
def _nodes() -> Iterator[tuple[Node, Node]]:
    """Two unconnected namespaces."""
    hold = ("sh", "-c", f"{OWN_FILES} && exec cat")
    with _held(*ALONE, *hold) as holder:
        beside = ("nsenter", f"--target={holder.pid}", "--pid", "--mount", "unshare", "--net", "--mount")
        with _held(*beside, *hold) as other:
            yield Node(LEFT, holder), Node(RIGHT, other)


@contextmanager
def _held(*command: str) -> Iterator[psutil.Process]:
    """Run `command`, which execs `cat`; yields its process, and ends it with everything inside its namespaces."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"\n", f"{' '.join(command)} ended"
        (holder,) = psutil.Process(process.pid).children() or [psutil.Process(process.pid)]
        yield holder
    finally:
        process.stdin.close()  # cat ends; it is the init of its pid namespace, so all processes inside end too
        process.wait(COMMAND_S)
        process.stdout.close()


@asynccontextmanager
async def served_on(link: Link, document: dict[str, Any], **environment: str) -> AsyncIterator[str]:
    """`diptych serve` on the left of two Ray nodes; yields a host endpoint forwarded to its gRPC server.

    The Ray nodes have custom resources {left: 1} and {right: 1}, and live as long as `link`. At the end, serve gets
    its Ctrl-C and must end well.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "UCX_"))}
    ray = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_DISABLE_IMPORT_WARNING": "1"}
    paths = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "proto"))), "PYTHONUNBUFFERED": "1"}
    env = clean | ray | paths | environment
    head = f"{link.left.address}:{RAY_PORT}"
    heading = ("--head", f"--port={RAY_PORT}", "--include-dashboard=false", f"--temp-dir={RAY_FOLDER}")
    for node, name, role in ((link.left, "left", heading), (link.right, "right", (f"--address={head}",))):
        await asyncio.to_thread(node.run, *_ray_start(node, name), *role, env=env, timeout_s=RAY_START_S)
    process = await asyncio.create_subprocess_exec(
        *link.left.inside(sys.executable, "-m", "cluster.cli", "serve", "-f", "/dev/stdin"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=env | {"RAY_ADDRESS": head},
        cwd=ROOT,
        start_new_session=True,
    )
    lines: list[str] = []
    try:
        async with asyncio.timeout(START_S):
            await _tell(process, yaml.safe_dump(document))
            port = await _grpc_port(process, lines)
        async with _relayed(link.left, port) as endpoint:
            yield endpoint
    finally:
        await _interrupt(process, lines)
    assert process.returncode == 0, f"serve ended with {process.returncode}: " + "\n".join(lines)


def _ray_start(node: Node, name: str) -> tuple[str, ...]:
    return (
        str(Path(sys.executable).with_name("ray")), "start", f"--node-ip-address={node.address}", "--num-cpus=2",
        f"--resources={json.dumps({name: 1})}", "--object-store-memory=100000000", "--disable-usage-stats",
    )  # fmt: skip


async def _tell(process: asyncio.subprocess.Process, text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(text.encode())
    await process.stdin.drain()
    process.stdin.close()


async def _grpc_port(process: asyncio.subprocess.Process, lines: list[str]) -> int:
    """The port that serve prints."""
    assert process.stdout is not None
    async for raw in process.stdout:
        lines.append(raw.decode(errors="replace").rstrip())
        if lines[-1].startswith("ready: grpc://"):
            return int(lines[-1].rpartition(":")[2])
    raise AssertionError("serve ended: " + "\n".join(lines))


async def _interrupt(process: asyncio.subprocess.Process, lines: list[str]) -> None:
    """Press Ctrl-C in the serve below nsenter; kill it after a timeout."""
    assert process.stdout is not None
    inner = psutil.Process(process.pid).children() if process.returncode is None else []
    for each in inner:
        each.send_signal(signal.SIGINT)
    try:
        async with asyncio.timeout(STOP_S):
            lines.extend((await process.stdout.read()).decode(errors="replace").splitlines())
    except TimeoutError:
        for each in inner:
            each.kill()
    await process.wait()


@asynccontextmanager
async def _relayed(node: Node, port: int) -> AsyncIterator[str]:
    """An endpoint on the host; connections are forwarded to `port` on the node's loopback."""
    ends: set[asyncio.StreamWriter] = set()
    carriers: set[asyncio.Task[None]] = set()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        beyond = node.socket()
        beyond.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(beyond, ("127.0.0.1", port))
        except OSError:
            beyond.close()
            writer.close()
            return
        far_reader, far_writer = await asyncio.open_connection(sock=beyond)
        ends.update((writer, far_writer))
        await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
        ends.difference_update((writer, far_writer))

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(carry(reader, writer))
        carriers.add(task)
        task.add_done_callback(carriers.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in ends:
            writer.close()
        await asyncio.gather(*carriers, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forward one direction of a connection."""
    with contextlib.suppress(ConnectionError):  # the other direction ends as well
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()
