"""A model folder is read correctly, or refused with the file, the field and what is supported."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model.families import write_family
from tests.model.tiny import write_tiny_llama
from workers.errors import ModelError
from workers.model.config import read_model_config
from workers.model.content import content_id
from workers.model.description import GenerationDefaults, RopeConfig
from workers.model.folder import ModelFolder, check_folder
from workers.model.load import load_decoder


def change(folder: Path, **changes: Any) -> Path:
    """The folder with other fields in its config.json; a field changed to ... is taken out."""
    path = folder / "config.json"
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not ...}))
    return folder


def change_tensors(folder: Path, **changes: torch.Tensor | None) -> Path:
    """The folder with other tensors, or without those that are None; "__" stands for a dot in their names."""
    kept: dict[str, torch.Tensor | None] = {**load_file(folder / "model.safetensors")}
    kept |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file({name: tensor for name, tensor in kept.items() if tensor is not None}, folder / "model.safetensors")
    return folder


def test_end_tokens_of_the_generation_config_win(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "m")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    assert read_model_config(folder).eos_token_ids == (2, 0)
    (folder / "generation_config.json").unlink()
    assert read_model_config(folder).eos_token_ids == (2,)


def test_the_makers_sampling_values_are_read_and_are_no_part_of_the_content(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "m")
    before = content_id(ModelFolder("m", folder))
    values = {"eos_token_id": 2, "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0}
    (folder / "generation_config.json").write_text(json.dumps(values))
    assert read_model_config(folder).generation == GenerationDefaults(temperature=0.6, top_k=20, top_p=0.95, min_p=0.0)
    assert content_id(ModelFolder("m", folder)) == before


def test_recommended_sampling_that_no_request_could_have_is_refused_at_once(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "m")
    (folder / "generation_config.json").write_text('{"top_p": 1.5}')
    with pytest.raises(ModelError, match=r"generation_config.json: top_p is 1.5; it must be above 0"):
        read_model_config(folder)


def test_old_style_rope_fields_are_read(tmp_path: Path) -> None:
    scaling = {"type": "linear", "factor": 2.0}
    folder = change(write_tiny_llama(tmp_path / "m"), rope_parameters=..., rope_theta=123.0, rope_scaling=scaling)
    assert read_model_config(folder).layers[0].rope == RopeConfig(123.0, 8, "linear", factor=2.0)


def test_gemma_3_as_first_published_is_the_same_model(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "m", "gemma 3, scaled rope")
    now = read_model_config(folder)
    change(
        folder,
        rope_parameters=...,
        layer_types=...,
        _sliding_window_pattern=...,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    assert read_model_config(folder) == now


def test_deepseek_v3_as_published_is_understood(tmp_path: Path) -> None:
    """Its config.json, with fewer layers: another form than the one that transformers writes."""
    yarn = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn"}
    config = {
        **{"architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0},
        **{"bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu"},
        **{"hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512},
        **{"max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048},
        **{"moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True},
        **{"num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 5, "num_key_value_heads": 128},
        **{"num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
        **{"rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid"},
        **{"tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16"},
        **{"use_cache": True, "v_head_dim": 128, "vocab_size": 129280},
        "rope_scaling": yarn | {"original_max_position_embeddings": 4096},
        "quantization_config": {
            **{"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = read_model_config(tmp_path)
    assert (model.num_kv_heads, model.head_dim, model.value_dim) == (1, 576, 128)
    assert model.attention_scale == pytest.approx(0.1352, abs=1e-4)  # 192 ** -0.5 * (0.1 * ln 40 + 1) ** 2
    (rope,) = {layer.rope for layer in model.layers}
    assert rope is not None and (rope.kind, rope.rotary_dim, rope.magnitude) == ("yarn", 64, 1.0)
    assert [layer.has_experts for layer in model.layers] == [False] * 3 + [True] * 2
    assert model.names.foreign == ("model.layers.5.",)


@pytest.mark.parametrize("old_name", ["su", "yarn"])
def test_phi_3s_earlier_names_of_longrope_are_understood(tmp_path: Path, old_name: str) -> None:
    folder = write_family(tmp_path / "m", "phi 3, long")
    now = read_model_config(folder)
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    scaling = {"type": old_name, "short_factor": rope["short_factor"], "long_factor": rope["long_factor"]}
    change(folder, rope_parameters=..., rope_theta=1e4, rope_scaling=scaling)
    assert read_model_config(folder) == now


@pytest.mark.parametrize(
    ("window", "kind"), [(7, "sliding_attention"), (None, "full_attention"), (None, "sliding_attention")]
)
def test_a_mistral_may_say_its_window_twice(tmp_path: Path, window: int | None, kind: str) -> None:
    folder = change(write_family(tmp_path / "m", "mistral, window"), sliding_window=window)
    once = read_model_config(folder)
    twice = read_model_config(change(folder, layer_types=[kind] * once.num_layers))
    assert twice == once and {layer.window for layer in twice.layers} == {window or 0}


BAD_FIELDS: list[tuple[str, dict[str, Any], str]] = [
    ("llama 2", {"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is unknown; known are LlamaForCausalLM"),
    ("llama 2", {"architectures": None}, "unnamed is unknown"),
    ("llama 2", {"hidden_size": "big"}, "hidden_size is 'big'"),
    ("llama 2", {"hidden_size": 33, "head_dim": ...}, "hidden_size 33 is not a multiple of 4 heads; set head_dim"),
    ("llama 2", {"num_key_value_heads": 3}, "4 attention heads cannot share 3 KV heads"),
    ("llama 2", {"head_dim": 15}, "15 of head_dim 15 features are rotated; rotary embedding needs an even number"),
    ("llama 2", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; the largest possible value is 4096"),
    ("llama 2", {"eos_token_id": [2, 320]}, "end token 320 is outside the vocabulary of 320"),
    ("llama 2", {"eos_token_id": "</s>"}, "eos_token_id is '</s>'; it must be a token id"),
    ("llama 2", {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; it must be a number"),
    ("llama 2", {"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; it must be true or false"),
    ("llama 2", {"rope_parameters": [1]}, "rope_parameters is [1]; it must be an object"),
    ("llama 2", {"rope_parameters": {"rope_type": "spiral"}}, "'spiral' is not supported; supported: default, linear"),
    ("llama 2", {"rope_parameters": {"rope_type": "linear"}}, "lacks 'factor'"),
    ("llama 2", {"rope_parameters": {"rope_theta": 0}}, "rope_theta is 0; it must be above 1"),
    ("phi 3, long", {"head_dim": 12}, "long_factor must be 6 positive numbers"),
    ("llama 2", {"sliding_window": 128}, "sliding_window 128 is not supported; supported: none"),
    ("mistral, window", {"sliding_window": -1}, "sliding_window is -1; it must be a positive whole number"),
    ("mistral, window", {"layer_types": ["full_attention"] * 3}, "but sliding_window is 7, which applies to all"),
    ("qwen 2, upper windows", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 3 layers"),
    ("gemma 2", {"layer_types": ["linear_attention"] * 3}, "layer type 'linear_attention' is not supported"),
    ("gemma 3", {"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supported"),
    ("gemma 2", {"hidden_activation": "relu"}, "hidden_activation 'relu' is not supported; supported: gelu_pytorch_t"),
    ("mixtral", {"num_experts_per_tok": 6}, "6 of 5 experts cannot be chosen"),
    ("smollm 3", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries for 5 layers"),
    (
        "qwen 3.5",
        {"linear_num_key_heads": 5},
        "8 value heads and 5 key heads of linear attention are not shared by 2 KV",
    ),
    ("qwen 3.5", {"layer_types": ["linear_attention"] * 5}, "no layer has full attention"),
    ("qwen 3.5", {"attn_output_gate": False}, "attn_output_gate False is not supported; supported: True"),
    ("qwen 3.5", {"attention_bias": True}, "attention_bias True is not supported; supported: False"),
    ("gpt oss", {"swiglu_limit": 5.0}, "swiglu_limit 5.0 is not supported; supported: 7.0"),
    ("gpt oss", {"sliding_window": None}, "sliding_window is None; it must be a positive whole number"),
    ("gpt oss", {"quantization_config": {"quant_method": "awq"}}, "quantization_config 'awq' is not supported; supp"),
    ("gpt oss, mxfp4", {"intermediate_size": 48}, "multiples of 32, but hidden_size is 64, intermediate_size 48"),
    ("llama 2", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config 'mxfp4' is not supported"),
    ("llama 4", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries for 5 layers"),
    ("llama 4", {"layer_types": ["sliding_attention"] * 5}, "'sliding_attention' is not supported; supported: full_a"),
    ("llama 4", {"attention_chunk_size": None}, "attention_chunk_size is null; it must be a number of tokens"),
    ("llama 4", {"hidden_act": "relu2"}, "hidden_act 'relu2' is not supported; supported: silu"),
    ("deepseek 2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported; supported: greedy, group_l"),
    ("deepseek 2", {"norm_topk_prob": True}, "norm_topk_prob True is not supported; supported: False"),
    ("deepseek 2", {"num_experts_per_tok": None}, "num_experts_per_tok is None; it must be a positive whole number"),
    ("deepseek 2", {"num_key_value_heads": 2}, "num_key_value_heads 2 is not supported; supported: 4"),
    ("deepseek 2", {"attention_bias": True}, "attention_bias True is not supported; supported: False"),
    ("deepseek 2", {"qk_rope_head_dim": 7}, "7 of head_dim 7 features are rotated; rotary embedding needs an even"),
    ("deepseek 2", {"kv_lora_rank": 0}, "kv_lora_rank is 0; it must be a positive whole number"),
    ("deepseek 2", {"q_lora_rank": -1}, "q_lora_rank is -1; it must be a positive whole number"),
    ("deepseek 3", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported; supported: sigmoid"),
    ("deepseek 3", {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported; supported: 1"),
    ("deepseek 3", {"n_group": 3}, "3 experts of a token cannot come from topk_group 2 of n_group 3 equal groups of 8"),
    ("deepseek 3", {"topk_group": 5}, "3 experts of a token cannot come from topk_group 5 of n_group 4 equal groups"),
    ("deepseek 3", {"num_experts_per_tok": 5}, "5 experts of a token cannot come from topk_group 2 of n_group 4"),
    ("deepseek 3", {"n_group": 8, "topk_group": 4}, "n_group is 8 for 8 experts; each group needs two or more"),
    ("deepseek 3", {"routed_scaling_factor": 0}, "routed_scaling_factor is 0; it must be above 0"),
    ("deepseek 3", {"rope_interleave": "no"}, "rope_interleave is 'no'; it must be true or false"),
    ("deepseek 3", {"first_k_dense_replace": "all"}, "first_k_dense_replace is 'all'; it must be a whole number, 0"),
    ("deepseek 3", {"num_nextn_predict_layers": 10**12}, "num_nextn_predict_layers is 1000000000000; the largest"),
    ("llama 4 with eyes", {"text_config": {"hidden_size": 8}}, "num_hidden_layers is None"),
    ("llama 2", {"quantization_config": {"quant_method": "awq"}}, "quantization_config 'awq' is not supported; supp"),
    ("llama 2", {"dtype": "int8"}, "dtype 'int8' is not one of float32, bfloat16, float16"),
]


@pytest.mark.parametrize(("family", "fields", "words"), BAD_FIELDS)
def test_a_model_that_we_cannot_compute_is_refused_by_name(
    tmp_path: Path, family: str, fields: dict[str, Any], words: str
) -> None:
    folder = write_family(tmp_path / "m", family)
    (folder / "generation_config.json").unlink()
    with pytest.raises(ModelError) as error:
        read_model_config(change(folder, **fields))
    assert words in str(error.value) and "config.json" in str(error.value)


def test_every_missing_tensor_is_named_before_weights_are_mapped(tmp_path: Path) -> None:
    """One part of each kind, in a family that has it."""
    for number, (family, name) in enumerate(
        (
            ("llama 2", "lm_head.weight"),
            ("qwen 2", "model.layers.1.self_attn.k_proj.bias"),
            ("gemma 3", "model.layers.6.post_feedforward_layernorm.weight"),
            ("phi 3, short", "model.layers.0.mlp.gate_up_proj.weight"),
            ("mixtral", "model.layers.2.block_sparse_moe.experts.4.w2.weight"),
            ("qwen 2 moe", "model.layers.2.mlp.shared_expert_gate.weight"),
            ("llama 4", "model.layers.4.feed_forward.experts.down_proj"),
            ("gpt oss", "model.layers.1.self_attn.sinks"),
            ("deepseek 3", "model.layers.2.self_attn.kv_a_layernorm.weight"),
            ("deepseek 3", "model.layers.1.mlp.gate.e_score_correction_bias"),
            ("deepseek 2, no query latent", "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"),
            ("gpt oss", "model.layers.1.mlp.experts.down_proj_bias"),
            ("gpt oss, mxfp4", "model.layers.1.mlp.experts.gate_up_proj_scales"),
        )
    ):
        folder = change_tensors(write_family(tmp_path / str(number), family), **{name: None})
        with pytest.raises(ModelError, match=f"the weights lack {name} "):
            check_folder(ModelFolder(family, folder))


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    folder = change(write_tiny_llama(tmp_path / "m"), intermediate_size=65)
    with pytest.raises(ModelError, match=r"gate_proj.weight has shape \[64, 32\], config.json says \[65, 32\]"):
        load_decoder(ModelFolder("m", folder), torch.device("cpu"), torch.float32)


def test_weights_of_another_dtype_are_refused(tmp_path: Path) -> None:
    folder = change_tensors(write_tiny_llama(tmp_path / "m"), model__norm__weight=torch.ones(32, dtype=torch.int8))
    with pytest.raises(ModelError, match=r"model.norm.weight is of dtype I8; supported: F32, BF16, F16, or a GGUF"):
        check_folder(ModelFolder("m", folder))


def test_a_tensor_that_has_no_place_is_refused_and_a_harmless_one_is_not(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "m")
    harmless = {
        "lm_head.weight": torch.ones(320, 32),  # tied: a copy of the embedding
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    check_folder(ModelFolder("m", change_tensors(folder, **harmless)))
    change_tensors(folder, model__layers__2__mlp__up_proj__weight=torch.ones(64, 32))
    with pytest.raises(ModelError, match=r"model.layers.2.mlp.up_proj.weight \(one of 1\) is not part of LlamaForC"):
        check_folder(ModelFolder("m", folder))


def test_layers_for_multi_token_prediction_are_ignored(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "m", "deepseek 3")
    change_tensors(folder, model__layers__3__eh_proj__weight=torch.ones(32, 64))
    check_folder(ModelFolder("m", folder))
    change(folder, num_nextn_predict_layers=0)
    with pytest.raises(ModelError, match=r"model.layers.3.eh_proj.weight \(one of 1\) is not part of DeepseekV3"):
        check_folder(ModelFolder("m", folder))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_number_that_is_none_is_found_at_load(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    folder = write_tiny_llama(tmp_path / "m", dtype=dtype)
    weight = load_file(folder / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    weight[13, 7] = value
    change_tensors(folder, model__layers__1__mlp__down_proj__weight=weight)
    with pytest.raises(ModelError, match=r"layers.1.mlp.down_proj.weight holds NaN or infinity"):
        load_decoder(ModelFolder("m", folder), torch.device("cpu"), torch.float32)


def test_huge_weights_are_no_infinity(tmp_path: Path) -> None:
    folder = change_tensors(write_tiny_llama(tmp_path / "m"), model__norm__weight=torch.full((32,), 3e38))
    load_decoder(ModelFolder("m", folder), torch.device("cpu"), torch.float32)


def test_content_ids_tell_apart_what_only_the_config_says(tmp_path: Path) -> None:
    folder = ModelFolder("m", write_family(tmp_path / "m", "gemma 2"))
    before = content_id(folder)
    change(folder.path, final_logit_softcapping=29.0)
    assert content_id(folder) != before
