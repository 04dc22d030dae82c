"""`diptych serve MODEL` without a file: its pools, its HTTP port, and how other commands find it."""

import os
import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cluster.cli import local_servers, main
from cluster.cli.launch import gpu_share, num_gpus, spec_to_serve, with_default_http, with_gateway
from cluster.cli.local_servers import DEFAULT_ENDPOINT, announced, last_endpoint
from cluster.spec import ClusterSpec, Role, SpecError
from cluster.spec_file import laptop_spec


@pytest.fixture(autouse=True)
def own_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture
def taken() -> socket.socket:
    subject = socket.socket()
    subject.bind(("127.0.0.1", 0))
    subject.listen()
    return subject


def serve(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["serve", *arguments])


def test_a_model_alone_has_one_prefill_and_one_decode_worker() -> None:
    spec = spec_to_serve(None, "smollm2-135m")
    assert spec.model == "smollm2-135m"
    assert [pool.engine.kv_blocks for pool in spec.pools] == [0, 0]  # sized by free memory when the workers start
    assert [(pool.role, pool.replicas, pool.parallel.tensor) for pool in spec.pools] == [
        (Role.PREFILL, 1, 1),
        (Role.DECODE, 1, 1),
    ]


def test_options_set_the_sizes() -> None:
    spec = spec_to_serve(None, None, prefill_replicas=2, decode_replicas=3, tensor_parallel_size=2)
    assert [(pool.replicas, pool.parallel.tensor) for pool in spec.pools] == [(2, 2), (3, 2)]


@pytest.mark.parametrize("option", ["--prefill-replicas", "--decode-replicas", "--tensor-parallel-size"])
def test_sizes_do_not_go_with_a_file(option: str) -> None:
    result = serve("-f", "examples/laptop.yaml", option, "2")
    assert result.exit_code == 2 and f"{option} is for a cluster without a file" in result.stderr


def test_a_file_given_as_the_model_is_one_line() -> None:
    assert "cluster.yaml is a cluster file; write -f cluster.yaml" in serve("cluster.yaml").stderr


def test_a_misspelled_model_has_a_suggestion() -> None:
    result = serve("SmolLM-135M", "--port", "0", "--no-http")
    assert result.exit_code == 1 and result.stdout == ""
    assert "no model 'SmolLM-135M': did you mean 'smollm2-135m'?" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("option", ["--tool-call-parser", "--reasoning-parser"])
def test_an_unknown_parser_is_named_with_those_that_there_are(option: str) -> None:
    result = serve("smollm2-135m", option, "Hermes", "--port", "0", "--no-http")
    key = option[2:].replace("-", "_")
    assert result.exit_code == 1
    assert re.search(rf"gateway: {key} 'Hermes' is not one of auto, none, .*mistral", result.stderr)


@pytest.mark.parametrize(("gpus", "ranks", "tensor", "share"), [(0, 4, 2, 0), (2, 2, 1, 1), (1, 2, 1, 0.5)])
def test_ranks_have_a_gpu_each_or_share_one(gpus: int, ranks: int, tensor: int, share: float) -> None:
    assert gpu_share(gpus, ranks, tensor) == share


def test_ranks_of_one_worker_never_share_a_gpu() -> None:
    with pytest.raises(SpecError, match="needs 4 GPUs in all, this machine has 2"):
        gpu_share(2, 4, 2)


def test_gpus_are_counted_by_their_device_files(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert num_gpus(tmp_path) == 2


def http(spec: ClusterSpec) -> tuple[int | None, list[str]]:
    messages: list[str] = []
    return with_default_http(spec, messages.append).gateway.http_port, messages


def test_http_has_its_default_port_unless_grpc_uses_any(monkeypatch: pytest.MonkeyPatch, taken: socket.socket) -> None:
    port = taken.getsockname()[1]
    monkeypatch.setattr("cluster.cli.launch.HTTP_PORT", port)
    used = http(laptop_spec())
    assert used[0] == 0 and len(used[1]) == 1 and f"port {port} is in use" in used[1][0]
    taken.close()
    assert http(laptop_spec()) == (port, [])
    assert http(with_gateway(laptop_spec(), grpc_port=0)) == (0, [])
    assert http(with_gateway(laptop_spec(), http_port=9000)) == (9000, [])


def test_http_is_off_without_its_extra_and_with_ray_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert http(laptop_spec()) == (None, [])
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr("cluster.frontend.http.missing_packages", lambda: ["fastapi"])
    assert http(laptop_spec()) == (None, [])


def test_two_gateways_have_two_http_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(laptop_spec(), gateway=replace(laptop_spec().gateway, replicas=2, grpc_port=7999))
    assert http(spec)[0] == 0


def test_the_last_server_of_this_machine_is_the_default(taken: socket.socket) -> None:
    assert last_endpoint() == DEFAULT_ENDPOINT
    address = f"grpc://127.0.0.1:{taken.getsockname()[1]}"
    with announced(address):
        assert last_endpoint() == address
    assert last_endpoint() == DEFAULT_ENDPOINT


def test_the_record_of_a_killed_server_is_removed(taken: socket.socket, runtime_folder: Path) -> None:
    with announced(f"grpc://127.0.0.1:{taken.getsockname()[1]}"):
        file = next(runtime_folder.rglob(f"{os.getpid()}.json"))
        taken.close()
        assert last_endpoint() == DEFAULT_ENDPOINT and not file.exists()


def test_a_command_without_an_endpoint_asks_the_last_server(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with announced(f"grpc://{endpoint}"):
        result = CliRunner().invoke(main, ["generate", "--raw", "the sea is salty"])
    assert (result.exit_code, result.stdout) == (0, "SEA IS SALTY\n")
    monkeypatch.setenv("DIPTYCH_ENDPOINT", "127.0.0.1:1")
    assert "nothing answers at 127.0.0.1:1 (" in CliRunner().invoke(main, ["generate", "hi"]).stderr


def test_help_finds_servers_only_when_a_command_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_servers, "_folder", lambda: pytest.fail("help looked for servers"))
    assert CliRunner().invoke(main, ["status", "--help"]).exit_code == 0
