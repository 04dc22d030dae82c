"""The spec of a cluster to start, from a file or from options; checks ports before anything starts."""

import errno
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from cluster.spec import ClusterSpec, PoolSpec

HTTP_PORT = 8000


SIZES = {
    "prefill_replicas": "replicas",
    "decode_replicas": "replicas",
    "tensor_parallel_size": "parallel: {tensor: 2}",
}  # options of a cluster without a file, and the keys of a file for them


def spec_to_serve(file: str | None, model: str | None, **sizes: int | None) -> "ClusterSpec":
    """The spec of the file, or one prefill pool and one decode pool on this machine. Raises `SpecError`.

    `sizes`: of `SIZES`; None: 1.
    """
    from cluster.spec_file import load_spec

    if model is not None and model.endswith((".yaml", ".yml")):
        raise click.UsageError(f"{model} is a cluster file; write -f {model}")
    given = {name: size for name, size in sizes.items() if size is not None}
    if file is None:
        return _without_file(model, given)
    if given:
        name = next(iter(given))
        option = f"--{name.replace('_', '-')}"
        raise click.UsageError(f"{option} is for a cluster without a file; set {SIZES[name]} in {file}")
    spec = load_spec(file)
    if model is None:
        return spec
    spec.check_one_model("MODEL on the command line")
    return spec.with_model(model)


def _without_file(model: str | None, sizes: dict[str, int]) -> "ClusterSpec":
    from cluster.spec import Role
    from cluster.spec_file import FILE_DEFAULTS, laptop_spec
    from workers.config import EngineConfig

    spec = laptop_spec()
    tensor = sizes.get("tensor_parallel_size", 1)
    replicas = {role: sizes.get(f"{role.value}_replicas", 1) for role in (Role.PREFILL, Role.DECODE)}
    gpus = 0 if "RAY_ADDRESS" in os.environ else num_gpus()
    share = gpu_share(gpus, sum(replicas.values()) * tensor, tensor)

    def sized(pool: "PoolSpec") -> "PoolSpec":
        return replace(
            pool,
            replicas=replicas[pool.role],
            parallel=replace(pool.parallel, tensor=tensor),
            resources=replace(pool.resources, gpu=share),
            engine=EngineConfig(**FILE_DEFAULTS[EngineConfig]) if share else replace(pool.engine, kv_blocks=0),
        )

    spec = replace(spec, name="diptych", pools=tuple(map(sized, spec.pools)))
    return spec if model is None else spec.with_model(model)


def num_gpus(devices: Path = Path("/dev")) -> int:
    """Number of NVIDIA GPUs of this machine, by the device files of their driver."""
    return len(list(devices.glob("nvidia[0-9]*")))


def gpu_share(gpus: int, ranks: int, tensor: int) -> float:
    """GPUs that Ray reserves per rank: 1, a fraction if workers of one rank share GPUs, or 0 without GPUs.

    Raises `SpecError` if ranks of one worker would share a GPU.
    """
    from cluster.spec import SpecError

    if gpus == 0 or ranks <= gpus:
        return float(gpus > 0)
    if tensor > 1:
        raise SpecError(
            f"--tensor-parallel-size {tensor} needs {ranks} GPUs in all, this machine has {gpus}; ask for less"
        )
    return 1 / -(-ranks // gpus)


def with_default_http(spec: "ClusterSpec", say: Callable[[str], None]) -> "ClusterSpec":
    """Add HTTP on port 8000, unless the spec has an HTTP port or the `http` extra is missing.

    Uses any free port if gRPC does, or, with a message, if 8000 is in use. With RAY_ADDRESS, gateways may run on other
    hosts, whose ports cannot be checked from here, so HTTP is opened only on request.
    """
    from cluster.frontend.http import missing_packages

    if spec.gateway.http_port is not None or missing_packages() or "RAY_ADDRESS" in os.environ:
        return spec
    if spec.gateway.grpc_port == 0:
        return with_gateway(spec, http_port=0)
    replicas, host = spec.gateway.replicas, spec.gateway.host
    meets_grpc = abs(spec.gateway.grpc_port - HTTP_PORT) < replicas
    if meets_grpc or not all(is_free(host, HTTP_PORT + index) for index in range(replicas)):
        say(f"port {HTTP_PORT} is in use: HTTP takes any free one; --http-port chooses it, --no-http leaves HTTP out")
        return with_gateway(spec, http_port=0)
    return with_gateway(spec, http_port=HTTP_PORT)


def with_available_http(spec: "ClusterSpec", say: Callable[[str], None]) -> "ClusterSpec":
    """Set the HTTP port of an additional gateway: the cluster's, or any free one if that is in use here."""
    port = spec.gateway.http_port
    if not port or is_free(spec.gateway.host, port):
        return spec
    say(f"port {port} is in use: HTTP takes any free one; --http-port chooses it")
    return with_gateway(spec, http_port=0)


def check_servers(spec: "ClusterSpec") -> None:
    """Raise before the model is loaded if a port is in use (OSError), a certificate or key file is not usable
    (SpecError), or HTTP is not installed. With RAY_ADDRESS, ports and files are those of other hosts, and not checked.
    """
    if spec.gateway.http_port is not None:
        from cluster.frontend.http import check_extra

        check_extra()
    if "RAY_ADDRESS" in os.environ:
        return
    for port, option in ((spec.gateway.grpc_port, "--port"), (spec.gateway.http_port, "--http-port")):
        if port:
            _check_free(spec.gateway.host, port, option)
    from cluster.frontend.auth import Authenticator

    Authenticator(spec.gateway)


def is_free(host: str, port: int) -> bool:
    try:
        _bind(host, port)
    except OSError as error:
        return error.errno != errno.EADDRINUSE
    return True


def _check_free(host: str, port: int, option: str) -> None:
    try:
        _bind(host, port)
    except OSError as error:
        where = f"cannot listen on {host}:{port} ({error.strerror})"
        is_taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
        advice = (
            f"choose another port with {option} (0: any free one)" if is_taken else "set gateway.host to an address"
        )
        raise OSError(error.errno, f"{where}; {advice}{'' if is_taken else ' of this machine'}") from None


def _bind(host: str, port: int) -> None:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


def with_gateway(spec: "ClusterSpec", **changes: Any) -> "ClusterSpec":
    """Set keys of `gateway`. Raises `SpecError`."""
    from cluster.spec import SpecError

    try:
        return replace(spec, gateway=replace(spec.gateway, **changes))
    except ValueError as error:
        raise SpecError(f"gateway: {error}") from None


def private(spec: "ClusterSpec") -> "ClusterSpec":
    """Reachable from this machine only: any free loopback port, no HTTP, no TLS, no keys."""
    files = dict.fromkeys(("tls_cert_file", "tls_key_file", "tls_client_ca_file", "api_keys_file"))
    return with_gateway(spec, host="127.0.0.1", grpc_port=0, http_port=None, **files)
