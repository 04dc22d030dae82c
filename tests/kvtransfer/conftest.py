"""Owners that live for a module, because starting a process takes a second."""

import importlib.util
from collections.abc import Iterator

import pytest

from kvtransfer.ticket import PeerAddress
from tests.kvtransfer.peers import Child, start_owner


def need(backend: str) -> None:
    """Skip, saying so, where the backend's module is not installed."""
    found = any(importlib.util.find_spec(name) for name in ("nixl", "nixl_cu13", "nixl_cu12"))
    if backend == "nixl" and not found:
        pytest.skip("nixl is not installed: pip install 'diptych[nixl]'")


@pytest.fixture(scope="module")
def tcp_owner() -> Iterator[tuple[Child, PeerAddress]]:
    child, address = start_owner("tcp", "owner-tcp")
    yield child, address
    child.end()


@pytest.fixture(scope="module")
def cuda_ipc_owner() -> Iterator[tuple[Child, PeerAddress]]:
    child, address = start_owner("cuda_ipc", "owner-cuda-ipc")
    yield child, address
    child.end()


@pytest.fixture(scope="module")
def nixl_owner() -> Iterator[tuple[Child, PeerAddress]]:
    need("nixl")
    child, address = start_owner("nixl", "owner-nixl")
    yield child, address
    child.end()
