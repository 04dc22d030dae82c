"""`weights: gguf` computes with the file's own blocks: the numbers in the converted folder, never rounded again."""

import os
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model.families import write_family
from tests.model.family_gguf import write_family_gguf
from tests.model.gangs import on_all_ranks
from tests.model.paging import pool_for, ragged, run_chunks, scattered_tables
from tests.model.tiny import write_tiny_llama
from workers.config import ParallelConfig
from workers.errors import ModelError
from workers.model import load, store
from workers.model.config import read_model_config
from workers.model.decoder import Decoder
from workers.model.folder import ModelFolder
from workers.model.gguf import file as gguf_file
from workers.model.gguf.blocks import GGUFBlocks
from workers.model.gguf.origin import read_origin
from workers.model.load import load_decoder
from workers.model.shard import shard_of
from workers.model.weights import Part
from workers.ops.attention import SDPA
from workers.ops.collective import TensorGroup
from workers.ops.linear import dense, linear_from_blocks, quantized
from workers.ops.linear.blocks import BLOCK_COLUMNS, dequantize

CPU = torch.device("cpu")
# The hub's model, the format of its matrices, and those of single parts.
FILES: dict[str, tuple[str, str, dict[str, str]]] = {
    "q8_0, some rows too short": ("llama 3", "q8_0", {}),
    "q4_1 but for a head in q8_0": ("llama 3", "q4_1", {"token_embd": "q8_0"}),
    "q4_0, attention apart": ("llama 2", "q4_0", {"attn_v": "q8_0", "attn_output": ""}),
    "q4_k": ("wide llama", "q4_k", {"token_embd": "q8_0"}),
    "stacks of experts": ("mixtral", "q4_1", {}),
    "experts and one for all": ("qwen 2 moe", "q8_0", {"ffn_up_exps": "q4_0"}),
    "biases, nothing interleaved": ("qwen 3, biases", "q8_0", {}),
    "fused by the hub": ("phi 3, short", "q8_0", {}),
    "norms with an offset": ("gemma 2", "q4_1", {}),
}


def record_formats(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The formats of the matrices that are made from blocks."""

    def recorded(*args: Any) -> Any:
        made.append(args[3])
        return linear_from_blocks(*args)

    monkeypatch.setattr(load, "linear_from_blocks", recorded)


@pytest.fixture(autouse=True)
def no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversion of tokenizers is transformers', slow, and tested in test_store."""
    monkeypatch.setattr(
        gguf_file, "_write_tokenizer", lambda source, target: (target / "tokenizer.json").write_text("{}")
    )


def gguf_of(tmp_path: Path, name: str) -> Path:
    family, weight_format, others = FILES[name]
    if family == "wide llama":
        hub = write_tiny_llama(tmp_path / "hub", hidden_size=256, ffn_size=512, head_dim=64)
    else:
        hub = write_family(tmp_path / "hub", family)
    return write_family_gguf(hub, tmp_path / "m.gguf", weight_format, others)


def converted(tmp_path: Path, name: str) -> ModelFolder:
    return store.resolve(str(gguf_of(tmp_path, name)))


def decoder(folder: ModelFolder, weight_format: str = "gguf") -> Any:
    return load_decoder(folder, CPU, torch.float32, weight_format=weight_format, deterministic=True)


def logits(model: Decoder) -> torch.Tensor:
    prompt = torch.randint(3, 300, (48,), generator=torch.Generator().manual_seed(0)).tolist()
    (tables,) = scattered_tables([48], 30, 4, random.Random(0))
    return run_chunks(model, pool_for(model.config, 30), [prompt], [tables], [[(0, 40)], [(0, 8)]])[0]


@pytest.mark.parametrize("name", FILES)
def test_blocks_are_the_files_and_stand_for_the_folders_numbers(cache: Path, tmp_path: Path, name: str) -> None:
    folder = converted(tmp_path, name)
    blocks, origin = GGUFBlocks(folder.path), read_origin(folder.path)
    assert origin is not None
    content, found = origin.path.read_bytes(), []
    for tensor, weight in load_file(folder.path / "model.safetensors").items():
        taken = blocks.take([Part(tensor, len(weight), (0, len(weight)))], (0, weight.shape[-1]), weight)
        if taken is None:
            continue
        weight_format, rows = taken
        stored = origin.tensors[tensor]
        there = content[stored.start : stored.start + stored.num_bytes]
        assert sorted(map(bytes, rows.numpy())) == sorted(
            there[at : at + rows.shape[1]] for at in range(0, len(there), rows.shape[1])
        ), tensor
        assert torch.equal(dequantize(rows, weight_format), weight), tensor
        found.append(weight_format)
    _, weight_format, others = FILES[name]
    assert set(found) == {weight_format, *others.values()} - {""}


@pytest.mark.parametrize("name", FILES)
def test_without_kernels_logits_are_those_of_float32(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for module in (dense, quantized):
        monkeypatch.setattr(module, "library", lambda: None)
    made: list[str] = []
    record_formats(made, monkeypatch)
    folder = converted(tmp_path, name)
    assert torch.equal(logits(decoder(folder)), logits(decoder(folder, "float32")))
    assert FILES[name][1] in made


@pytest.mark.parametrize("name", FILES)
def test_a_rank_has_the_blocks_of_its_part(cache: Path, tmp_path: Path, name: str) -> None:
    """Rows anywhere, columns where blocks end; what lies between is computed in float32."""
    path = converted(tmp_path, name).path
    blocks = GGUFBlocks(path)
    for tensor, weight in load_file(path / "model.safetensors").items():
        height, width = weight.shape if weight.dim() == 2 else (len(weight), 1)
        whole = blocks.take([Part(tensor, height, (0, height))], (0, width), weight)
        if whole is None or height < 4:
            continue
        rows, middle = (height // 4, height - 1), width // 2
        part, columns = Part(tensor, height, rows), BLOCK_COLUMNS[whole[0]]
        for cut in ((0, middle), (middle, width)):
            taken = blocks.take([part], cut, weight[slice(*rows), slice(*cut)])
            assert (taken is None) == bool(middle % columns)
            if taken is not None:
                assert taken[0] == whole[0]
                assert torch.equal(dequantize(taken[1], whole[0]), weight[slice(*rows), slice(*cut)])


@pytest.mark.parametrize("name", ["q4_k", "fused by the hub", "experts and one for all"])
def test_a_gang_computes_with_the_files_blocks(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Two ranks without kernels: the same bits as from float32, by way of blocks."""
    for module in (dense, quantized):
        monkeypatch.setattr(module, "library", lambda: None)
    folder, parallel = converted(tmp_path, name), ParallelConfig(2)
    tokens, positions = torch.arange(3, 23), torch.arange(20)
    made: list[str] = []
    record_formats(made, monkeypatch)

    @torch.inference_mode()
    def rank(number: int, group: TensorGroup | None, _: object, weight_format: str) -> torch.Tensor | None:
        shard = shard_of(read_model_config(folder.path), parallel, number)
        model = load_decoder(folder, CPU, torch.float32, SDPA, weight_format, True, shard, group)
        batch = ragged([list(range(5))], [20], [20], 4)
        hidden = model.run(model.embed(tokens), positions, positions, batch, pool_for(model.config, 5).blocks)
        return model.logits(hidden)

    (found, _), (wanted, _) = (
        on_all_ranks(parallel, partial(rank, weight_format=weight_format)) for weight_format in ("gguf", "float32")
    )
    assert found is not None and wanted is not None and torch.equal(found, wanted)
    assert FILES[name][1] in made


@pytest.mark.parametrize("name", FILES)
def test_logits_are_near_those_of_float32(cache: Path, tmp_path: Path, name: str) -> None:
    """x is rounded to 8 bits before each matrix; the weights are the same. Rounding sends some tokens to other experts
    or over a steep softmax: not the most.
    """
    folder = converted(tmp_path, name)
    exact = logits(decoder(folder, "float32"))
    errors = (logits(decoder(folder)) - exact).norm(dim=1) / exact.norm(dim=1)  # [tokens]
    assert errors.median() < 0.03


def test_parts_in_different_formats_are_computed_in_float32(cache: Path, tmp_path: Path) -> None:
    model = decoder(converted(tmp_path, "q4_0, attention apart"))
    layer = model.layers[0]
    assert [layer.qkv.weight_format, layer.output.linear.weight_format] == ["float32", "float32"]
    assert [layer.feed_forward.gate_up.weight_format, model.head.weight_format] == ["q4_0", "q4_0"]


def test_a_tied_head_has_blocks_and_embeddings_have_numbers(cache: Path, tmp_path: Path) -> None:
    folder = converted(tmp_path, "q4_1 but for a head in q8_0")
    model = decoder(folder)
    assert model.config.tie_embeddings and model.head.weight_format == "q8_0"
    embedded = model.embedding(torch.arange(model.config.vocab_size))
    assert torch.equal(embedded, load_file(folder.path / "model.safetensors")["model.embed_tokens.weight"])


def test_a_folder_from_before_learns_its_file_when_it_is_named_again(cache: Path, tmp_path: Path) -> None:
    folder = converted(tmp_path, "q8_0, some rows too short")
    before = read_origin(folder.path)
    (folder.path / "gguf.json").unlink()
    with pytest.raises(ModelError, match=r"has no record of a GGUF file.*remove the folder and pull again"):
        decoder(folder)
    assert store.resolve(str(tmp_path / "m.gguf")) == folder
    assert before is not None and read_origin(folder.path) == before


def test_a_moved_file_is_found_where_it_is_named(cache: Path, tmp_path: Path) -> None:
    folder = converted(tmp_path, "q8_0, some rows too short")
    moved = (tmp_path / "m.gguf").rename(tmp_path / "moved.gguf")
    with pytest.raises(ModelError, match=r"cannot be read .*m\.gguf.*use the \.gguf file as the model"):
        decoder(folder)
    wanted = decoder(store.resolve(str(moved)))
    assert wanted.head.weight_format == "q8_0"


def test_a_file_that_changed_is_refused(cache: Path, tmp_path: Path) -> None:
    folder = converted(tmp_path, "q8_0, some rows too short")
    content, source = (tmp_path / "m.gguf").read_bytes(), tmp_path / "m.gguf"
    source.write_bytes(content + b"\0" * 32)
    with pytest.raises(ModelError, match=rf"no longer the file that was converted: it has {len(content) + 32} bytes"):
        decoder(folder)
    middle = len(content) // 2
    source.write_bytes(content[:middle] + bytes(255 - byte for byte in content[middle:]))
    with pytest.raises(ModelError, match=r"no longer the file that was converted: .* has different numbers"):
        decoder(folder)


def test_a_model_that_never_was_a_gguf_says_so(tiny: ModelFolder) -> None:
    with pytest.raises(ModelError, match=r"engine.weights is gguf, but .* has no record.*or engine.weights q8_0"):
        decoder(tiny)


def test_blocks_need_a_cpu(tiny: ModelFolder) -> None:
    with pytest.raises(ModelError, match="weight format 'gguf' needs a CPU; on cuda take float32"):
        load_decoder(tiny, torch.device("cuda"), torch.float32, weight_format="gguf")


def test_numbers_that_are_not_finite_are_refused(cache: Path, tmp_path: Path) -> None:
    folder = converted(tmp_path, "q8_0, some rows too short")
    path = folder.path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.self_attn.o_proj.weight"][1, 1] = torch.nan
    save_file(tensors, path)
    with pytest.raises(ModelError, match="holds NaN or infinity"):
        decoder(folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_that_may_only_be_read_serves_other_formats(cache: Path, tmp_path: Path) -> None:
    folder = converted(tmp_path, "q8_0, some rows too short")
    (folder.path / "gguf.json").unlink()
    folder.path.chmod(0o555)
    assert store.resolve(str(tmp_path / "m.gguf")) == folder


@pytest.mark.model
def test_the_real_model_keeps_its_blocks(smollm2: ModelFolder) -> None:
    origin = read_origin(smollm2.path)
    if origin is None or not origin.path.is_file():
        pytest.skip("only the converted model is cached here, not the GGUF file")
    model = decoder(smollm2)
    formats = {layer.qkv.weight_format for layer in model.layers} | {
        layer.output.linear.weight_format for layer in model.layers
    }
    assert formats == {"q4_1"} and model.head.weight_format == "q8_0"
