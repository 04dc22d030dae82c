"""The state of linear attention has room of its own in every block, on every rank."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.config import ParallelConfig
from workers.model.config import ModelConfig
from workers.model.description import LinearAttentionConfig
from workers.model.families import describe
from workers.model.fields import Fields
from workers.model.kv_layers import STATE_BYTES, kv_layout, kv_places, kv_range, min_block_size
from workers.model.shard import shard_of

# As their config.json files on the hub say, but for what has a default.
QWEN3_NEXT_80B: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "full_attention_interval": 4,
    "num_experts": 512,
    "partial_rotary_factor": 0.25,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "vocab_size": 151936,
}


def published() -> ModelConfig:
    return describe(Fields(Path("config.json"), QWEN3_NEXT_80B))


def test_the_published_model_has_the_sizes_that_the_documentation_says() -> None:
    config = published()
    assert sum(layer.is_linear for layer in config.layers) == 36 and config.layers[3].rope is not None
    assert config.layers[3].rope.rotary_dim == 64
    assert min_block_size(config, "bfloat16") == 1072
    plain = kv_layout(replace(config, layers=config.layers[3::4], linear=None), "m", 16, "bfloat16")
    assert plain.block_bytes == 16 * 24 * 1024
    for block_size, times in ((16, 202), (1072, 4), (1616, 3), (3232, 2)):
        layout = kv_layout(config, "m", block_size, "bfloat16")
        assert layout.block_bytes == times * plain.block_bytes * block_size // 16


@given(
    kinds=st.lists(st.booleans(), min_size=1, max_size=12),
    state=st.integers(1, 40),
    block_size=st.integers(1, 64),
    stages=st.integers(1, 12),
)
def test_each_state_has_room_of_its_own_on_the_stage_of_its_layer(
    kinds: list[bool], state: int, block_size: int, stages: int
) -> None:
    model = published()
    layers = tuple(replace(model.layers[0], is_linear=kind) for kind in kinds)
    linear = LinearAttentionConfig(key_heads=2, value_heads=2, key_dim=state, value_dim=3, kernel=4)
    config = replace(model, layers=layers, linear=linear)
    layout = kv_layout(config, "m", block_size, "float32")
    state_bytes, rooms = STATE_BYTES * sum(linear.state_numbers(2)), []
    for kind, place in zip(kinds, kv_places(config, layout.cell_bytes), strict=True):
        start = place.first * layout.cell_bytes + place.state_offset
        end = start + (state_bytes if kind else layout.cell_bytes)
        assert end <= place.end * layout.cell_bytes
        assert all((each in layout.state_layers) == kind for each in range(place.first, place.end))
        rooms.append((start, end))
    assert all(end <= start for (_, end), (start, _) in pairwise(rooms))
    if stages > len(config.runs):
        return
    parts = [shard_of(config, ParallelConfig(1, stages), rank) for rank in range(stages)]
    borders = [kv_range(config, layout, part.layers) for part in parts]
    assert [0, *(end for _, end in borders)] == [*(first for first, _ in borders), layout.num_layers]
    for part, (first, end) in zip(parts, borders, strict=True):
        here = kv_places(part.part_of(config), layout.cell_bytes)
        assert here[0].first == 0 and here[-1].end == end - first


@pytest.mark.parametrize(("block_size", "fits"), [(1071, False), (1072, True)])
def test_the_least_block_holds_a_state_in_each_cell(block_size: int, fits: bool) -> None:
    config = published()
    state_bytes = STATE_BYTES * sum(config.linear.state_numbers(2)) if config.linear else 0
    assert (kv_layout(config, "m", block_size, "bfloat16").cell_bytes >= state_bytes) == fits
