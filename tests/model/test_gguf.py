"""A GGUF file computes what the checkpoint computes that it was made from."""

import json
import random
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model.families import FAMILIES, write_family
from tests.model.family_gguf import write_family_gguf
from tests.model.paging import pool_for, run_chunks, scattered_tables
from workers.errors import ModelError
from workers.model.folder import ModelFolder, check_folder
from workers.model.gguf import file as gguf_file
from workers.model.load import load_decoder

# What GGUF cannot say of a model: its file would mean another one.
UNSAYABLE = (
    "llama, dynamic",
    "llama, yarn untruncated",
    "qwen 2, upper windows",
    "qwen 3 moe, some dense",
    "gemma 3 with eyes",
    "gpt oss",
    "gpt oss, mxfp4",
    *(name for name in FAMILIES if name.startswith(("llama 4", "deepseek", "qwen 3 next", "qwen 3.5"))),
)


@pytest.fixture
def no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversion of tokenizers is transformers', slow, and tested in test_store."""
    monkeypatch.setattr(
        gguf_file, "_write_tokenizer", lambda source, target: (target / "tokenizer.json").write_text("{}")
    )


def converted(source: Path, target: Path) -> ModelFolder:
    target.mkdir()
    gguf_file.convert_gguf(source, target, lambda *_: None)
    folder = ModelFolder("converted", target)
    check_folder(folder)
    return folder


def logits(folder: ModelFolder) -> torch.Tensor:
    model = load_decoder(folder, torch.device("cpu"), torch.float32)
    prompt = torch.randint(3, 300, (48,), generator=torch.Generator().manual_seed(0)).tolist()
    (tables,) = scattered_tables([48], 30, 4, random.Random(0))
    return run_chunks(model, pool_for(model.config, 30), [prompt], [tables], [[(0, 40)], [(0, 8)]])[0]


@pytest.mark.usefixtures("no_tokenizer")
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in UNSAYABLE])
def test_a_family_survives_the_way_through_gguf(tmp_path: Path, name: str) -> None:
    folder = ModelFolder(name, write_family(tmp_path / "hub", name))
    there = converted(write_family_gguf(folder.path, tmp_path / "m.gguf"), tmp_path / "converted")
    torch.testing.assert_close(logits(there), logits(folder), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("no_tokenizer")
def test_experts_are_taken_out_of_a_quantized_stack(tmp_path: Path) -> None:
    hub = write_family(tmp_path / "hub", "mixtral")
    source = write_family_gguf(hub, tmp_path / "m.gguf", "q8_0")
    found = load_file(converted(source, tmp_path / "converted").path / "model.safetensors")
    for name, numbers in load_file(hub / "model.safetensors").items():
        assert (found[name] - numbers).abs().max() <= numbers.abs().max() / 127, name


def change_config(hub: Path, **changes: Any) -> None:
    path = hub / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensor(hub: Path, name: str, numbers: torch.Tensor | None) -> None:
    """Another tensor in its place, or none."""
    tensors = load_file(hub / "model.safetensors")
    tensors.pop(name, None)
    save_file(tensors if numbers is None else {**tensors, name: numbers}, hub / "model.safetensors")


@pytest.mark.usefixtures("no_tokenizer")
def test_what_cannot_be_computed_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    def words(name: str, family: str = "qwen 3", **changes: Any) -> str:
        hub = write_family(tmp_path / name, family)
        change_config(hub, **changes)
        tensor = f"model.layers.1.{name}.weight"
        if name == "self_attn.q_norm":
            change_tensor(hub, tensor, None)
        if name == "self_attn.o_proj":
            change_tensor(hub, tensor, torch.ones(32, 96, dtype=torch.int32))
        target = tmp_path / f"{name}-converted"
        with pytest.raises(ModelError) as error:
            converted(write_family_gguf(hub, tmp_path / f"{name}.gguf"), target)
        assert not (target / "model.safetensors").exists()
        return str(error.value)

    assert "tensor blk.1.attn_q_norm.weight (one of 1) is missing" in words("self_attn.q_norm")
    quantized = words("self_attn.o_proj")
    assert "blk.1.attn_output.weight is quantized as I32, which is not supported; supported: F32" in quantized
    assert "Q4_K" in quantized
    assert "ffn_gate.weight has shape [48, 32], the metadata say [49, 32]" in words("mlp", intermediate_size=49)
    part = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    turned = words("rope", rope_parameters=part)
    assert "50% of a head's features are rotated, which is supported for architecture phi3 only" in turned
    assert "3 KV heads" in words("heads", num_key_value_heads=3, family="phi 3, short")


@pytest.mark.parametrize(
    ("architecture", "split", "words"),
    [
        ("rwkv6", 0, "GGUF architecture 'rwkv6' is unknown; known are llama, qwen2, "),
        ("llama", 3, "one part of a split model; join"),
        ("llama", 0, "tensor token_embd.weight is missing"),
    ],
)
def test_a_file_of_another_kind_says_what_it_is(tmp_path: Path, architecture: str, split: int, words: str) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", architecture)
    if split:
        writer.add_uint16("split.count", split)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=words):
        converted(tmp_path / "m.gguf", tmp_path / "converted")
