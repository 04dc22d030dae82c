"""A gang's logits and KV are those of one rank, for every family, however model and prompts are cut."""

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.model.families import write_family
from tests.model.gangs import on_all_ranks, run_stage
from tests.model.paging import pool_for, scattered_tables
from tests.model.tiny import write_tiny_llama
from workers.config import ParallelConfig
from workers.errors import ModelError
from workers.executor.kv_pool import KVPool, allocate_pool
from workers.model.config import ModelConfig, read_model_config
from workers.model.folder import ModelFolder
from workers.model.kv_layers import kv_layout, kv_range
from workers.model.load import load_decoder, stacked
from workers.model.shard import ModelShard, shard_of
from workers.model.weights import Part
from workers.ops.attention import NATIVE, SDPA, Attention
from workers.ops.collective import StageLink, TensorGroup
from workers.ops.native.library import library

pytestmark = pytest.mark.grid

CPU = torch.device("cpu")
BLOCK = 4
GANGS = [(2, 1), (3, 1), (1, 2), (1, 3), (2, 2), (4, 1)]
SMALL: dict[str, Any] = {"num_heads": 9, "num_kv_heads": 3, "hidden_size": 72, "ffn_size": 136, "num_layers": 3}
LLAMAS: dict[str, dict[str, Any]] = {
    "9 heads, 3 KV heads": SMALL,
    "biases, untied": SMALL | {"attention_bias": True, "mlp_bias": True, "tie_embeddings": False},
}
FAMILIES = ["qwen 3 moe", "qwen 3 moe, some dense", "qwen 2 moe", "gemma 2", "phi 3, short", "qwen 3, biases"]
FAMILIES += ["gpt oss", "gpt oss, mxfp4", "llama 4, some dense", "qwen 3 next", "qwen 3.5"]
FAMILIES += ["deepseek 2, no query latent", "deepseek 3"]
LENGTHS = (23, 5, 37)
STEPS = [[(0, 10)], [(0, 1), (1, 5), (2, 30)], [(0, 1), (2, 1)], [(2, 6), (0, 11)]]


def kernels() -> Attention:
    return SDPA if library() is None else NATIVE


@dataclass(frozen=True)
class Outcome:
    """The result of a run on a gang: each step's logits, each rank's shard, layers of KV and pool."""

    logits: list[Tensor]
    shards: list[ModelShard]
    layers: list[tuple[int, int]]
    pools: list[Tensor]


def outcome(
    folder: ModelFolder,
    parallel: ParallelConfig,
    prompts: list[list[int]],
    steps: list[list[tuple[int, int]]],
    weight_format: str = "float32",
    deterministic: bool = False,
) -> Outcome:
    config = read_model_config(folder.path)
    lengths = [len(prompt) for prompt in prompts]
    num_blocks = sum(-(-length // BLOCK) for length in lengths) + 3
    tables = scattered_tables(lengths, num_blocks, BLOCK, random.Random(2))

    def rank(
        number: int, group: TensorGroup | None, link: StageLink | None
    ) -> tuple[list[Tensor | None], ModelShard, KVPool]:
        shard = shard_of(config, parallel, number)
        model = load_decoder(folder, CPU, torch.float32, kernels(), weight_format, deterministic, shard, group)
        pool = pool_of(config, shard, num_blocks)
        logits = run_stage(model, link, pool, prompts, tables, steps)
        return logits, shard, pool

    ranks = on_all_ranks(parallel, rank)
    speaker = (parallel.pipeline - 1) * parallel.tensor
    for number, (logits, _, _) in enumerate(ranks):
        assert all((each is not None) == (number == speaker) for each in logits)
    spoken = [each for each in ranks[speaker][0] if each is not None]
    assert len(spoken) == len(steps)
    shards, pools = [rank[1] for rank in ranks], [rank[2] for rank in ranks]
    return Outcome(spoken, shards, [pool.region.layout.layers for pool in pools], [pool.blocks for pool in pools])


def pool_of(config: ModelConfig, shard: ModelShard, num_blocks: int) -> KVPool:
    layout = kv_layout(config, "test", BLOCK, "float32")
    if (shard.tensor, shard.stages) == (1, 1):
        return pool_for(config, num_blocks, BLOCK)
    part = replace(layout, layers=kv_range(config, layout, shard.layers), heads=shard.kv_heads)
    return allocate_pool(part, num_blocks, CPU)


def check_equal(found: Outcome, alone: Outcome, parallel: ParallelConfig) -> None:
    for logits, wanted in zip(found.logits, alone.logits, strict=True):
        if parallel.tensor == 1:
            assert torch.equal(logits, wanted)
        else:
            torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
    (whole,) = alone.pools
    for shard, layers, pool in zip(found.shards, found.layers, found.pools, strict=True):
        part = whole[:, slice(*shard.kv_heads), slice(*layers)]
        if parallel.tensor == 1:
            assert torch.equal(pool, part)
            continue
        torch.testing.assert_close(pool, part, rtol=1e-4, atol=1e-4)
        if shard.is_first:  # nothing has been added up but embeddings and zeros
            assert torch.equal(pool[:, :, 0], part[:, :, 0])


def drawn_prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(3, 300) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module", params=[*LLAMAS, *FAMILIES])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    path = tmp_path_factory.mktemp("family") / "m"
    name = request.param
    written = write_tiny_llama(path, **LLAMAS[name]) if name in LLAMAS else write_family(path, name)
    return ModelFolder(name, written)


@pytest.fixture(scope="module")
def alone(folder: ModelFolder) -> Outcome:
    return outcome(folder, ParallelConfig(), drawn_prompts(), STEPS)


@pytest.mark.parametrize(("tensor", "pipeline"), GANGS)
def test_a_gang_computes_what_one_rank_does(folder: ModelFolder, alone: Outcome, tensor: int, pipeline: int) -> None:
    parallel = ParallelConfig(tensor, pipeline)
    check_equal(outcome(folder, parallel, drawn_prompts(), STEPS), alone, parallel)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_odd_shapes_in_any_gang(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    kv_heads, group = data.draw(st.sampled_from([(5, 1), (5, 2), (1, 5), (2, 3)]))
    path = write_tiny_llama(
        tmp_path_factory.mktemp("odd") / "m",
        num_layers=7,
        hidden_size=data.draw(st.sampled_from([40, 52])),
        ffn_size=data.draw(st.sampled_from([50, 99, 131])),
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=40,
        vocab_size=data.draw(st.sampled_from([300, 331])),
        tie_embeddings=data.draw(st.booleans()),
        attention_bias=data.draw(st.booleans()),
    )
    parallel = ParallelConfig(data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3)))
    folder, prompts = ModelFolder("m", path), drawn_prompts((19, 4))
    first = data.draw(st.integers(1, 18))
    steps = [[(0, first)], [(1, 3), (0, 19 - first)], [(1, 1)]]
    check_equal(outcome(folder, parallel, prompts, steps), outcome(folder, ParallelConfig(), prompts, steps), parallel)


@pytest.mark.skipif(library() is None, reason="needs the native kernels: install g++")
@pytest.mark.parametrize("tensor", [2, 3])
def test_deterministic_logits_of_a_gang_do_not_depend_on_how_a_prompt_was_cut(tmp_path: Path, tensor: int) -> None:
    folder = ModelFolder("m", write_tiny_llama(tmp_path / "m", **SMALL))
    prompts = drawn_prompts((30,))
    whole, cut = (
        outcome(folder, ParallelConfig(tensor), prompts, steps, deterministic=True).logits
        for steps in ([[(0, 30)]], [[(0, 11)], [(0, 1)], [(0, 18)]])
    )
    assert torch.equal(torch.cat(cut), whole[0])


@pytest.mark.parametrize("weight_format", ["q8_0", "bfloat16"])
def test_other_weight_formats_come_close(tmp_path: Path, weight_format: str) -> None:
    """q8_0 has the same blocks on two ranks as on one: the heads and columns here end where blocks do."""
    sizes: dict[str, Any] = {"hidden_size": 64, "ffn_size": 128, "head_dim": 32, "num_heads": 6, "num_kv_heads": 3}
    folder = ModelFolder("m", write_tiny_llama(tmp_path / "m", **sizes))
    prompts = drawn_prompts((20,))
    one, two = (
        outcome(folder, ParallelConfig(tensor), prompts, [[(0, 20)]], weight_format).logits[0] for tensor in (1, 2)
    )
    torch.testing.assert_close(two, one, rtol=1e-3, atol=1e-3 * one.abs().max().item())


def test_a_part_reads_no_more_than_its_own(tmp_path: Path) -> None:
    """What is not finite stops the rank that holds it, and no other."""
    path = write_tiny_llama(tmp_path / "m", **SMALL)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.2.mlp.down_proj.weight"][5, 100] = torch.nan
    save_file(tensors, path / "model.safetensors")
    config = read_model_config(path)

    def loads(number: int, group: TensorGroup | None, _: StageLink | None) -> bool:
        shard = shard_of(config, ParallelConfig(2, 3), number)
        try:
            load_decoder(ModelFolder("m", path), CPU, torch.float32, shard=shard, group=group)
        except ModelError as error:
            assert "model.layers.2.mlp.down_proj.weight holds NaN" in str(error)
            return False
        return True

    assert on_all_ranks(ParallelConfig(2, 3), loads) == [True] * 5 + [False]


def test_a_shard_needs_its_own_group(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "m", **SMALL)
    shard = shard_of(read_model_config(path), ParallelConfig(2), 1)
    with pytest.raises(ValueError, match="tensor rank 1 of 2 needs the group"):
        load_decoder(ModelFolder("m", path), CPU, torch.float32, shard=shard)


def test_rows_of_fused_and_of_separate_tensors_are_the_same() -> None:
    cuts = [(6, (2, 4)), (4, (0, 2)), (4, (0, 2))]
    assert stacked(["q", "k", "v"], cuts) == [Part("q", 6, (2, 4)), Part("k", 4, (0, 2)), Part("v", 4, (0, 2))]
    assert stacked(["qkv"], cuts) == [Part("qkv", 14, (2, 4)), Part("qkv", 14, (6, 8)), Part("qkv", 14, (10, 12))]
    assert stacked(["qkv"], [(6, (4, 6)), (4, (0, 4)), (4, (0, 1))]) == [Part("qkv", 14, (4, 11))]
