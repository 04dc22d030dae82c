"""Facts about KV transfer on this machine, found by trials.

One child process reads another's memory through a backend, so the path is the one that was really taken. Knows no
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

import numpy as np

from kvtransfer.errors import TransferError, TransportUnavailable
from kvtransfer.host import host_identity, rdma_devices
from kvtransfer.layout import KVLayout
from kvtransfer.ticket import ShardAddress
from kvtransfer.transport import Region, Transport

ROOT = Path(__file__).resolve().parent.parent
PATIENCE_S = 30.0
UNSET = "(unset)"
LAYOUT = KVLayout("doctor", num_layers=1, num_kv_heads=1, head_dim=16, block_size=16)
NUM_BLOCKS = 4


@dataclass(frozen=True, slots=True)
class TransferFacts:
    """`nixl_path`: UCX's report on a read between two processes here, or why there was none. `cuda_ipc`: the same
    for the first GPU; "no GPU" without one.
    """

    nixl_module: str
    ucx_version: str
    nixl_path: str
    cuda_ipc: str
    rdma_devices: tuple[str, ...]
    ucx_tls: str
    ucx_net_devices: str


def transfer_facts(*, has_gpu: bool = False) -> TransferFacts:
    """Takes a few seconds and some short-lived processes. Blocks: call it off the event loop."""
    try:
        path, module, version = _try("nixl")
    except (TransportUnavailable, OSError, subprocess.SubprocessError) as error:
        module, version, path = "not usable", "unknown", str(error)
    cuda_ipc = "no GPU"
    if has_gpu:
        try:
            cuda_ipc, *_ = _try("cuda_ipc")
        except (TransportUnavailable, OSError, subprocess.SubprocessError) as error:
            cuda_ipc = str(error)
    return TransferFacts(
        nixl_module=module,
        ucx_version=version,
        nixl_path=path,
        cuda_ipc=cuda_ipc,
        rdma_devices=rdma_devices(),
        ucx_tls=os.environ.get("UCX_TLS", UNSET),
        ucx_net_devices=os.environ.get("UCX_NET_DEVICES", UNSET),
    )


def _try(backend: str) -> list[str]:
    """The path, NIXL's module and UCX's version, reported by a child process that reads another child's memory."""
    command = [sys.executable, "-m", "kvtransfer.doctor"]
    owner = subprocess.Popen(
        [*command, "own", backend],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
    )
    try:
        assert owner.stdout is not None
        address = owner.stdout.readline().strip()
        reader = subprocess.run(
            [*command, "read", backend, address], capture_output=True, text=True, timeout=PATIENCE_S, cwd=ROOT
        )
    finally:
        owner.kill()
        owner.communicate()
    lines = reader.stdout.splitlines()
    if len(lines) != 3:
        output = (reader.stderr or reader.stdout).strip().splitlines() or ["no output"]
        raise TransportUnavailable(f"the trial over {backend} failed: {output[-1]}")
    return lines


def _open(backend: str) -> Transport:
    from kvtransfer.backends.buffers import buffer_on
    from kvtransfer.backends.cuda_ipc import CudaIpcTransport
    from kvtransfer.backends.nixl import NixlTransport

    device = "cuda:0" if backend == "cuda_ipc" else "cpu"
    region = Region(LAYOUT, NUM_BLOCKS, *buffer_on(device, NUM_BLOCKS * LAYOUT.block_bytes), device)
    if backend == "cuda_ipc":
        return CudaIpcTransport(region, identity=host_identity())
    return NixlTransport(region, identity=host_identity(), quarantine_s=1.0)


def _own(backend: str) -> None:
    transport = _open(backend)
    print(transport.address().hex(), flush=True)
    sys.stdin.read()


async def _read(backend: str, address: bytes) -> None:
    transport = _open(backend)
    shard = ShardAddress(0, LAYOUT, NUM_BLOCKS, ((backend, address),))
    copies = np.array([[0, 0, LAYOUT.block_bytes]], np.int64)
    try:
        path = await transport.connect("doctor", shard, deadline_s=PATIENCE_S / 2)
        await transport.read("doctor", copies, deadline_s=PATIENCE_S / 2).done
    except TransferError as error:
        path = f"refused: {error}"
    module = ""
    if backend == "nixl":
        from kvtransfer.backends.nixl_agent import load_nixl

        module = load_nixl().__name__.removesuffix("._api")
    print(path, module, ucx_version(), sep="\n", flush=True)
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
    if arguments[0] == "own":
        _own(arguments[1])
    else:
        asyncio.run(_read(arguments[1], bytes.fromhex(arguments[2])))


if __name__ == "__main__":
    main(sys.argv[1:])
