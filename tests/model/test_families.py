"""Every family computes what transformers computes, however its prompts are cut, batched, paged or found again."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model.families import FAMILIES, reference, write_family
from tests.model.paging import forward, pool_for, ragged, run_chunks, scattered_tables
from workers.errors import ModelError
from workers.executor.kv_pool import KVPool
from workers.model.decoder import Decoder
from workers.model.folder import ModelFolder, check_folder
from workers.model.load import load_decoder
from workers.ops.attention import Attention, best_attention
from workers.ops.narrow import torch_dtype

pytestmark = pytest.mark.grid

BLOCK = 4
CPU = torch.device("cpu")
LENGTHS = (37, 5, 64)
DEFAULT_ROPE = (
    *("llama 2", "mistral, window", "mixtral", "qwen 2", "qwen 2 moe", "qwen 3", "qwen 3 moe", "gemma 2", "gemma 3"),
    *("gemma 3 with eyes", "smollm 3", "phi 3, default rope", "llama 4, some dense", "llama 4 with eyes"),
)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return ModelFolder(request.param, write_family(tmp_path_factory.mktemp("family") / "m", request.param))


@pytest.fixture(scope="module")
def model(folder: ModelFolder) -> Decoder:
    check_folder(folder)
    return load_decoder(folder, CPU, torch.float32)


@torch.inference_mode()
def expected(folder: ModelFolder, prompts: list[list[int]]) -> list[torch.Tensor]:
    theirs = reference(folder.path)
    return [theirs(torch.tensor([prompt])).logits[0] for prompt in prompts]


def drawn_prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(3, 300) for _ in range(length)] for length in lengths]


def test_logits_equal_transformers_however_the_prompts_are_cut(folder: ModelFolder, model: Decoder) -> None:
    prompts = drawn_prompts()
    tables = scattered_tables(list(LENGTHS), num_blocks=40, block_size=BLOCK, rng=random.Random(2))
    steps = [[(0, 10)], [(0, 1), (1, 5), (2, 30)], [(0, 1), (2, 1)], [(2, 33), (0, 25)]]
    ours = run_chunks(model, pool_for(model.config, 40), prompts, tables, steps)
    for logits, wanted in zip(ours, expected(folder, prompts), strict=True):
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_a_prefix_that_another_prompt_left_serves_as_its_own(folder: ModelFolder, model: Decoder) -> None:
    first, second = drawn_prompts((30, 41))
    shared = 5 * BLOCK
    second = first[:shared] + second[shared:]
    tables = scattered_tables([30, 41], num_blocks=40, block_size=BLOCK, rng=random.Random(3))
    tables[1] = tables[0][: shared // BLOCK] + tables[1][shared // BLOCK :]
    pool = pool_for(model.config, 40)
    run_chunks(model, pool, [first], tables[:1], [[(0, 30)]])
    positions = torch.arange(shared, 41)
    batch = ragged(tables[1:], [41 - shared], [41], BLOCK)
    rows = torch.arange(41 - shared)
    logits = forward(model, torch.tensor(second[shared:]), positions, rows, batch, pool.blocks)
    torch.testing.assert_close(logits, expected(folder, [second])[0][shared:], rtol=1e-4, atol=1e-4)


def turn_a_part(folder: Path) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rope = config.get("text_config", config)["rope_parameters"]
    for each in [nested for nested in rope.values() if isinstance(nested, dict)] or [rope]:
        each["partial_rotary_factor"] = 0.5
    path.write_text(json.dumps(config))


@torch.inference_mode()
@pytest.mark.parametrize("name", DEFAULT_ROPE)
def test_only_a_family_that_turns_a_part_of_its_features_reads_how_large_it_is(tmp_path: Path, name: str) -> None:
    """Hub configs may hold `partial_rotary_factor` for families whose code never looks at it."""
    folder = ModelFolder(name, write_family(tmp_path / "m", name))
    turn_a_part(folder.path)
    prompts = drawn_prompts((20,))
    model = load_decoder(folder, CPU, torch.float32)
    tables = scattered_tables([20], num_blocks=40, block_size=BLOCK, rng=random.Random(2))
    (logits,) = run_chunks(model, pool_for(model.config, 40), prompts, tables, [[(0, 20)]])
    torch.testing.assert_close(logits, expected(folder, prompts)[0], rtol=1e-4, atol=1e-4)
    assert any(layer.rope.rotary_dim < model.config.head_dim for layer in model.config.layers if layer.rope) == (
        name == "phi 3, default rope"
    )


def test_a_scaled_rope_of_a_part_is_refused_where_the_family_has_none(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "m", "llama, yarn")
    turn_a_part(folder)
    with pytest.raises(RuntimeError, match="size of tensor"):
        reference(folder)(torch.tensor([[5, 6, 7]]))
    with pytest.raises(ModelError, match=r"partial_rotary_factor 0.5 with rope scaling 'yarn': LlamaForCausalLM"):
        check_folder(ModelFolder("m", folder))


def test_greedy_tokens_equal_generate(folder: ModelFolder, model: Decoder) -> None:
    """Two sequences decoded in one batch, beyond any window, against each one's own `generate`."""
    prompts = drawn_prompts((19, 33))
    ours = greedy(model, pool_for(model.config, 40), prompts, 12)
    theirs: Any = reference(folder.path)
    for prompt, tokens in zip(prompts, ours, strict=True):
        wanted = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=12, min_new_tokens=12, do_sample=False, eos_token_id=None
        )
        assert tokens == wanted[0, len(prompt) :].tolist()


@torch.inference_mode()
def greedy(model: Decoder, pool: KVPool, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """The likeliest continuation of each prompt: prompts in one step, then a token of each a step."""
    contexts = [list(prompt) for prompt in prompts]
    lengths = [len(prompt) + num_tokens for prompt in prompts]
    tables = scattered_tables(lengths, len(pool.blocks), BLOCK, random.Random(4))
    news = [len(prompt) for prompt in prompts]
    for _ in range(num_tokens):
        tokens = [token for context, new in zip(contexts, news, strict=True) for token in context[-new:]]
        positions = [at for context, new in zip(contexts, news, strict=True) for at in range(len(context))[-new:]]
        batch = ragged(tables, news, [len(context) for context in contexts], BLOCK)
        rows = torch.tensor(news).cumsum(0) - 1
        logits = forward(model, torch.tensor(tokens), torch.tensor(positions), rows, batch, pool.blocks)
        for context, token in zip(contexts, logits.argmax(-1).tolist(), strict=True):
            context.append(token)
        news = [1] * len(prompts)
    return [context[len(prompt) :] for context, prompt in zip(contexts, prompts, strict=True)]


def invariant_attention(dtype: torch.dtype) -> Attention:
    try:
        return best_attention(CPU, dtype, deterministic=True)
    except ModelError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("dtype", "rounding"), [("bfloat16", 2**-7), ("float16", 2**-10), ("int8", 1 / 127), ("fp8", 2**-4)]
)
@pytest.mark.parametrize(
    "name", ["gemma 2", "mistral, window", "gpt oss, mxfp4", "llama 4, all dense", "deepseek 3, all dense"]
)
def test_kv_kept_in_fewer_bits_computes_in_float32(tmp_path: Path, name: str, dtype: str, rounding: float) -> None:
    """However the prompt is cut, rounded keys and values give the same logits, close to those of exact ones."""
    folder = ModelFolder(name, write_family(tmp_path / "m", name))
    kind = torch_dtype(dtype)
    model = load_decoder(folder, CPU, kind, invariant_attention(kind), deterministic=True)  # else cuts round otherwise
    prompts = drawn_prompts((50,))
    tables = scattered_tables([50], num_blocks=40, block_size=BLOCK, rng=random.Random(5))
    whole, cut, exact = (
        run_chunks(model, pool_for(model.config, 40, dtype=pool_dtype), prompts, tables, steps)[0]
        for pool_dtype, steps in (
            (dtype, [[(0, 50)]]),
            (dtype, [[(0, 23)], [(0, 26)], [(0, 1)]]),
            ("float32", [[(0, 50)]]),
        )
    )
    assert whole.dtype == torch.float32
    assert torch.equal(cut, whole)
    assert 0 < (whole - exact).abs().max() < 8 * rounding * exact.abs().max()


@pytest.mark.parametrize(
    "name",
    [
        *("llama 3", "qwen 2", "gemma 3", "phi 3, long", "mixtral", "qwen 2 moe", "gpt oss", "llama 4, some dense"),
        *("qwen 3 next", "deepseek 2, no query latent", "deepseek 3"),
    ],
)
def test_deterministic_logits_do_not_depend_on_the_rest_of_the_batch(tmp_path: Path, name: str) -> None:
    folder = ModelFolder(name, write_family(tmp_path / "m", name))
    model = load_decoder(folder, CPU, torch.float32, invariant_attention(torch.float32), deterministic=True)
    prompts = drawn_prompts()
    tables = scattered_tables(list(LENGTHS), num_blocks=40, block_size=BLOCK, rng=random.Random(2))
    steps = [[(0, 10)], [(0, 1), (1, 5), (2, 30)], [(0, 1), (2, 1)], [(2, 33), (0, 25)]]
    together = run_chunks(model, pool_for(model.config, 40), prompts, tables, steps)
    for index, logits in enumerate(together):
        whole = [[(0, LENGTHS[index])]]
        (alone,) = run_chunks(model, pool_for(model.config, 40), [prompts[index]], [tables[index]], whole)
        assert torch.equal(logits, alone)


@pytest.mark.parametrize("name", ["gemma 2", "mixtral"])
def test_weights_in_bfloat16_come_close(tmp_path: Path, name: str) -> None:
    folder = ModelFolder(name, write_family(tmp_path / "m", name))
    prompts = drawn_prompts((20,))
    tables = scattered_tables([20], num_blocks=10, block_size=BLOCK, rng=random.Random(6))
    exact, rounded = (
        run_chunks(model, pool_for(model.config, 10), prompts, tables, [[(0, 20)]])[0]
        for model in (load_decoder(folder, CPU, torch.float32, weight_format=kind) for kind in ("float32", "bfloat16"))
    )
    assert 0 < (rounded - exact).abs().mean() < 0.02 * exact.abs().max()


def test_an_unknown_weight_format_lists_the_known(tmp_path: Path) -> None:
    folder = ModelFolder("m", write_family(tmp_path / "m", "llama 2"))
    with pytest.raises(ModelError, match="weight format 'int3' is not supported; supported: float32, bfloat16"):
        load_decoder(folder, CPU, torch.float32, weight_format="int3")
