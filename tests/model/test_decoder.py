import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.model.paging import pool_for, run_chunks, scattered_tables
from tests.model.tiny import write_tiny_llama
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


def test_neighboring_tensors_in_the_file_are_mapped_not_copied() -> None:
    base = torch.arange(24.0)
    parts = [base[:8].view(2, 4), base[8:12].view(1, 4), base[12:].view(3, 4)]
    fused = fuse(parts)
    assert fused.data_ptr() == base.data_ptr()
    assert torch.equal(fused, torch.cat(parts))
    apart = [parts[2], parts[0]]
    assert torch.equal(fuse(apart), torch.cat(apart))
