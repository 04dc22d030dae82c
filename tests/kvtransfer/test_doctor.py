"""The doctor's facts come from trials on this machine."""

import pytest

from kvtransfer.backends.ucx_report import parse_read_paths
from kvtransfer.doctor import transfer_facts
from tests.kvtransfer.conftest import need

TABLE = """
[1.0] [vm:1 :0]   +--------+-------------+-------------------------------------------+
[1.0] [vm:1 :0]   | i intra-node cfg#1                                               |
[1.0] [vm:1 :0]   | remote memory read by ucp_get*(multi) into host memory from host |
[1.0] [vm:1 :0]   +--------+-------------+-------------------------------------------+
[1.0] [vm:1 :0]   | Range  | Description |                  Config                   |
[1.0] [vm:1 :0]   +--------+-------------+-------------------------------------------+
[1.0] [vm:1 :0]   | 0..inf | zero-copy   | cma/memory                                |
[1.0] [vm:1 :0]   +--------+-------------+-------------------------------------------+
[1.0] [vm:1 :0]   | active message by ucp_am_send* from host memory |
[1.0] [vm:1 :0]   +------------+--------------------+---------------+
[1.0] [vm:1 :0]   |   Range    |    Description     |    Config     |
[1.0] [vm:1 :0]   +------------+--------------------+---------------+
[1.0] [vm:1 :0]   |          0 | short              | tcp/lo        |
"""


def test_only_the_table_of_remote_reads_names_the_path() -> None:
    assert parse_read_paths(TABLE) == ("cma/memory",)


def test_an_emulated_read_is_recognized() -> None:
    emulated = TABLE.replace("zero-copy  ", "software emulation").replace("cma/memory", "tcp/eth0")
    assert parse_read_paths(emulated) == ("tcp/eth0: software emulation",)


def test_the_facts_are_those_of_this_machine() -> None:
    need("nixl")
    facts = transfer_facts()
    assert facts.nixl_module.startswith("nixl")
    assert facts.ucx_version[0].isdigit()
    assert facts.nixl_path == "UCX cma/memory (same host)" or "CMA is not allowed" in facts.nixl_path


def test_ucx_forced_over_tcp_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    need("nixl")
    monkeypatch.setenv("UCX_TLS", "tcp")
    assert "forbids CMA" in transfer_facts().nixl_path
