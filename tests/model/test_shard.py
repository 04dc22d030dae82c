"""The parts of a model make the whole, for any sizes and any gang."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.config import ParallelConfig
from workers.errors import ModelError
from workers.model.description import ExpertsConfig, LayerConfig, ModelConfig
from workers.model.shard import UNIT, Range, shard_of

SMOLLM2 = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=576,
    ffn_size=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=49152,
    context_length=8192,
    layers=(LayerConfig(rope=None),) * 30,
    rms_eps=1e-5,
    tie_embeddings=True,
    eos_token_ids=(2,),
    dtype="float32",
    attention_scale=0.125,
)
EXPERTS = ExpertsConfig(count=4, per_token=2, ffn_size=20, normalize=True)


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    kv_heads = draw(st.integers(1, 12))
    experts = replace(
        EXPERTS, ffn_size=draw(st.integers(1, 300)), shared_ffn_size=draw(st.sampled_from([0, 1, 40, 96]))
    )
    return replace(
        SMOLLM2,
        num_kv_heads=kv_heads,
        num_heads=kv_heads * draw(st.integers(1, 8)),
        ffn_size=draw(st.integers(1, 2000)),
        vocab_size=draw(st.integers(1, 1000)),
        layers=(LayerConfig(None), *[LayerConfig(None, has_experts=True)] * draw(st.integers(0, 40))),
        experts=draw(st.sampled_from([None, experts])),
    )


def narrowest(config: ModelConfig) -> int:
    widths = [config.num_heads, config.ffn_size, config.vocab_size]
    if config.experts:
        widths += [config.experts.ffn_size, config.experts.shared_ffn_size or config.num_heads]
    return min(widths)


def covers(parts: list[Range], width: int) -> bool:
    """Whether the parts, none empty, are consecutive and the whole."""
    ends = [0, *(end for _, end in parts)]
    return ends[-1] == width and all(
        first == before and (end > first or width == 0) for (first, end), before in zip(parts, ends, strict=False)
    )


@given(config=models(), data=st.data())
def test_the_parts_make_the_whole(config: ModelConfig, data: st.DataObject) -> None:
    tensor = data.draw(st.integers(1, min(24, narrowest(config))))
    pipeline = data.draw(st.integers(1, config.num_layers))
    shards = [shard_of(config, ParallelConfig(tensor, pipeline), rank) for rank in range(tensor * pipeline)]
    assert [(each.stage, each.tensor_rank) for each in shards] == [
        (s, t) for s in range(pipeline) for t in range(tensor)
    ]
    assert covers([each.layers for each in shards[::tensor]], config.num_layers)
    experts = config.experts or replace(EXPERTS, ffn_size=0)
    for stage in range(pipeline):
        row = shards[stage * tensor : (stage + 1) * tensor]
        assert len({each.layers for each in row}) == 1
        assert covers([each.heads for each in row], config.num_heads)
        assert covers([each.ffn for each in row], config.ffn_size)
        assert covers([each.vocab for each in row], config.vocab_size)
        assert covers([each.expert_ffn for each in row], experts.ffn_size)
        assert covers([each.shared_ffn for each in row], experts.shared_ffn_size)
        assert [each.is_first for each in row] == [stage == 0] * tensor
        assert [each.is_last for each in row] == [stage == pipeline - 1] * tensor


@given(config=models(), data=st.data())
def test_every_query_head_is_with_its_kv_head(config: ModelConfig, data: st.DataObject) -> None:
    tensor = data.draw(st.integers(1, min(24, narrowest(config))))
    group = config.num_heads // config.num_kv_heads
    held: list[Any] = []
    for rank in range(tensor):
        shard = shard_of(config, ParallelConfig(tensor), rank)
        part = shard.part_of(config)
        assert part.num_heads % part.num_kv_heads == 0
        local_group = part.num_heads // part.num_kv_heads
        for local, head in enumerate(range(*shard.heads)):
            assert shard.kv_heads[0] + local // local_group == head // group
        held += range(*shard.kv_heads)
    copies = [held.count(head) for head in range(config.num_kv_heads)]
    assert min(copies) >= 1
    assert sum(copies) == max(tensor, config.num_kv_heads)


@given(width=st.integers(1, 5000), data=st.data())
def test_borders_of_columns_lie_on_whole_units_where_there_are_enough(width: int, data: st.DataObject) -> None:
    tensor = data.draw(st.integers(1, min(16, width)))
    config = replace(SMOLLM2, num_heads=16, num_kv_heads=1, ffn_size=width)
    borders = [shard_of(config, ParallelConfig(tensor), rank).ffn[0] for rank in range(tensor)]
    sizes = [end - first for first, end in zip(borders, [*borders[1:], width], strict=True)]
    if width > UNIT * (tensor - 1):
        assert all(border % UNIT == 0 for border in borders)
    assert max(sizes) - min(sizes) <= 2 * UNIT - 1


def test_uneven_heads_and_replicated_ones() -> None:
    two = [shard_of(SMOLLM2, ParallelConfig(2), rank) for rank in range(2)]
    assert [(each.kv_heads, each.heads) for each in two] == [((0, 1), (0, 3)), ((1, 3), (3, 9))]
    four = [shard_of(SMOLLM2, ParallelConfig(4), rank) for rank in range(4)]
    assert [each.kv_heads for each in four] == [(0, 1), (0, 1), (1, 2), (2, 3)]
    assert [each.heads for each in four] == [(0, 1), (1, 3), (3, 6), (6, 9)]


@pytest.mark.parametrize(
    ("config", "parallel", "words"),
    [
        (
            SMOLLM2,
            ParallelConfig(10),
            r"parallel.tensor is 10, but the model has 9 attention heads; set it to 9 or less",
        ),
        (SMOLLM2, ParallelConfig(1, 31), r"parallel.pipeline is 31, but the model has 30 layers; set it to 30 or less"),
        (replace(SMOLLM2, ffn_size=3), ParallelConfig(4), "has 3 feed-forward columns; set it to 3"),
        (replace(SMOLLM2, vocab_size=5), ParallelConfig(6), "has 5 tokens in its vocabulary; set it to 5"),
        (replace(SMOLLM2, experts=replace(EXPERTS, ffn_size=2)), ParallelConfig(3), "has 2 columns in an expert"),
        (replace(SMOLLM2, experts=replace(EXPERTS, shared_ffn_size=1)), ParallelConfig(2), "1 columns in its shared"),
    ],
)
def test_a_gang_that_the_model_cannot_fill_is_refused(
    config: ModelConfig, parallel: ParallelConfig, words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        shard_of(config, parallel, 0)


def test_a_dense_width_that_no_layer_has_limits_nothing() -> None:
    config = replace(SMOLLM2, ffn_size=1, layers=(LayerConfig(None, has_experts=True),) * 2, experts=EXPERTS)
    assert shard_of(config, ParallelConfig(4), 3).expert_ffn == (15, 20)
