"""Facts about KV transfer on this machine, found by trials.

One child process reads another's memory through NIXL, so the path is the one that UCX really chose. Knows no
cluster and no peer; for a pair's path see `LinkReport`.
"""

import asyncio
import ctypes
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from kvtransfer.errors import TransferError, TransportUnavailable
from kvtransfer.host import host_identity, rdma_devices, siblings_may_share_memory
from kvtransfer.layout import KVLayout
from kvtransfer.ticket import ShardAddress
from kvtransfer.transport import Region

ROOT = Path(__file__).resolve().parent.parent
PATIENCE_S = 30.0
UNSET = "(unset)"


@dataclass(frozen=True, slots=True)
class TransferFacts:
    """`nixl_path`: UCX's report on a read between two processes here, or why there was none."""

    nixl_module: str
    ucx_version: str
    nixl_path: str
    cma: str  # "allowed", or why one process may not read another's memory
    rdma_devices: tuple[str, ...]
    ucx_tls: str
    ucx_net_devices: str


def transfer_facts() -> TransferFacts:
    """Takes a few seconds and four short-lived processes. Blocks: call it off the event loop."""
    try:
        module, version, path = _try_nixl()
    except (TransportUnavailable, OSError, subprocess.SubprocessError) as error:
        module, version, path = "not usable", "unknown", str(error)
    return TransferFacts(
        nixl_module=module,
        ucx_version=version,
        nixl_path=path,
        cma=siblings_may_share_memory() or "allowed",
        rdma_devices=rdma_devices(),
        ucx_tls=os.environ.get("UCX_TLS", UNSET),
        ucx_net_devices=os.environ.get("UCX_NET_DEVICES", UNSET),
    )


def _try_nixl() -> tuple[str, str, str]:
    """Module, UCX version and path, reported by a child process that reads another child's memory."""
    command = [sys.executable, "-m", "kvtransfer.doctor"]
    owner = subprocess.Popen(
        [*command, "own"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT
    )
    try:
        assert owner.stdout is not None
        address = owner.stdout.readline().strip()
        reader = subprocess.run(
            [*command, "read", address], capture_output=True, text=True, timeout=PATIENCE_S, cwd=ROOT
        )
    finally:
        owner.kill()
        owner.communicate()
    lines = reader.stdout.splitlines()
    if len(lines) != 3:
        output = (reader.stderr or reader.stdout).strip().splitlines() or ["no output"]
        raise TransportUnavailable(f"the trial over NIXL failed: {output[-1]}")
    return lines[0], lines[1], lines[2]


def _region() -> Region:
    layout = KVLayout("doctor", num_layers=1, num_kv_heads=1, head_dim=16, block_size=16)
    buffer = ctypes.create_string_buffer(4 * layout.block_bytes)
    return Region(layout, 4, ctypes.addressof(buffer), buffer)


def _own() -> None:
    from kvtransfer.backends.nixl import NixlTransport

    transport = NixlTransport(_region(), identity=host_identity(), quarantine_s=1.0)
    print(transport.address().hex(), flush=True)
    sys.stdin.read()


async def _read(address: bytes) -> None:
    from kvtransfer.backends.nixl import NixlTransport
    from kvtransfer.backends.nixl_agent import load_nixl

    region = _region()
    transport = NixlTransport(region, identity=host_identity(), quarantine_s=1.0)
    shard = ShardAddress(0, region.layout, region.num_blocks, (("nixl", address),))
    try:
        path = await transport.connect("doctor", shard, deadline_s=PATIENCE_S / 2)
    except TransferError as error:
        path = f"refused: {error}"
    print(load_nixl().__name__.removesuffix("._api"), ucx_version(), path, sep="\n", flush=True)
    await transport.close()


def ucx_version() -> str:
    """The version of the UCX that this process has loaded; "unknown" when there is none."""
    found = re.search(r"(/\S*libucp[^/\s]*\.so\S*)$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    if not found:
        return "unknown"
    version = ctypes.CDLL(found.group(1)).ucp_get_version_string
    version.restype = ctypes.c_char_p
    text = version()
    return text.decode() if isinstance(text, bytes) else "unknown"


def main(arguments: list[str]) -> None:
    """One of the two processes of the trial."""
    if arguments == ["own"]:
        _own()
    else:
        asyncio.run(_read(bytes.fromhex(arguments[1])))


if __name__ == "__main__":
    main(sys.argv[1:])
