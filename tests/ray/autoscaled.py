"""A Ray whose autoscaler starts and stops nodes: real raylets on this machine, by Ray's fake node provider.

`ray.cluster_utils.AutoscalingCluster` would end every other Ray of this machine, and needs a file that wheels lack.
Every process carries a token of its own in its environment, by which all of them are found at the end.
"""

import asyncio
import json
import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray

PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
HEAD, HEAD_ID = "ray.head.default", "f" * 51 + "00000"
STORE_BYTES = 80_000_000
LOOK_S = 1
START_S = 60.0
COMMAND_S = 30.0
RAY = str(Path(sys.executable).with_name("ray"))


@dataclass(frozen=True)
class Autoscaled:
    """A running head. `environment`: the variables to join it."""

    address: str
    environment: dict[str, str]

    async def status(self) -> str:
        """The output of `ray status`: nodes by type, usage and pending demands."""
        process = await asyncio.create_subprocess_exec(
            *(RAY, "status", f"--address={self.address}"),
            env=_clean() | self.environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        async with asyncio.timeout(COMMAND_S):
            output, _ = await process.communicate()
        assert process.returncode == 0, output.decode()
        return output.decode()


@asynccontextmanager
async def autoscaled(
    head: dict[str, float], types: dict[str, dict[str, Any]], idle_s: float
) -> AsyncIterator[Autoscaled]:
    """A head with these resources. `types`: node types with `resources` and `max_workers`; idle nodes are removed."""
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # short, because socket paths are limited
    host, port, token = ray.util.get_node_ip_address(), _free_port(), secrets.token_hex(32)
    config = folder / "autoscaler.json"
    config.write_text(json.dumps(_config(f"{host}:{port}", head, types, idle_s)))
    joining = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_ADDRESS": f"{host}:{port}"}
    heading = {"AUTOSCALER_UPDATE_INTERVAL_S": str(LOOK_S), "RAY_FAKE_CLUSTER": "1", "RAY_enable_autoscaler_v2": "1"}
    heading |= {"RAY_CLOUD_INSTANCE_ID": HEAD_ID, "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID}
    others = {kind: amount for kind, amount in head.items() if kind != "CPU"}
    log = (folder / "head.log").open("wb")
    try:
        process = await asyncio.create_subprocess_exec(
            *(RAY, "start", "--head", "--block", f"--node-ip-address={host}", f"--port={port}"),
            *(f"--ray-client-server-port={_free_port()}", "--min-worker-port=0", "--max-worker-port=0"),
            *(f"--num-cpus={head['CPU']:g}", f"--resources={json.dumps(others)}", "--include-dashboard=false"),
            *(f"--object-store-memory={STORE_BYTES}", "--disable-usage-stats"),
            *(f"--autoscaling-config={config}", f"--temp-dir={folder}"),
            env=_clean() | joining | heading,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        async with asyncio.timeout(START_S):
            while "Ray runtime started" not in (output := (folder / "head.log").read_text()):
                assert process.returncode is None, output
                await asyncio.sleep(0.1)
        yield Autoscaled(f"{host}:{port}", joining)
    finally:
        await asyncio.to_thread(_end, token)
        await process.wait()
        log.close()
        shutil.rmtree(folder, ignore_errors=True)


def _config(address: str, head: dict[str, float], types: dict[str, dict[str, Any]], idle_s: float) -> dict[str, Any]:
    kinds = {HEAD: {"resources": head, "max_workers": 0}} | types
    empty = (
        *("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands"),
        *("head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files"),
    )
    return {
        "cluster_name": "autoscaled",
        "max_workers": sum(kind["max_workers"] for kind in types.values()),
        "idle_timeout_minutes": idle_s / 60,
        "provider": {
            "type": "external",
            "module": PROVIDER,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "launch_multiple": True,
            "gcs_address": address,
        },
        "available_node_types": {name: {"node_config": {}, "min_workers": 0, **kind} for name, kind in kinds.items()},
        "head_node_type": HEAD,
        "auth": {},
        "file_mounts": {},
        **{name: [] for name in empty},
    }


def _clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _end(token: str) -> None:
    """Kill all processes with the token in their environment, and their children."""
    while family := [process for process in psutil.process_iter() if _carries(process, token)]:
        for process in family:
            process.kill()
        psutil.wait_procs(family, COMMAND_S)


def _carries(process: psutil.Process, token: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get("RAY_AUTH_TOKEN") == token
    except psutil.Error:
        return False
