"""MXFP4 experts are what transformers makes of the same bytes, to the last bit."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.model.families import write_family
from workers.errors import ModelError
from workers.model.folder import ModelFolder, check_folder, count_parameters
from workers.model.load import load_decoder
from workers.model.weights import from_mxfp4

SCALES = "model.layers.1.mlp.experts.down_proj_scales"


def test_every_number_at_every_scale_is_transformers() -> None:
    scales = torch.arange(255, dtype=torch.uint8)[:, None]
    blocks = torch.randint(0, 256, (255, 1, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    theirs = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)[0].t()
    ours = from_mxfp4(blocks, scales)
    assert torch.equal(ours, theirs) and torch.equal(ours.signbit(), theirs.signbit())
    assert len(ours[127].unique()) > 10, "most of the sixteen numbers occur"
    assert not from_mxfp4(blocks, torch.full_like(scales, 255)).isfinite().any()


def test_a_scale_that_is_none_is_found_at_load(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "m", "gpt oss, mxfp4")
    tensors = load_file(folder / "model.safetensors")
    tensors[SCALES][3, 7, 1] = 255
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"model.layers.1.mlp.experts.down_proj holds NaN or infinity"):
        load_decoder(ModelFolder("m", folder), torch.device("cpu"), torch.float32)


def test_blocks_are_bytes_and_count_as_two_parameters(tmp_path: Path) -> None:
    packed, plain = (ModelFolder(name, write_family(tmp_path / name, name)) for name in ("gpt oss, mxfp4", "gpt oss"))
    assert count_parameters(packed) == count_parameters(plain)
    tensors = load_file(packed.path / "model.safetensors")
    save_file(tensors | {SCALES: tensors[SCALES].float()}, packed.path / "model.safetensors")
    with pytest.raises(ModelError, match=f"{SCALES} is of dtype F32; supported: U8"):
        check_folder(packed)
