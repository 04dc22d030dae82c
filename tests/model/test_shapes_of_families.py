"""The planner's shape of a model is that of the model loader: bytes of KV and state, and parameters."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.model.families import write_family
from workers.model.config import read_model_config
from workers.model.kv_layers import kv_layout
from workers.profiles.capacity import kv_capacity_tokens
from workers.profiles.computed import roofline
from workers.profiles.hardware import hardware_of
from workers.profiles.shapes import shape_of

FAMILIES = (
    *("llama 3", "mixtral", "qwen 2 moe", "llama 4, some dense", "deepseek 2", "deepseek 3, no groups", "gpt oss"),
    *("qwen 3 next", "qwen 3.5", "qwen 3.5 moe with eyes, stacked"),
)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shape_has_the_engines_bytes_and_the_checkpoints_parameters(family: str, tmp_path: Path) -> None:
    folder = write_family(tmp_path, family)
    config, shape = read_model_config(folder), shape_of(str(folder))
    for block_size in (shape.block_size, 16, 48):
        for dtype in ("float32", "int8"):
            found = replace(shape, block_size=block_size, kv_dtype=dtype if dtype == "int8" else "")
            block_bytes = kv_layout(config, "model", block_size, dtype).block_bytes
            assert found.kv_bytes_per_token * block_size == block_bytes
    with safe_open(folder / "model.safetensors", "pt") as file:
        sizes = [
            file.get_slice(name).get_shape()
            for name in file.keys()  # noqa: SIM118
            if not name.startswith(config.names.foreign) and "visual" not in name
        ]
    numbers = sum(math.prod(size) for size in sizes if len(size) > 1)  # without norms and biases
    assert shape.parameters == pytest.approx(numbers, rel=0.015)  # routers are left out


def test_a_linear_layers_state_takes_memory_and_time(tmp_path: Path) -> None:
    """Qwen3-Next 80B-A3B: docs/decisions/0096."""
    config = {"architectures": ["Qwen3NextForCausalLM"], "head_dim": 256, "hidden_size": 2048, "num_hidden_layers": 48}
    config |= {"num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151_936}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = shape_of(str(tmp_path))
    assert shape.parameters / 1e9 == pytest.approx(80, rel=0.01)
    active = shape.active_parameters + 2 * shape.head_parameters
    assert active / 1e9 == pytest.approx(3.9, rel=0.1)
    assert shape.context_bytes_per_token == 24 * 1024
    assert shape.state_bytes / 2**20 == pytest.approx(75, rel=0.02)
    assert shape.block_size == 1072 and shape.kv_bytes_per_token == 4 * shape.context_bytes_per_token
    tokens = kv_capacity_tokens(shape, "h100-80gb", 4)
    assert tokens * shape.kv_bytes_per_token <= 2 * (4 * 0.9 * 80 * 2**30 - shape.weight_bytes)  # 4 ranks, 2 KV heads
    cost = roofline(shape, hardware_of("h100-80gb"), 1, 1)
    none = replace(cost, state_s=0.0)
    assert cost.decode_seconds(64, 64_000) - none.decode_seconds(64, 64_000) == pytest.approx(
        64 * 2 * shape.state_bytes / (0.8 * 3350e9)
    )
