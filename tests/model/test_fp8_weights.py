"""Checkpoints in float8 with a scale for each 128 x 128 numbers, as DeepSeek V3's, are read as what they mean."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.model.families import write_family
from tests.model.paging import pool_for, run_chunks
from workers.errors import ModelError
from workers.model.folder import ModelFolder, check_folder, count_parameters
from workers.model.load import load_decoder
from workers.model.weights import from_fp8

CPU = torch.device("cpu")
PLAIN = ("embed_tokens", "lm_head", "mlp.gate.")  # as in the published checkpoints
SIZES = {"hidden_size": 160, "intermediate_size": 272, "kv_lora_rank": 132}  # blocks of 128, and less at the ends
DOWN, NORM = "model.layers.0.mlp.down_proj.weight", "model.norm.weight"
Tensors = dict[str, Tensor]


def write_fp8(
    folder: Path, change: Callable[[Tensors], object] = lambda tensors: None
) -> tuple[ModelFolder, ModelFolder]:
    """A checkpoint in float8, with `change`s, and the same numbers in float32."""
    plain, packed = (write_family(folder / name, "deepseek 3", **SIZES) for name in ("plain", "packed"))
    tensors = load_file(packed / "model.safetensors")
    numbers: Tensors = {}
    for name in [name for name, each in tensors.items() if each.dim() == 2 and not any(part in name for part in PLAIN)]:
        rows, columns = tensors[name].shape
        scales = torch.empty(-(-rows // 128), -(-columns // 128))
        coded, exact = torch.empty(rows, columns, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
        for row in range(0, rows, 128):
            for column in range(0, columns, 128):
                at = slice(row, row + 128), slice(column, column + 128)
                scale = tensors[name][at].abs().max() / 448
                scales[row // 128, column // 128] = scale
                coded[at] = (tensors[name][at] / scale).to(torch.float8_e4m3fn)
                exact[at] = coded[at].float() * scale
        tensors[name], tensors[f"{name}_scale_inv"], numbers[name] = coded, scales, exact
    change(tensors)
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    save_file(load_file(plain / "model.safetensors") | numbers, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (packed / "config.json").write_text(json.dumps(config))
    return ModelFolder("packed", packed), ModelFolder("plain", plain)


def test_blocks_mean_their_numbers_times_their_scales(tmp_path: Path) -> None:
    folders = write_fp8(tmp_path)
    prompt, logits = list(range(5, 40)), []
    for folder in folders:
        check_folder(folder)
        model = load_decoder(folder, CPU, torch.float32)
        logits += run_chunks(model, pool_for(model.config, 12), [prompt], [list(range(10))], [[(0, 35)]])
    assert torch.equal(*logits)
    assert count_parameters(folders[0]) == count_parameters(folders[1])


def test_rows_of_a_matrix_have_the_scales_of_their_blocks() -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(300, 200, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2, generator=generator)
    whole = from_fp8(numbers, scales)
    assert torch.equal(whole[130, 140], numbers[130, 140].float() * scales[1, 1])
    assert torch.equal(from_fp8(numbers[120:290], scales, 120), whole[120:290])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop(DOWN + "_scale_inv"), "but there is none"),
        (
            lambda tensors: tensors.update({DOWN + "_scale_inv": torch.ones(1, 3)}),
            r"\[2, 3\], .* but its shape is \[1, 3\]",
        ),
        (lambda tensors: tensors.update({DOWN + "_scale_inv": torch.ones(2, 3).int()}), "of I32"),
        (
            lambda tensors: tensors.update({NORM: torch.ones(160).to(torch.float8_e4m3fn)}),
            f"{NORM} is of dtype F8_E4M3",
        ),
        (
            lambda tensors: tensors.update({NORM + "_scale_inv": torch.ones(1, 1)}),
            f"{NORM}_scale_inv .* is not part of",
        ),
    ],
)
def test_scales_that_do_not_fit_are_refused(tmp_path: Path, change: Callable[[Tensors], object], words: str) -> None:
    folder, _ = write_fp8(tmp_path, change)
    with pytest.raises(ModelError, match=words):
        check_folder(folder)


def test_blocks_of_another_size_are_refused(tmp_path: Path) -> None:
    folder, _ = write_fp8(tmp_path)
    path = folder.path / "config.json"
    path.write_text(path.read_text().replace("[128, 128]", "[64, 128]"))
    with pytest.raises(
        ModelError, match=r"quantization_config 'fp8' is not supported; .* weight_block_size \[128, 128\]"
    ):
        check_folder(folder)
