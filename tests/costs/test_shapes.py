"""Sizes of models and GPUs, where they come from, and errors when they do not fit together."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from workers.profiles.capacity import kv_capacity_tokens, min_gpus
from workers.profiles.computed import roofline
from workers.profiles.hardware import DATA, hardware_of, known_hardware, read_hardware
from workers.profiles.profile_errors import DoesNotFit, ProfileError, UnknownName
from workers.profiles.shapes import SHAPES, ModelShape, shape_of

KIB = {
    **{"opt-13b": 800, "opt-66b": 2304, "opt-175b": 4608, "llama-2-7b": 512, "llama-3-8b": 128, "mistral-7b": 128},
    **{"llama-3-70b": 320, "qwen2.5-7b": 56, "qwen2.5-0.5b": 12, "qwen3-0.6b": 112},
    **{"deepseek-v3": 68.625, "deepseek-v2": 67.5},  # 61 and 60 layers of 576 numbers
}
BILLIONS = {  # as their makers count them
    **{"opt-13b": 12.85, "opt-66b": 65.7, "opt-175b": 175.0, "bloom-176b": 176.25, "llama-2-7b": 6.74},
    **{"llama-2-13b": 13.02, "llama-2-70b": 68.98, "llama-3-8b": 8.03, "llama-3-70b": 70.55, "mistral-7b": 7.24},
    **{"qwen2.5-0.5b": 0.494, "qwen2.5-7b": 7.62, "qwen3-0.6b": 0.596, "smollm2-135m": 0.1345},
    **{"deepseek-v2-lite": 15.7, "deepseek-v2": 236.0, "deepseek-v3": 671.0},
}


def test_kv_of_a_token_is_what_the_table_says() -> None:
    assert {name: SHAPES[name].kv_bytes_per_token / 1024 for name in KIB} == KIB
    assert 512 * SHAPES["opt-66b"].kv_bytes_per_token == 1.125 * 2**30

    for dtype in ("int8", "fp8"):
        quantized = replace(SHAPES["llama-3-8b"], kv_dtype=dtype)
        assert quantized.kv_bytes_per_token == 2 * 32 * 8 * (128 + 4)
        assert quantized.weight_bytes == SHAPES["llama-3-8b"].weight_bytes


def test_parameters_are_the_published_numbers() -> None:
    assert set(BILLIONS) == set(SHAPES)
    for name, billions in BILLIONS.items():
        assert SHAPES[name].parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_flops_of_a_prompt_are_those_of_its_chunks() -> None:
    shape = SHAPES["llama-3-70b"]
    assert shape.prefill_flops(3000) == pytest.approx(shape.prefill_flops(1000) + shape.prefill_flops(3000, 1000))
    # Mooncake's count of a layer, 4 n² d + 22 n d² without a causal mask, lies within a fifth.
    layer = 4 * 4096**2 * 8192 + 22 * 4096 * 8192**2
    assert shape.prefill_flops(4096) == pytest.approx(80 * layer, rel=0.2)
    assert shape.decode_flops(0) == pytest.approx(2 * (shape.parameters - shape.head_parameters))


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("facebook/opt-13b", "opt-13b"),
        ("meta-llama/Llama-2-70b-chat-hf", "llama-2-70b"),
        ("llama2-70b", "llama-2-70b"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("mistralai/Mistral-7B-Instruct-v0.1", "mistral-7b"),
        ("Qwen/Qwen2.5-0.5B-Instruct", "qwen2.5-0.5b"),
        ("bigscience/bloom", "bloom-176b"),
    ],
)
def test_names_of_the_hub_are_understood(name: str, found: str) -> None:
    assert shape_of(name).name == found


def test_an_error_for_an_unknown_name_has_the_nearest() -> None:
    with pytest.raises(UnknownName, match="unknown model 'lama-2-70b'; did you mean 'llama-2-70b'"):
        shape_of("lama-2-70b")
    with pytest.raises(UnknownName, match="did you mean 'a100-40gb' or 'a100-80gb'"):
        hardware_of("A100")
    with pytest.raises(UnknownName, match="known: a10, "):
        hardware_of("")


# ---- config.json -------------------------------------------------------------------------------------------------

LLAMA: dict[str, Any] = {
    **{"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32},
    **{"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "torch_dtype": "bfloat16"},
}


def config(folder: Path, **changed: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(LLAMA | changed))
    return path


def test_a_shape_is_read_from_a_config(tmp_path: Path) -> None:
    read = shape_of(str(config(tmp_path)))
    assert read.parameters == SHAPES["llama-3-8b"].parameters
    assert shape_of(str(tmp_path)) == read
    assert shape_of(str(config(tmp_path, _name_or_path="meta-llama/Meta-Llama-3-8B"))) is SHAPES["llama-3-8b"]
    assert shape_of(str(config(tmp_path, torch_dtype="float32"))).element_bytes == 4
    assert shape_of(str(config(tmp_path, num_key_value_heads=None))).kv_heads == 32


def test_a_context_is_known_by_name_or_from_the_config(tmp_path: Path) -> None:
    assert shape_of(str(config(tmp_path, max_position_embeddings=77, vocab_size=1000))).context_length == 77
    assert shape_of(str(config(tmp_path, vocab_size=1000))).context_length == 0, "not known"
    assert shape_of("meta-llama/Llama-2-7b-hf").context_length == 4096
    assert all(shape.context_length for shape in SHAPES.values())


def test_deepseeks_numbers_are_those_that_its_authors_report(tmp_path: Path) -> None:
    """DeepSeek-V2 (2024) and DeepSeek-V3 (2024): parameters that a token activates, embeddings and head included."""
    for name, billions in {"deepseek-v2-lite": 2.4, "deepseek-v2": 21.0, "deepseek-v3": 37.0}.items():
        shape = SHAPES[name]
        active = shape.active_parameters + shape.parameters - shape.layer_parameters
        assert active / 1e9 == pytest.approx(billions, rel=0.12), name
    v3 = {
        **{
            "architectures": ["DeepseekV3ForCausalLM"],
            "hidden_size": 7168,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
        },
        **{"num_key_value_heads": 128, "intermediate_size": 18432, "vocab_size": 129280, "kv_lora_rank": 512},
        **{"q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
        **{"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1},
        **{"first_k_dense_replace": 3, "_name_or_path": "deepseek-ai/DeepSeek-V3"},
    }
    assert shape_of(str(config(tmp_path, **v3))) is SHAPES["deepseek-v3"]


def test_a_step_reads_the_experts_that_its_tokens_take() -> None:
    cost = roofline(SHAPES["deepseek-v3"], hardware_of("h200"), 8, 2)
    one, many = (cost.read_seconds(tokens, 0) - cost.weights_s for tokens in (1, 4096))
    assert one == pytest.approx(cost.experts_s * 8 / 256) and many == pytest.approx(cost.experts_s)
    assert cost.decode_seconds(1, 1000) < cost.decode_seconds(64, 64_000)


def test_other_families_name_their_sizes_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    opt = {"model_type": "opt", "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40}
    path.write_text(json.dumps(opt | {"ffn_dim": 20480, "vocab_size": 50272, "max_position_embeddings": 2048}))
    assert shape_of(str(path)).parameters == SHAPES["opt-13b"].parameters
    bloom = {"model_type": "bloom", "n_embed": 14336, "n_layer": 70, "n_head": 112, "vocab_size": 250880}
    path.write_text(json.dumps(bloom))
    assert shape_of(str(path)).parameters == SHAPES["bloom-176b"].parameters


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_hidden_layers": None}, "has no num_hidden_layers or n_layer"),
        ({"num_hidden_layers": "32"}, "layers is '32'; it must be an integer"),
        ({"hidden_size": -1}, "hidden size -1"),
        ({"vocab_size": 0}, "vocab is 0"),
        ({"num_key_value_heads": 5}, "cannot share 5 KV heads"),
        ({"num_local_experts": 8, "architectures": ["XForCausalLM"]}, "XForCausalLM.*have no cost model"),
        ({"kv_lora_rank": 512}, "latent or linear attention of an architecture that Diptych does not serve"),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "num_key_value_heads 8 is not supported; supported: 32"),
    ],
)
def test_a_config_of_no_dense_decoder_is_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        shape_of(str(config(tmp_path, **changed)))


@pytest.mark.parametrize("text", ["", "[]", "{", "null"])
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ProfileError, match=r"config\.json"):
        shape_of(str(path))
    with pytest.raises(ProfileError, match=r"cannot be read"):
        shape_of(str(tmp_path / "absent.json"))


# ---- hardware ----------------------------------------------------------------------------------------------------


def test_every_figure_of_a_sheet_has_its_source() -> None:
    for sheet in known_hardware().values():
        assert {"flops", "memory", "node_link", "cross_link", "host_link", "watts"} <= set(sheet.sources)
        assert (sheet.price_per_hour is not None) == ("price" in sheet.sources)


def test_a_hardware_file_is_read(tmp_path: Path) -> None:
    fields = json.loads((DATA / "hardware.json").read_text())["h100-80gb"]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"mine": fields | {"price_per_hour": 2.5}}))
    assert hardware_of(str(path)).price_per_hour == 2.5
    for changed, message in (
        ({"watts": -1}, "watts is -1"),
        ({"memory_bytes": "80 GB"}, "memory_bytes is '80 GB'"),
        ({"flops": {"float16": float("nan")}}, "flops.float16 is nan"),
        ({"flops": {}}, "flops is empty"),
        ({"gpus_per_node": 1.5}, "gpus_per_node is 1.5"),
        ({"color": 1}, "color"),
    ):
        path.write_text(json.dumps({"mine": fields | changed}))
        with pytest.raises(ProfileError, match=message):
            hardware_of(str(path))
    path.write_text(json.dumps({"one": fields, "two": fields}))
    assert set(read_hardware(path)) == {"one", "two"}
    with pytest.raises(ProfileError, match="2 kinds of hardware"):
        hardware_of(str(path))
    with pytest.raises(ProfileError, match="no hardware file"):
        hardware_of(str(tmp_path / "absent.json"))


# ---- the two together --------------------------------------------------------------------------------------------


def test_capacity_is_what_the_weights_leave() -> None:
    shape, sheet = SHAPES["llama-3-70b"], hardware_of("h100-80gb")
    tokens = kv_capacity_tokens(shape, sheet, 4, 1)
    used = shape.weight_bytes + tokens * shape.kv_bytes_per_token
    assert 0 <= 4 * 0.9 * sheet.memory_bytes - used < 4 * shape.kv_bytes_per_token
    # Two stages, each with one end's embeddings or head: as much as four tensor ranks, shared by two.
    assert kv_capacity_tokens(shape, sheet, 2, 2) == tokens
    uneven = kv_capacity_tokens(shape, sheet, 1, 3)  # 27, 27 and 26 layers
    rank_bytes = (
        shape.layer_parameters * 27 / 80 + shape.head_parameters
    ) * 2 + uneven * shape.kv_bytes_per_token * 27 / 80
    assert rank_bytes == pytest.approx(0.9 * sheet.memory_bytes, rel=1e-4)
    assert kv_capacity_tokens("qwen2.5-0.5b", "h200", 2) > kv_capacity_tokens("qwen2.5-0.5b", "h200", 1)


@pytest.mark.parametrize(("model", "hardware"), [("llama-3-70b", "a100-80gb"), ("opt-175b", "l4"), ("opt-66b", "a10")])
def test_a_model_that_does_not_fit_says_how_many_gpus_would_do(model: str, hardware: str) -> None:
    with pytest.raises(DoesNotFit, match=r"does not fit on 1 .*it needs \d+ at least") as refused:
        kv_capacity_tokens(model, hardware)
    count, (tensor, pipeline) = min_gpus(model, hardware)
    assert f"it needs {count} at least" in str(refused.value) and count == tensor * pipeline
    assert kv_capacity_tokens(model, hardware, tensor, pipeline) > 0
    assert (count - 1) * 0.9 * hardware_of(hardware).memory_bytes < SHAPES[model].weight_bytes * 1.2


def test_a_layer_too_large_for_a_node_fits_nowhere() -> None:
    giant = ModelShape("giant", 2, 10**6, 8, 8, 4 * 10**6, 1000, 125_000)
    with pytest.raises(DoesNotFit, match="on any number of l4"):
        kv_capacity_tokens(giant, "l4")
    with pytest.raises(ProfileError, match="utilization"):
        kv_capacity_tokens("opt-13b", "a100-80gb", utilization=float("nan"))
