"""Between which pools a one-sided read by NIXL is safe. Needs no NIXL."""

from dataclasses import replace

import pytest

from kvtransfer.backends import nixl_agent
from kvtransfer.backends.nixl_agent import FRAME_VERSION, NixlAddress, read_route
from kvtransfer.errors import TransportUnavailable
from kvtransfer.host import host_identity
from kvtransfer.ticket import HostIdentity


def owner(device: str, identity: HostIdentity | None = None, fabrics: tuple[str, ...] = ()) -> NixlAddress:
    return NixlAddress(FRAME_VERSION, b"", b"", 0, 64, 64, device, fabrics, identity or host_identity())


@pytest.fixture(autouse=True)
def no_rdma(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "rdma_devices", tuple)
    for name in ("UCX_TLS", "UCX_MODULES"):  # loading NIXL sets the second
        monkeypatch.delenv(name, raising=False)


def test_gpus_of_one_host_are_read_over_cuda_ipc() -> None:
    assert read_route(host_identity(), "cuda:0", owner("cuda:1")) == "GPUs of one host"


def test_gpus_of_two_hosts_need_rdma(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = replace(host_identity(), boot_id="another")
    with pytest.raises(TransportUnavailable, match="another host"):
        read_route(host_identity(), "cuda:0", owner("cuda:0", elsewhere, fabrics=("rdma",)))
    monkeypatch.setattr(nixl_agent, "rdma_devices", lambda: ("mlx5_0",))
    assert read_route(host_identity(), "cuda:0", owner("cuda:0", elsewhere, fabrics=("rdma",))) == "rdma on both sides"


@pytest.mark.parametrize(("ours", "theirs"), [("cpu", "cuda:0"), ("cuda:0", "cpu")])
def test_a_gpu_and_host_memory_of_one_host_are_refused(ours: str, theirs: str) -> None:
    with pytest.raises(TransportUnavailable, match="only one pool is on a GPU"):
        read_route(host_identity(), ours, owner(theirs))


@pytest.mark.parametrize(
    ("transports", "device", "path"),
    [("tcp,cma", "cuda:0", "CUDA IPC"), ("^cuda_ipc", "cuda:0", "CUDA IPC"), ("cuda,tcp", "cpu", "CMA")],
)
def test_ucx_without_a_safe_path_is_refused(
    monkeypatch: pytest.MonkeyPatch, transports: str, device: str, path: str
) -> None:
    monkeypatch.setenv("UCX_TLS", transports)
    with pytest.raises(TransportUnavailable, match=f"forbids {path}"):
        read_route(host_identity(), device, owner(device))
