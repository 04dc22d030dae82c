"""Random LoRA adapters as PEFT folders, and the model that an adapter merged into its weights would be."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path, base: Path, seed: int, *, rank: int = 4, alpha: float = 8.0, targets: Sequence[str] = ALL, **more: Any
) -> Path:
    """An adapter of the model in `base`, large enough to change its answers. `more`: further fields of its config."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in targets and weight.dim() == 2:
            rows, columns = weight.shape
            a, b = torch.randn(rank, columns, generator=generator), torch.randn(rows, rank, generator=generator)
            tensors[f"base_model.model.{module}.lora_A.weight"] = a / columns**0.5
            tensors[f"base_model.model.{module}.lora_B.weight"] = b / rank**0.5 / 2
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(targets), "bias": "none"}
    more = {"base_model_name_or_path": "tiny", "task_type": "CAUSAL_LM", "inference_mode": True} | more
    (folder / "adapter_config.json").write_text(json.dumps(config | more))
    return folder


def merged(base: Path, adapter: Path, folder: Path) -> Path:
    """W + alpha / r * B A of every changed weight, computed in float64."""
    shutil.copytree(base, folder)
    config = json.loads((adapter / "adapter_config.json").read_text())
    rank = config["r"] ** 0.5 if config.get("use_rslora") else config["r"]
    tensors, changes = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name, a in changes.items():
        if ".lora_A." in name:
            b = changes[name.replace("lora_A", "lora_B")]
            target = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
            change = config["lora_alpha"] / rank * (b.double() @ a.double())
            tensors[target] = (tensors[target].double() + change).float()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
