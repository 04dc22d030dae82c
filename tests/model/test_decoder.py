import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.model.paging import pool_for, run_chunks, scattered_tables
from tests.model.tiny import write_tiny_llama
from workers.errors import ModelError
from workers.model.config import read_model_config
from workers.model.folder import ModelFolder
from workers.model.load import load_decoder
from workers.model.weights import fuse

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SHAPES: dict[str, dict[str, Any]] = {
    "grouped heads, tied": {},
    "untied": {"tie_embeddings": False},
    "every head its own KV": {"num_kv_heads": 4},
    "one KV head": {"num_kv_heads": 1, "num_layers": 3},
    "wide heads": {"head_dim": 16},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "linear rope": {"rope": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}},
    "llama3 rope": {"rope": LLAMA3},
    "bfloat16 in shards": {"dtype": torch.bfloat16, "shards": 3},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_logits_equal_transformers_however_the_prompts_are_cut(tmp_path: Path, shape: dict[str, Any]) -> None:
    folder = ModelFolder("m", write_tiny_llama(tmp_path / "m", **shape))
    model = load_decoder(folder, torch.device("cpu"), torch.float32)
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 300) for _ in range(length)] for length in (37, 5, 64)]
    tables = scattered_tables([len(prompt) for prompt in prompts], num_blocks=40, block_size=4, rng=rng)
    steps = [[(0, 10)], [(0, 1), (1, 5), (2, 30)], [(0, 1), (2, 1)], [(2, 33), (0, 25)]]
    ours = run_chunks(model, pool_for(model.config, 40), prompts, tables, steps)
    theirs = AutoModelForCausalLM.from_pretrained(folder.path, dtype=torch.float32)
    for prompt, logits in zip(prompts, ours, strict=True):
        with torch.inference_mode():
            expected = theirs(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_neighbours_in_the_file_are_mapped_not_copied() -> None:
    base = torch.arange(24.0)
    parts = [base[:8].view(2, 4), base[8:12].view(1, 4), base[12:].view(3, 4)]
    fused = fuse(parts)
    assert fused.data_ptr() == base.data_ptr()
    assert torch.equal(fused, torch.cat(parts))
    apart = [parts[2], parts[0]]
    assert torch.equal(fuse(apart), torch.cat(apart))


def test_end_tokens_of_the_generation_config_win(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "m")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    assert read_model_config(folder).eos_token_ids == (2, 0)
    (folder / "generation_config.json").unlink()
    assert read_model_config(folder).eos_token_ids == (2,)


def test_old_style_rope_fields_are_read(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "m")
    fields = json.loads((folder / "config.json").read_text())
    del fields["rope_parameters"]
    fields |= {"rope_theta": 123.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    (folder / "config.json").write_text(json.dumps(fields))
    rope = read_model_config(folder).layers[0].rope
    assert rope is not None and (rope.theta, rope.kind, rope.factor) == (123.0, "linear", 2.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is unknown; known are LlamaForCausalLM"),
        ({"architectures": None}, "unnamed is unknown"),
        ({"hidden_size": "big"}, "hidden_size is 'big'"),
        ({"num_key_value_heads": 3}, "cannot share 3 KV heads"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "'spiral' is not supported; supported: default, linear"),
        ({"rope_parameters": {"rope_type": "linear"}}, "lacks 'factor'"),
        ({"sliding_window": 128}, "sliding_window 128 is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"dtype": "int8"}, "dtype 'int8'"),
    ],
)
def test_a_model_that_we_cannot_compute_is_refused_by_name(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    folder = write_tiny_llama(tmp_path / "m")
    fields = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelError, match=words.replace("(", r"\(")):
        read_model_config(folder)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "m")
    fields = json.loads((folder / "config.json").read_text()) | {"intermediate_size": 65}
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelError, match=r"gate_proj.weight has shape \[64, 32\], config.json says \[65, 32\]"):
        load_decoder(ModelFolder("m", folder), torch.device("cpu"), torch.float32)
