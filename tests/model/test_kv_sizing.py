"""A worker without `kv_blocks` takes what its device has room for: never more than its part, the same on every rank."""

import itertools
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.control.replicas import order_of
from cluster.offline.sim.fleet import with_kv_blocks
from cluster.spec import ClusterSpec, PoolSpec, Resources, Role, SpecError
from cluster.spec_file import parse_spec
from kvtransfer.layout import KVLayout
from kvtransfer.open import RESERVED_BLOCKS, SharedMemory
from tests.model.test_gang import config, open_tasks
from tests.model.tiny import write_tiny_llama
from workers.build import build_worker
from workers.config import ByteSize, CacheConfig, EngineConfig
from workers.errors import ModelError
from workers.executor import kv_pool, rank_loader
from workers.executor.cuda_graphs import PAGE_BYTES, MemoryUse
from workers.executor.kv_pool import allocate_pool
from workers.executor.kv_sizing import HOST_SHARE, DeviceMemory, blocks_in_use, check_blocks, spare_share
from workers.executor.rank import ModelPart
from workers.executor.rank_loader import has_default_host_cache, open_solo
from workers.executor.warm_up import fullest_step
from workers.model.config import read_model_config
from workers.model.folder import ModelFolder
from workers.model.load import load_decoder
from workers.profiles.capacity import kv_capacity_tokens

GIB = 2**30
CONTEXT = 512


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    path = tmp_path_factory.mktemp("sized") / "model"
    sizes: dict[str, Any] = {"hidden_size": 72, "num_heads": 9, "num_kv_heads": 3, "context_length": CONTEXT}
    return ModelFolder(str(path), write_tiny_llama(path, num_layers=3, **sizes))


def test_a_gpu_is_filled_to_its_utilization_after_weights_and_activations() -> None:
    memory = DeviceMemory(80 * GIB, 63 * GIB, 16 * GIB, 2 * GIB)
    assert memory.kv_bytes(0.9, 1.0, is_host=False) == int(0.9 * 80 * GIB) - 18 * GIB
    assert memory.kv_bytes(0.5, 1.0, is_host=False) == 22 * GIB
    assert replace(memory, graph_bytes=3 * GIB).kv_bytes(0.5, 1.0, is_host=False) == 19 * GIB
    crowded = replace(memory, free_bytes=10 * GIB)  # others have the rest
    assert crowded.kv_bytes(0.9, 1.0, is_host=False) == 7 * GIB
    assert replace(memory, free_bytes=GIB).kv_bytes(0.9, 1.0, is_host=False) == 0


@given(st.integers(1, 8), st.floats(0.1, 1.0), st.integers(1, 12), st.integers(20, 400), st.integers(0, 100))
def test_ranks_that_share_a_device_never_take_more_than_there_is(
    ranks: int, utilization: float, weights: int, total: int, others: int
) -> None:
    """One after another, each after the weights and KV of the previous ones."""
    for is_host in (False, True):
        taken = 0
        for _ in range(ranks):
            free = max(0, (total - others - weights) * GIB - taken)
            memory = DeviceMemory(total * GIB, free, weights * GIB)
            kv = memory.kv_bytes(utilization, 1 / ranks, is_host=is_host)
            assert kv <= free * (HOST_SHARE / ranks if is_host else utilization)
            assert kv == 0 or kv + weights * GIB <= utilization * total * GIB / ranks
            taken += kv + weights * GIB


def test_the_part_of_a_host_counts_every_rank_that_the_cluster_may_have() -> None:
    pools = (
        PoolSpec("prefill", Role.PREFILL, 1, min_replicas=1, max_replicas=3),
        PoolSpec("decode", Role.DECODE, 2),
        PoolSpec("fast", Role.MIXED, 1, resources=Resources(gpu=0.5)),
    )
    spec = ClusterSpec("m", pools)
    parts = [order_of(spec, pool, "w", "s").config.memory_part for pool in pools]
    assert parts == [1 / 5, 1 / 5, 0.5]


async def test_a_host_gives_no_more_than_all_running_requests_can_use(model: ModelFolder) -> None:
    sizes = config(1, 1, kv_blocks=0, max_running=5, max_model_len=100)
    executor = await open_solo(sizes, model, "w-1", SharedMemory())
    assert executor.facts.kv_blocks == RESERVED_BLOCKS + 5 * 13  # of 8 tokens
    await executor.execute(fullest_step(sizes.engine, CONTEXT))  # what a GPU is measured with is a step that runs
    await executor.close()


@pytest.mark.parametrize(("tensor", "pipeline"), [(3, 1), (1, 3)])
async def test_all_ranks_take_what_fits_on_the_one_with_least_room(
    model: ModelFolder, monkeypatch: pytest.MonkeyPatch, tensor: int, pipeline: int
) -> None:
    solo = await open_solo(config(1, 1), model, "s-1", SharedMemory())
    of_rank = solo.facts.layout.block_bytes // 3  # a head of three, or a layer of three
    await solo.close()
    rooms = itertools.count(30, 10)
    monkeypatch.setattr(rank_loader, "memory_of", lambda _: (int((next(rooms) + 0.5) * of_rank / HOST_SHARE), 1 << 50))
    gang = await open_tasks(model, tensor, pipeline, kv_blocks=0)
    assert gang.facts.kv_blocks == 30
    assert [shard.num_blocks for shard in gang.shards()] == [30, 30, 30]
    await gang.close()


@pytest.mark.parametrize(("tensor", "pipeline"), [(3, 1), (1, 3)])
async def test_ranks_on_gpus_measure_their_steps_once_all_have_loaded(
    model: ModelFolder, monkeypatch: pytest.MonkeyPatch, tensor: int, pipeline: int
) -> None:
    """In the first sum of a step, ranks that load faster would wait for the others at the deadline of a step."""
    init = rank_loader._Loader.__init__
    numbers, loaded, measures = itertools.count(), [], threading.Event()

    def on_gpu(loader: Any, *given: Any) -> None:
        init(loader, *given)
        loader._is_host = False

    def slow_at_first(*given: Any, **named: Any) -> Any:
        if next(numbers) == 0:
            measures.wait(0.5)
        loaded.append(load_decoder(*given, **named))
        return loaded[-1]

    def measured(*_: Any, **named: Any) -> tuple[int, int]:
        measures.set()
        assert len(loaded) == 3
        return 0, 0

    monkeypatch.setattr(rank_loader._Loader, "__init__", on_gpu)
    monkeypatch.setattr(rank_loader, "load_decoder", slow_at_first)
    monkeypatch.setattr(rank_loader, "_measured", measured)
    monkeypatch.setattr(rank_loader, "memory_of", lambda _: (1 << 20, 1 << 30))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 0)
    gang = await open_tasks(model, tensor, pipeline, kv_blocks=0)
    assert len(loaded) == 3
    await gang.close()


@pytest.mark.parametrize("utilization", [0.5, 0.9, 0.95, 1.0])
def test_a_pool_as_large_as_a_gpu_was_found_to_hold_is_allocated(
    utilization: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the free memory alone, the larger of the limits; a larger pool is refused."""
    layout = KVLayout("m", 2, 2, 8, 16)
    free = 1000 * layout.block_bytes
    monkeypatch.setattr(kv_pool, "memory_of", lambda _: (free, 1 << 50))
    memory = DeviceMemory(1 << 50, free, weight_bytes=0)
    blocks = memory.kv_bytes(utilization, 1.0, is_host=False) // layout.block_bytes
    spare, cpu = spare_share(utilization, is_host=False), torch.device("cpu")
    assert allocate_pool(layout, blocks, cpu, spare=spare).region.num_blocks == blocks == 1000 * utilization
    with pytest.raises(ModelError, match="do not fit"):
        allocate_pool(layout, max(blocks, 900) + 1, cpu, spare=spare)


def test_a_gpu_measures_its_steps_and_graphs_over_scratch_blocks(
    model: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With counters in the place of CUDA's: the peak of both steps, and every call that a GPU makes."""
    captures: list[object] = []
    allocated = iter((1000, 5000))
    for name, value in {
        "reset_peak_memory_stats": lambda device: None,
        "memory_allocated": lambda device: next(allocated),
        "max_memory_allocated": lambda device: next(allocated),
        "synchronize": lambda device: None,
        "empty_cache": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)

    def capture(work: Any) -> Any:
        captures.append(work)
        work()
        return work

    monkeypatch.setattr(rank_loader, "cuda_capture", lambda: capture)
    monkeypatch.setattr(rank_loader, "cuda_memory_use", lambda device: MemoryUse(7 * len(captures), -len(captures)))
    decoder = load_decoder(model, torch.device("cpu"), torch.float32)
    engine = EngineConfig(max_running=3, max_batch_tokens=24, block_size=8)
    facts = rank_loader.model_facts(model, read_model_config(model.path), replace(engine, dtype="float32"))
    measured = rank_loader._measured(
        ModelPart(decoder), facts.layout, torch.device("cpu"), engine, CONTEXT, is_captured=True
    )
    assert measured == (4000, 7 + 3 * PAGE_BYTES)  # of the first graph, and a page for each of three
    assert len(captures) == 3


def test_what_cannot_hold_one_request_is_refused_with_what_to_change() -> None:
    engine = EngineConfig(kv_blocks=0, max_model_len=1000)
    check_blocks(63, engine, 4096, GIB, "cuda:0")
    with pytest.raises(ModelError, match=r"max_model_len 1000 needs 63 GiB of KV on cuda:0, .* room for 62 GiB; lower"):
        check_blocks(62, engine, 4096, GIB, "cuda:0")
    check_blocks(1, replace(engine, max_model_len=None), 4096, GIB, "cuda:0")  # the longest request is shorter then
    with pytest.raises(ModelError, match=r"a KV block needs 1 GiB of KV on cpu, .* room for 0 GiB"):
        check_blocks(0, replace(engine, max_model_len=None), 4096, GIB, "cpu")


@pytest.mark.parametrize("executor", ["torch", "simulated"])
async def test_a_worker_tells_how_many_blocks_it_took(model: ModelFolder, executor: str) -> None:
    sizes = replace(config(1, 1, kv_blocks=0, max_running=4), model=str(model.path), executor=executor)
    server = build_worker(sizes)
    worker = await server.open()
    context = CONTEXT if executor == "torch" else 4096
    assert worker.engine.stats().total_blocks == blocks_in_use(sizes.engine, context)
    await server.close()


def test_a_pool_without_kv_blocks_is_simulated_with_what_its_hardware_holds() -> None:
    pool = {"name": "all", "role": "mixed"}
    spec = parse_spec({"model": "llama-3-8b", "pools": [pool]})
    assert spec.pools[0].engine.kv_blocks == 0
    with pytest.raises(SpecError, match=r"pools\[0\]\.engine\.kv_blocks is left out"):
        with_kv_blocks(spec)
    on_l4 = with_kv_blocks(parse_spec({"model": "llama-3-8b", "pools": [pool | {"hardware": "l4"}]}))
    assert on_l4.pools[0].engine.kv_blocks == kv_capacity_tokens("llama-3-8b", "l4", 1, 1) // 16


def test_only_a_gpu_that_caches_prefixes_has_a_host_cache_by_default() -> None:
    cuda, cpu, worker = torch.device("cuda"), torch.device("cpu"), config(1, 1)
    assert has_default_host_cache(worker, cuda) and not has_default_host_cache(worker, cpu)
    assert not has_default_host_cache(replace(worker, cache=CacheConfig(host=ByteSize(0))), cuda)
    assert not has_default_host_cache(config(1, 1, prefix_caching=False), cuda)


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
async def test_ranks_take_the_smallest_default_host_cache_that_one_proposes(
    model: ModelFolder, monkeypatch: pytest.MonkeyPatch, tensor: int, pipeline: int
) -> None:
    """As on GPUs: the pool's 16 blocks and half as many."""
    proposals = iter((16, 8))
    monkeypatch.setattr(rank_loader, "has_default_host_cache", lambda *_: True)
    monkeypatch.setattr(rank_loader, "default_host_cache_blocks", lambda *_: next(proposals))
    gang = await open_tasks(model, tensor, pipeline)
    assert gang.facts.host_cache_blocks == 8
    await gang.close()
