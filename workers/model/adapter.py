"""A PEFT folder with a LoRA adapter, checked against the model that it should change.

Knows adapter_config.json and the header of adapter_model.safetensors; refuses by name what is not supported. Knows no
torch. Source: Hu et al., LoRA (2021); `use_rslora`: Kalajdzievski, Rank-Stabilized LoRA (2023).
"""

import hashlib
import math
import re
from dataclasses import dataclass
from pathlib import Path

from workers.errors import ModelError
from workers.model.config import read_model_config
from workers.model.content import file_id
from workers.model.description import ModelConfig
from workers.model.fields import Fields, read_fields
from workers.model.folder import WEIGHT_DTYPES, ModelFolder, TensorEntry, read_header
from workers.model.tensors import tensor_shapes
from workers.request import Adapter

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_RANK = 256
NUMBER_BYTES = 4  # numbers are counted as float32, whatever a device holds
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
# What changes the computation in a way that is not implemented, with the values that do not.
_ONLY = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "lora_bias": (False,),
    "fan_in_fan_out": (False,),
    "use_qalora": (False,),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),  # others change the base's weights
}
_EMPTY = (
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "use_bdlora",
)


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """`scale` multiplies B · A; `modules`: the names of the model's linear layers that it changes."""

    path: Path
    scale: float
    modules: frozenset[str]
    num_bytes: int

    @property
    def weights(self) -> Path:
        return self.path / WEIGHTS


def read_adapter(path: Path, model: ModelConfig) -> AdapterFolder:
    """Raises `ModelError` with one line that names the field, or the tensor, and says what is supported."""
    if model.linear is not None:
        raise ModelError(f"{path}: {model.architecture} has linear attention, which is served without adapters")
    for name in (CONFIG, WEIGHTS):
        if not (path / name).is_file():
            raise ModelError(f"{path / name} is missing: an adapter is a PEFT folder with {CONFIG} and {WEIGHTS}")
    fields = read_fields(path / CONFIG)
    for name, supported in _ONLY.items():
        fields.only(name, *supported)
    for name in _EMPTY:
        if value := fields.get(name):
            fields.refuse(f"{name} {value!r} is not supported; train the adapter without it")
    rank, alpha = fields.count("r", most=MAX_RANK), fields.number("lora_alpha")
    scale = alpha / (math.sqrt(rank) if fields.flag("use_rslora", default=False) else rank)
    shapes = _linear_shapes(model)
    _check_targets(fields, sorted({name.rpartition(".")[2] for name in shapes}))
    entries = read_header(path / WEIGHTS)
    found = {_part_of(path, entry): entry for entry in entries}
    for (module, part), entry in found.items():
        _check_tensor(path, fields, entry, part, rank, shapes.get(module))
        if (module, "B" if part == "A" else "A") not in found:
            raise ModelError(f"{path}: {entry.name} has no other half: {WEIGHTS} holds lora_A and lora_B of each layer")
    if not found:
        raise ModelError(f"{path / WEIGHTS} holds no tensors")
    num_bytes = NUMBER_BYTES * sum(math.prod(entry.shape) for entry in entries)
    return AdapterFolder(path, scale, frozenset(module for module, _ in found), num_bytes)


def adapter_of(name: str, path: Path, folder: ModelFolder) -> Adapter:
    """The adapter in `path` of the model in `folder`, checked. Reads the whole file. Raises `ModelError`."""
    path = path.expanduser().absolute()
    found = read_adapter(path, read_model_config(folder.path))
    digest = hashlib.sha256((path / CONFIG).read_bytes())
    digest.update(file_id(found.weights).encode())
    return Adapter(name, folder.name, str(path), digest.hexdigest()[:16], found.num_bytes)


def _linear_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The linear layers that an adapter may change: [out, in] by name."""
    names = model.names
    kinds = {f"{name}.weight" for name in (*names.qkv, names.output, *names.gate_up, names.down)}
    prefix = re.compile(rf"{re.escape(names.root)}\.layers\.\d+\.")
    return {
        name.removesuffix(".weight"): shape
        for name, shape in tensor_shapes(model).items()
        if (found := prefix.match(name)) and name[found.end() :] in kinds
    }


def _check_targets(fields: Fields, known: list[str]) -> None:
    targets = fields.get("target_modules", [])
    if isinstance(targets, str):  # a pattern: the names of the tensors are checked
        return
    if unknown := [each for each in targets if str(each).rpartition(".")[2] not in known]:
        fields.refuse(f"target_modules has {unknown[0]!r}; supported in this model: {', '.join(known)}")


def _part_of(path: Path, entry: TensorEntry) -> tuple[str, str]:
    """The linear layer's name, and "A" or "B"."""
    found = _TENSOR.fullmatch(entry.name)
    if found is None:
        raise ModelError(f"{path}: tensor {entry.name} is not supported; supported: lora_A and lora_B of linear layers")
    return found[1], found[2]


def _check_tensor(
    path: Path, fields: Fields, entry: TensorEntry, part: str, rank: int, shape: tuple[int, ...] | None
) -> None:
    base = f"was it trained for this model? base_model_name_or_path is {fields.get('base_model_name_or_path')!r}"
    if shape is None and "expert" in entry.name:
        raise ModelError(
            f"{path}: {entry.name} changes experts, which is not supported; train the adapter without them"
        )
    if shape is None:
        raise ModelError(f"{path}: this model has no linear layer for tensor {entry.name}; {base}")
    expected = (rank, shape[1]) if part == "A" else (shape[0], rank)
    if entry.shape != expected:
        raise ModelError(
            f"{path}: {entry.name} has shape {list(entry.shape)}; r and this model need {list(expected)}; {base}"
        )
    if entry.dtype not in WEIGHT_DTYPES:
        raise ModelError(f"{path}: {entry.name} is of dtype {entry.dtype}; supported: {', '.join(WEIGHT_DTYPES)}")
