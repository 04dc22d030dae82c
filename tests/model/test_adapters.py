"""Adapters in one batch give the logits of merged weights; what is not supported is refused by name."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.model.adapters import ALL, merged, write_adapter
from tests.model.families import write_family
from tests.model.paging import next_tokens, pool_for, ragged, scattered_tables
from tests.model.tiny import write_tiny_llama
from workers.config import ParallelConfig
from workers.errors import ModelError
from workers.executor.adapters import RankAdapters
from workers.model.adapter import MAX_RANK, WEIGHTS, adapter_of, read_adapter
from workers.model.adapter_load import load_adapter
from workers.model.config import read_model_config
from workers.model.folder import ModelFolder
from workers.model.load import load_decoder
from workers.model.shard import shard_of
from workers.ops import lora
from workers.ops.attention import NATIVE, SDPA
from workers.ops.lora import LayerChanges, StepAdapters
from workers.ops.native.library import library

CPU = torch.device("cpu")
BLOCK = 4
LENGTHS = (1, 1, 9, 13, 6)
OF_PROMPT = (-1, 0, 2, 1, 0)  # the adapter of each


class Model:
    """A model in memory; `run` computes prompts in one batch, each with one of these adapters or none (-1)."""

    def __init__(self, path: Path, adapters: list[Path], *, deterministic: bool = False) -> None:
        self.config = read_model_config(path)
        attention = SDPA if library() is None else NATIVE
        folder = ModelFolder("tiny", path)
        self._decoder = load_decoder(folder, CPU, torch.float32, attention, deterministic=deterministic)
        shard = shard_of(self.config, ParallelConfig(), 0)
        self._adapters: list[tuple[LayerChanges, ...]] = [
            load_adapter(read_adapter(each, self.config), self.config, shard, torch.float32) for each in adapters
        ]
        self._deterministic = deterministic

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], of_prompt: tuple[int, ...]) -> list[Tensor]:
        lengths = [len(prompt) for prompt in prompts]
        num_blocks = sum(-(-length // BLOCK) for length in lengths) + 3
        tables = scattered_tables(lengths, num_blocks, BLOCK, random.Random(2))
        pool = pool_for(self.config, num_blocks, BLOCK)
        tokens, positions = next_tokens(prompts, [0] * len(prompts), list(enumerate(lengths)))
        batch = ragged(tables, lengths, lengths, BLOCK)
        rows, adapters = np.arange(len(tokens)), None
        if any(number >= 0 for number in of_prompt):
            numbers = np.repeat(np.array(of_prompt, np.int32), lengths)
            adapters = StepAdapters(self._adapters, numbers, rows, CPU, deterministic=self._deterministic)
        x = self._decoder.embed(torch.tensor(tokens))
        x = self._decoder.run(x, torch.tensor(positions), torch.from_numpy(rows), batch, pool.blocks, None, adapters)
        logits = self._decoder.logits(x)
        assert logits is not None
        return list(logits.split(lengths))


@pytest.fixture(params=["native kernel", "torch", "triton"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(lora, "library", lambda: None)
    elif request.param == "triton":  # in its interpreter
        pytest.importorskip("workers.ops.triton_lora")
        monkeypatch.setattr(lora, "_method", lora._ByTriton)
    elif library() is None:
        pytest.skip("no compiler")
    return str(request.param)


@pytest.fixture(scope="module", params=["llama", "phi 3, short", "llama 4, all dense", "deepseek 3, all dense"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base") / "m"
    if request.param == "llama":
        return write_tiny_llama(path, attention_bias=True, mlp_bias=True, tie_embeddings=False)
    return write_family(path, request.param)


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    names = {name.split(".")[-2] for name in load_file(base / "model.safetensors")}
    known = [each for each in ("q_a_proj", "kv_a_proj_with_mqa", "qkv_proj", "gate_up_proj", *ALL) if each in names]
    return [
        write_adapter(folder / "a", base, 1, targets=known),
        write_adapter(folder / "b", base, 2, rank=17, alpha=4.0, targets=known, use_rslora=True),
        write_adapter(folder / "c", base, 3, rank=1, targets=(known[0], known[-1])),
    ]


def drawn_prompts() -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(3, 300) for _ in range(length)] for length in LENGTHS]


@pytest.mark.grid(keep=5)
def test_one_batch_of_all_adapters_has_the_logits_of_merged_weights(
    by: str, base: Path, adapters: list[Path], tmp_path: Path
) -> None:
    found = Model(base, adapters).run(drawn_prompts(), OF_PROMPT)
    alone = [Model(merged(base, each, tmp_path / each.name), []) for each in adapters] + [Model(base, [])]
    for prompt, number, logits in zip(drawn_prompts(), OF_PROMPT, found, strict=True):
        (wanted,) = alone[number].run([prompt], (-1,))
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
        if number >= 0:
            assert (logits - alone[-1].run([prompt], (-1,))[0]).abs().max() > 0.1


@pytest.mark.grid(keep=5)
def test_rows_without_an_adapter_keep_their_bits(by: str, base: Path, adapters: list[Path]) -> None:
    model = Model(base, adapters)
    before = model.run(drawn_prompts(), (-1,) * len(LENGTHS))
    assert torch.equal(model.run(drawn_prompts(), OF_PROMPT)[0], before[0])


def test_the_first_request_with_an_adapter_waits_for_no_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model whose sizes are multiples of 16."""
    pytest.importorskip("workers.ops.triton_lora")
    from tests.model.kernel_variants import launched

    monkeypatch.setattr(lora, "_method", lora._ByTriton)
    base = write_tiny_llama(tmp_path / "m")
    targets = (("q_proj", "v_proj"), ALL)
    adapters = [write_adapter(tmp_path / str(number), base, 1, targets=each) for number, each in enumerate(targets)]
    shard = shard_of(read_model_config(base), ParallelConfig(), 0)
    with launched() as compiled:
        RankAdapters(ModelFolder("tiny", base), shard, CPU, torch.float32, deterministic=False).compile()
    with launched() as needed:
        Model(base, adapters).run(drawn_prompts(), (-1, 0, 1, 1, 0))
    assert needed == compiled


def test_deterministic_rows_do_not_depend_on_the_batch(by: str, base: Path, adapters: list[Path]) -> None:
    if by == "triton":
        pytest.skip("numpy's products, which the interpreter uses, depend on a row's place in its tile")
    model = Model(base, adapters, deterministic=True)
    together = model.run(drawn_prompts(), OF_PROMPT)
    for prompt, number, logits in zip(drawn_prompts(), OF_PROMPT, together, strict=True):
        (alone,) = model.run([prompt], (number,))
        assert torch.equal(logits, alone)


def test_projections_behind_a_latent_are_refused_by_name(tmp_path: Path) -> None:
    base = write_family(tmp_path / "m", "deepseek 3")
    adapter = write_adapter(tmp_path / "a", base, 1, targets=("q_a_proj", "q_b_proj"))
    with pytest.raises(
        ModelError, match="target_modules has 'q_b_proj'; supported in this model: down_proj, gate_proj,"
    ):
        read_adapter(adapter, read_model_config(base))


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "tiny")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"r": MAX_RANK + 1}, "r is 257; the largest possible value is 256"),
        ({"r": 8}, "lora_A.weight has shape [4, 64]; r and this model need [8, 64]"),
        ({"lora_alpha": "16"}, "lora_alpha is '16'; it must be a number"),
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported; supported: LORA"),
        ({"use_dora": True}, "use_dora True is not supported; supported: False"),
        ({"bias": "lora_only"}, "bias 'lora_only' is not supported; supported: none"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save ['lm_head'] is not supported"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern {'q_proj': 2} is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' is not supported"),
        (
            {"target_modules": ["q_proj", "embed_tokens"]},
            "target_modules has 'embed_tokens'; supported in this model: down_proj, gate_proj, k_proj, o_proj",
        ),
    ],
)
def test_a_config_that_is_not_supported_is_refused_by_field(
    tiny: Path, tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    folder = write_adapter(tmp_path / "adapter", tiny, 1)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(ModelError) as raised:
        read_adapter(folder, read_model_config(tiny))
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_an_adapter_of_experts_is_refused_by_name(tmp_path: Path) -> None:
    base = write_family(tmp_path / "base", "qwen 3 moe, some dense")
    folder = write_adapter(tmp_path / "adapter", base, 1, targets=["gate_proj"])
    tensors = load_file(folder / "adapter_model.safetensors")
    expert = "base_model.model.model.layers.0.mlp.experts.0.gate_proj.lora_"
    save_file(tensors | {f"{expert}{part}.weight": torch.ones(4, 4) for part in "AB"}, folder / WEIGHTS)
    with pytest.raises(
        ModelError, match=r"experts\.0\.gate_proj\.lora_A\.weight changes experts, which is not supported"
    ):
        read_adapter(folder, read_model_config(base))


def test_an_adapter_of_linear_attention_is_refused_by_name(tmp_path: Path) -> None:
    config = read_model_config(write_family(tmp_path / "m", "qwen 3.5"))
    with pytest.raises(ModelError, match="Qwen3_5ForCausalLM has linear attention, which is served without adapters"):
        read_adapter(tmp_path, config)


def test_an_adapter_of_another_base_is_refused(tiny: Path, tmp_path: Path) -> None:
    wider = write_tiny_llama(tmp_path / "wider", hidden_size=64)
    deeper = write_tiny_llama(tmp_path / "deeper", num_layers=3)
    for other, message in (
        (wider, "has shape [64, 4]; r and this model need [32, 4]"),
        (deeper, "no linear layer for tensor base_model.model.model"),
    ):
        folder = write_adapter(tmp_path / f"of {other.name}", other, 1)
        with pytest.raises(
            ModelError, match="was it trained for this model\\? base_model_name_or_path is 'tiny'"
        ) as it:
            read_adapter(folder, read_model_config(tiny))
        assert message in str(it.value)


def test_broken_folders_are_refused(tiny: Path, tmp_path: Path) -> None:
    config = read_model_config(tiny)
    with pytest.raises(ModelError, match="an adapter is a PEFT folder with"):
        read_adapter(tiny, config)
    folder = write_adapter(tmp_path / "half", tiny, 1)
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({n: t for n, t in tensors.items() if "q_proj.lora_B" not in n}, folder / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="has no other half"):
        read_adapter(folder, config)
    save_file(tensors | {"base_model.model.lm_head.weight": torch.ones(1)}, folder / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=r"tensor base_model\.model\.lm_head\.weight is not supported"):
        read_adapter(folder, config)


def test_the_id_depends_on_the_numbers_and_not_on_the_name(tiny: Path, tmp_path: Path) -> None:
    one, same, other = (write_adapter(tmp_path / name, tiny, seed) for name, seed in (("x", 1), ("y", 1), ("z", 2)))
    ids = [adapter_of("a", path, ModelFolder("tiny", tiny)).id for path in (one, same, other)]
    assert ids[0] == ids[1] != ids[2]
