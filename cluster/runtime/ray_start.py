"""Joins the Ray of RAY_ADDRESS, or starts one on this machine. Knows no worker."""

import asyncio
import logging
import math
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import ray
from ray._private import parameter

from cluster.runtime.placement import own_labels, own_resources
from cluster.runtime.ray import NAMESPACE, RayRuntime
from cluster.runtime.runtime_errors import RuntimeUnavailable
from cluster.runtime.sessions import Session, announce
from cluster.spec import ClusterSpec

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 90.0
REACH_TIMEOUT_S = 5.0
OPEN_ADVICE = "check RAY_ADDRESS and RAY_AUTH_MODE, or unset RAY_ADDRESS"
JOIN_ADVICE = "set RAY_ADDRESS to the Ray on which the cluster is served, and RAY_AUTH_TOKEN to its token"
MIN_OPEN_FILES = 256  # of a process; a worker of a small cluster has about 80
LOCAL_STORE_BYTES = 100 * 1024 * 1024  # KV and tokens never pass through the object store


async def _reachable(address: str) -> None:
    """Fail fast if nothing listens there, because Ray itself would retry for minutes. Raises OSError."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return  # for example "auto", which Ray resolves
    async with asyncio.timeout(REACH_TIMEOUT_S):
        _, writer = await asyncio.open_connection(host, int(port))
    writer.close()


async def open_ray(spec: ClusterSpec, progress: Callable[[str], None]) -> RayRuntime:
    """Join the Ray of RAY_ADDRESS, or start one on this machine. Raises `RuntimeUnavailable`."""
    address = os.environ.get("RAY_ADDRESS")
    if ray.is_initialized():
        return RayRuntime(spec.name, logs=spec.logs)
    options: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": logging.ERROR}
    if address:
        progress(f"joining Ray at {address}")
        options["address"] = address
    else:
        _check_open_files()
        progress("starting Ray on this machine")
        os.environ.setdefault("RAY_USE_UVLOOP", "0")  # its clock has whole milliseconds, too few for steps and links
        options |= {
            "address": "local",  # a new one, even if another Ray runs here
            "include_dashboard": False,
            "num_cpus": _cpus(spec),
            "resources": own_resources(spec),
            "labels": own_labels(spec),
            "object_store_memory": LOCAL_STORE_BYTES,
            "_node_ip_address": "127.0.0.1",
        }
    await _init(options, address, OPEN_ADVICE, progress)
    return RayRuntime(spec.name, owns_ray=not address, logs=spec.logs, session_file="" if address else _announced(spec))


def _check_open_files() -> None:
    """Ray raises the soft limit itself; below that it hangs in its start. Raises `RuntimeUnavailable`."""
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit < MIN_OPEN_FILES and limit != resource.RLIM_INFINITY:
        raise RuntimeUnavailable(
            f"a process may have {limit} files open here, and Ray needs {MIN_OPEN_FILES}; raise the hard limit of open "
            "files (ulimit -Hn, LimitNOFILE= of a systemd unit)"
        )


def _announced(spec: ClusterSpec) -> str:
    """Write the session file. Empty, with a warning, if that fails: the cluster itself does not need it."""
    token = os.environ.get("RAY_AUTH_TOKEN", "")
    if os.environ.get("RAY_AUTH_MODE") == "token" and not token:
        return ""  # the token is in a file, and the user must name it again to join
    try:
        return str(announce(Session(spec.name, ray.get_runtime_context().gcs_address, token, os.getpid())))
    except OSError as error:
        logger.warning("`diptych gateway` and `leave` will not find this Ray without RAY_ADDRESS: %s", error)
        return ""


async def join_ray() -> None:
    """Join the Ray of RAY_ADDRESS, or the one that this machine is a node of. Raises `RuntimeUnavailable`."""
    address = os.environ.get("RAY_ADDRESS") or "auto"
    options = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": logging.ERROR, "address": address}
    await _init(options, address, JOIN_ADVICE)


async def _init(
    options: dict[str, Any], address: str | None, advice: str, progress: Callable[[str], None] = lambda line: None
) -> None:
    try:
        if address:
            await _reachable(address)
        await _started(options, progress)
    except Exception as error:  # Ray raises plain ones, too
        where = f"Ray at {address}" if address else "a local Ray"
        reason = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
        raise RuntimeUnavailable(f"{where} cannot be reached: {reason}; {advice}") from None


async def _started(options: dict[str, Any], progress: Callable[[str], None]) -> None:
    """`ray.init` cannot be interrupted: when cancelled, wait for it, then stop that Ray."""
    starting = asyncio.ensure_future(asyncio.to_thread(_start, options))
    try:
        await asyncio.wait_for(asyncio.shield(starting), CONNECT_TIMEOUT_S)
    except asyncio.CancelledError:
        progress("closing: Ray is still starting and ends after that")
        await asyncio.wait([starting], timeout=CONNECT_TIMEOUT_S)
        if starting.done():
            starting.exception()  # it ends in any case
        await asyncio.to_thread(ray.shutdown)
        raise


def _start(options: dict[str, Any]) -> None:
    with _without_monitors():
        ray.init(**options)


@contextmanager
def _without_monitors() -> Iterator[None]:
    """A Ray that is started inside has neither autoscaler nor log monitor, two processes that would do nothing here.

    `ray start` has options for that, `ray.init` has not, so they are set where it makes its parameters. A Ray that is
    joined keeps what it has.
    """
    module: Any = parameter
    made = module.RayParams
    module.RayParams = partial(made, no_monitor=True, include_log_monitor=False)
    try:
        yield
    finally:
        module.RayParams = made


def _cpus(spec: ClusterSpec) -> int:
    """The pools' maximum, even if this machine has fewer: they share its CPUs."""
    wanted = sum(pool.resources.cpu * pool.max_ranks for pool in spec.pools)
    return max(os.cpu_count() or 1, math.ceil(wanted))
