"""A cluster file that cannot work is refused before anything starts, with the line and the pool."""

import dataclasses
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cluster.cli import main
from cluster.frontend.servers import open_servers
from cluster.precheck import check_devices, check_model, with_block_sizes
from cluster.serving import serve
from cluster.spec import PoolSpec, Resources, Role, SpecError
from cluster.spec_file import laptop_spec, load_spec
from tests.model.families import write_family
from tests.model.tiny import write_tiny_llama
from workers.config import EngineConfig

SERVE = import_module("cluster.cli.serve")  # the name in its package is the command
FILE = """\
model: {model}
pools:
  - name: first
    role: prefill
    {first}
  - name: second
    role: decode
    engine:
      kv_blocks: 64
      {engine}
    {second}
{more}
"""
NOTHING = {"first": "# nothing", "engine": "# nothing", "second": "# nothing", "more": "# nothing"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two layers and four heads."""
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


def written(folder: Path, model: Path, **lines: str) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(FILE.format(model=model, **NOTHING | lines))
    return path


REFUSED = [
    ({"engine": "dtype: bf16"}, 10, "second", "pools[1].engine: engine.dtype 'bf16' is not one of auto, float32"),
    ({"engine": "device: gpu"}, 10, "second", "pools[1].engine: engine.device 'gpu' is not a device; write auto, cpu"),
    ({"engine": "dtyp: x"}, 10, "second", "pools[1].engine.dtyp: unknown key; did you mean 'dtype'?"),
    ({"engine": "block_size: many"}, 10, "second", "pools[1].engine.block_size: Expected int, got str"),
    ({"first": "replicas: {min: 1}"}, 5, "first", "pools[0].replicas: has only min"),
    (
        {"first": "parallel: {tensor: 10}"},
        5,
        "first",
        "pools[0].parallel.tensor is 10, but the model has 4 attention h",
    ),
    ({"second": "parallel: {pipeline: 3}"}, 11, "second", "pools[1].parallel.pipeline is 3, but the model has 2 laye"),
    ({"second": "resources: {gpu: 1}"}, 11, "second", "pools[1].resources.gpu is 1, but this machine has no GPU; lea"),
    ({"engine": "device: cuda"}, 10, "second", "pools[1].engine.device is cuda, but this machine has no GPU; leave"),
    ({"engine": "weights: gguf"}, 10, "second", "pools[1].engine.weights is gguf, but"),
    (
        {"second": "replicas: 9", "more": "transfer: {max_readers: 8}"},
        12,
        "",
        "transfer: max_readers is 8, but 9 workers",
    ),
    ({"more": "gateway: {grpc_port: 99999}"}, 12, "", "gateway: grpc_port is 99999; it must be between 0"),
    ({"more": "elastic:\n  dwell_s: -1"}, 13, "", "elastic: dwell_s is -1.0; it must be 0 or more"),
    ({"more": "name: A"}, 12, "", "name 'A' must be lower-case letters"),
    ({"second": "role: decoder"}, 11, "second", "pools[1].role: is there twice, in lines"),
    ({"more": "gateway: {slo: {ttft_s: 1}, host: a, slo: {}}"}, 12, "", "gateway.slo: is there twice, in lines 12"),
    ({"more": "gateway: [1]"}, 12, "", "gateway: Expected mapping, got list"),
    ({"more": "adapters: {a: [}"}, 12, "", "is not YAML: while parsing a flow node, expected the node content"),
]


@pytest.mark.parametrize(("lines", "line", "pool", "words"), REFUSED, ids=[each[3][:40] for each in REFUSED])
def test_an_impossible_setting_is_refused_with_line_and_pool_before_the_start(
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    lines: dict[str, str],
    line: int,
    pool: str,
    words: str,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("cluster.precheck._DEVICES", ())  # as on a machine without any
    monkeypatch.setattr(SERVE, "run", lambda work: pytest.fail("it was to be refused before"))
    path = written(tmp_path, model, **lines)
    result = CliRunner().invoke(main, ["serve", "--port", "0", "-f", str(path)])
    assert result.exit_code == 1
    where = f"{path}:{line}: pool {pool}: " if pool else f"{path}:{line}: "
    assert result.stderr.startswith(f"Error: {where}{words}") and result.stderr.count("\n") == 1


def test_a_valid_file_passes_without_side_effects(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    begun: list[object] = []

    def run(work: Any) -> None:
        work.close()
        begun.append(work)

    monkeypatch.setattr(SERVE, "run", run)
    result = CliRunner().invoke(main, ["serve", "--port", "0", "-f", str(written(tmp_path, model))])
    assert result.exit_code == 0, result.output
    assert len(begun) == 1


def test_quantized_weights_on_a_gpu_are_refused(tmp_path: Path, model: Path) -> None:
    path = written(tmp_path, model, engine="weights: int8", second="resources: {gpu: 1}")
    with pytest.raises(SpecError, match=r"pools\[1\].engine.weights is int8, which needs a CPU"):
        check_model(load_spec(path), model)


def test_pools_on_gpus_and_cpus_need_a_dtype(tmp_path: Path, model: Path) -> None:
    with pytest.raises(SpecError, match=r"engine.dtype is auto, .* set it in each pool"):
        check_model(load_spec(written(tmp_path, model, second="resources: {gpu: 1}")), model)
    both = {"engine": "dtype: bfloat16", "second": "resources: {gpu: 1}"}
    check_model(load_spec(written(tmp_path, model, **both)), model)


@pytest.mark.parametrize(("engine", "sizes"), [("dtype: auto", (48, 48)), ("block_size: 8", (16, 8))])
def test_pools_that_leave_out_block_size_get_one_that_holds_a_state(
    tmp_path: Path, engine: str, sizes: tuple[int, int]
) -> None:
    """4 heads of 16 x 16 numbers and a convolution of 3 inputs are 4,864 bytes; 16 tokens of KV are 2,048."""
    hybrid = write_family(tmp_path / "hybrid", "qwen 3 next", linear_key_head_dim=16, linear_value_head_dim=16)
    spec = with_block_sizes(load_spec(written(tmp_path, hybrid, engine=engine)))
    assert tuple(pool.engine.block_size for pool in spec.pools) == sizes


async def test_a_cluster_that_python_starts_gets_it_too(tmp_path: Path) -> None:
    hybrid = write_family(tmp_path / "hybrid", "qwen 3 next", linear_key_head_dim=16, linear_value_head_dim=16)
    pool = PoolSpec("mixed", Role.MIXED, engine=EngineConfig(kv_blocks=16))
    spec = dataclasses.replace(laptop_spec(), model=str(hybrid), pools=(pool,))
    spec = dataclasses.replace(spec, gateway=dataclasses.replace(spec.gateway, grpc_port=0, http_port=None))
    serving = await serve(spec, runtime="local", make_server=open_servers)
    try:
        spec, _ = await serving.controller.call("spec_and_models", 1.0)
        assert spec.pools[0].engine.block_size == 48
    finally:
        await serving.close()


def test_other_models_keep_their_block_size(tmp_path: Path, model: Path) -> None:
    spec = load_spec(written(tmp_path, model))
    assert with_block_sizes(spec) == spec


def test_gpu_checks_are_skipped_with_ray_address_or_gpus(tmp_path: Path) -> None:
    gpus = PoolSpec("gpus", Role.MIXED, resources=Resources(gpu=1))
    spec = dataclasses.replace(laptop_spec(), pools=(gpus,))
    with pytest.raises(SpecError, match=r"pools\[0\].resources.gpu is 1, but this machine has no GPU"):
        check_devices(spec, tmp_path)
    (tmp_path / "nvidia0").touch()
    check_devices(spec, tmp_path)
    empty = dataclasses.replace(gpus, replicas=0)
    cpus = PoolSpec("cpus", Role.MIXED, engine=EngineConfig(device="cpu"))
    check_devices(dataclasses.replace(spec, pools=(empty, cpus)), tmp_path / "none")


def test_a_document_that_is_not_a_mapping_has_no_line_number(tmp_path: Path) -> None:
    path = tmp_path / "list.yaml"
    path.write_text("- 1\n")
    with pytest.raises(SpecError, match=r"list.yaml: is empty or not a mapping"):
        load_spec(path)
