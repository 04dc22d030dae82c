import errno
import hashlib
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.model.tiny import write_tiny_llama
from tests.model.tiny_gguf import LAYERS, hub_attention, write_tiny_gguf
from workers.config import EngineConfig
from workers.errors import ModelError
from workers.executor.rank_loader import model_facts
from workers.model import content, store
from workers.model.config import read_model_config
from workers.model.content import content_id, file_id
from workers.model.description import GenerationDefaults
from workers.model.fetch import PINNED, PinnedModel
from workers.model.folder import ModelFolder
from workers.model.gguf.file import convert_gguf
from workers.model.tokenizer import ModelTokenizer


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def assert_weights_equal_transformers(gguf: Path, converted: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers reads GGUF models only with accelerate installed")
    theirs = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).state_dict()
    ours = load_file(converted / "model.safetensors")
    assert set(theirs) - set(ours) <= {"lm_head.weight"}  # tied
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_conversion_gives_each_head_its_rows_back(cache: Path, tiny_gguf: Path) -> None:
    weights = load_file(store.resolve(str(tiny_gguf)).path / "model.safetensors")
    for layer in range(LAYERS):
        for name in "qkvo":
            found = weights[f"model.layers.{layer}.self_attn.{name}_proj.weight"]
            assert torch.equal(found, torch.from_numpy(hub_attention(layer, name)))


def test_a_gguf_becomes_the_weights_that_transformers_reads(cache: Path, tiny_gguf: Path) -> None:
    assert_weights_equal_transformers(tiny_gguf, store.resolve(str(tiny_gguf)).path)


def test_a_gguf_brings_its_tokenizer_and_template(cache: Path, tiny_gguf: Path) -> None:
    folder = store.resolve(str(tiny_gguf))
    assert ModelTokenizer(folder.path).apply_chat_template([{"role": "user", "content": "ab"}])


def test_a_gguf_is_converted_once(cache: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = store.resolve(str(tiny_gguf))
    monkeypatch.setattr(store, "convert_gguf", None)
    assert store.resolve(str(tiny_gguf)) == first
    assert [listing.path for listing in store.list_models() if listing.path] == [first.path]


@pytest.mark.full
@pytest.mark.model
def test_the_real_model_equals_what_transformers_reads(smollm2: ModelFolder) -> None:
    gguf = content.cache_folder() / "gguf" / PINNED["smollm2-135m"].file_name
    if not gguf.is_file():
        pytest.skip("only the converted model is cached here, not the GGUF file")
    assert_weights_equal_transformers(gguf, smollm2.path)


def test_a_short_name_brings_its_makers_sampling_and_the_folder_has_the_last_word(
    cache: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = hashlib.sha256(tiny_gguf.read_bytes()).hexdigest()
    advice = GenerationDefaults(temperature=0.2, top_p=0.9)
    pinned = PinnedModel("fake==1", "fake.gguf", tiny_gguf.stat().st_size, found, "a fake", advice)
    monkeypatch.setattr(store, "PINNED", {"fake": pinned})
    (cache / "gguf").mkdir(parents=True)
    shutil.copy(tiny_gguf, cache / "gguf" / "fake.gguf")
    folder = store.resolve("fake")
    config = read_model_config(folder.path)
    assert store.inspect("fake").config.generation == advice
    facts = model_facts(folder, config, EngineConfig(dtype="float32"))
    assert facts.default_sampling == (("temperature", 0.2), ("top_p", 0.9))
    (folder.path / "generation_config.json").write_text('{"temperature": 0.7, "top_k": -1}')
    assert store.inspect("fake").config.generation == GenerationDefaults(temperature=0.7, top_k=0, top_p=0.9)


def test_the_real_models_short_name_has_the_values_of_its_model_card() -> None:
    assert PINNED["smollm2-135m"].generation == GenerationDefaults(temperature=0.2, top_p=0.9)


@pytest.mark.parametrize("kept", [0, 3, 100, 5_000, 0.5, 0.99])
def test_a_truncated_gguf_says_so(cache: Path, tmp_path: Path, tiny_gguf: Path, kept: float) -> None:
    content = tiny_gguf.read_bytes()
    part = tmp_path / "part.gguf"
    part.write_bytes(content[: kept if isinstance(kept, int) else int(len(content) * kept)])
    with pytest.raises(ModelError, match="truncated or is no GGUF file"):
        store.resolve(str(part))
    assert not any((cache / "converted").glob("*-v*[0-9]")), "a failed conversion must leave no model behind"


def test_an_unknown_gguf_architecture_lists_the_known(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="'mamba' is unknown; known are llama"):
        store.resolve(str(write_tiny_gguf(tmp_path / "m.gguf", architecture="mamba")))


def test_a_gguf_with_tensors_that_we_do_not_compute_is_refused(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"blk\.0\.attn_q_norm"):
        store.resolve(str(write_tiny_gguf(tmp_path / "m.gguf", extra_tensor="blk.0.attn_q_norm")))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("smolm2", "no model 'smolm2': did you mean 'smollm2-135m'\\?"),
        ("nowhere/model.gguf", "no such .gguf file"),
        ("./nowhere/at/all", "no model"),
    ],
)
def test_a_name_that_is_nothing_says_what_a_name_may_be(cache: Path, name: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        store.resolve(name)


def test_a_hub_model_that_cannot_be_had_says_what_to_do(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelError, match="the hub cannot be reached: go online, copy the model's folder"):
        store.resolve("owner/model")


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_an_incomplete_folder_names_the_missing_file(tmp_path: Path, missing: str) -> None:
    folder = write_tiny_llama(tmp_path / "m")
    (folder / missing).unlink()
    with pytest.raises(ModelError, match=missing):
        store.resolve(str(folder))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "m", shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors is missing"):
        store.resolve(str(folder))


@pytest.mark.parametrize("kept", [0, 5, 50, -1])
def test_truncated_safetensors_say_so(tmp_path: Path, kept: int) -> None:
    weights = write_tiny_llama(tmp_path / "m") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"model.safetensors is truncated.*fetch it again"):
        store.resolve(str(weights.parent))


def test_a_damaged_safetensors_header_says_so(tmp_path: Path) -> None:
    weights = write_tiny_llama(tmp_path / "m") / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[8:40] = b"x" * 32
    weights.write_bytes(content)
    with pytest.raises(ModelError, match="damaged safetensors header"):
        store.resolve(str(weights.parent))


class FakeIndex:
    """A fake package index: serves one file, and counts how often."""

    def __init__(self, source: Path, monkeypatch: pytest.MonkeyPatch, sha256: str | None = None) -> None:
        self.fetched = 0
        self._source = source
        found = sha256 or hashlib.sha256(source.read_bytes()).hexdigest()
        pinned = PinnedModel("fake==1", "fake.gguf", source.stat().st_size, found, "a fake")
        monkeypatch.setattr(store, "PINNED", {"fake": pinned})
        monkeypatch.setattr(store, "fetch_pinned", self._fetch)

    def _fetch(self, pinned: PinnedModel, scratch: Path, progress: Any) -> Path:
        self.fetched += 1
        return Path(shutil.copy(self._source, scratch / pinned.file_name))


def test_a_download_with_another_hash_is_refused(cache: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeIndex(tiny_gguf, monkeypatch, sha256="0" * 64)
    with pytest.raises(ModelError, match="expected 0000000000000000…: the download is damaged"):
        store.inspect("fake")
    assert not [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_two_pulls_at_once_fetch_and_convert_once(
    cache: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = FakeIndex(tiny_gguf, monkeypatch)
    conversions = []

    def converted(*args: Any) -> None:
        conversions.append(1)
        convert_gguf(*args)

    monkeypatch.setattr(store, "convert_gguf", converted)
    summaries: list[store.ModelSummary] = []
    threads = [threading.Thread(target=lambda: summaries.append(store.inspect("fake"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(summaries) == 2 and summaries[0] == summaries[1]
    assert index.fetched == len(conversions) == 1


def test_a_cache_that_cannot_be_written_names_the_variable(
    tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="set DIPTYCH_CACHE"):
        store.resolve(str(tiny_gguf))


def test_a_full_cache_is_an_error_that_names_it_and_leaves_nothing(
    cache: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(gguf: Path, folder: Path, progress: Any) -> None:
        (folder / "model.safetensors").write_bytes(b"begun")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(store, "convert_gguf", full)
    with pytest.raises(ModelError, match=f"{cache}/converted has no room for .*; free some, or set DIPTYCH_CACHE"):
        store.resolve(str(tiny_gguf))
    assert [each.suffix for each in (cache / "converted").iterdir()] == [".lock"]


def test_content_id_names_the_weights_and_not_the_place(tmp_path: Path) -> None:
    one = ModelFolder("one", write_tiny_llama(tmp_path / "one"))
    same = ModelFolder("two", write_tiny_llama(tmp_path / "two"))
    other = ModelFolder("one", write_tiny_llama(tmp_path / "three", seed=1))
    assert content_id(one) == content_id(same) != content_id(other)


def test_a_content_id_depends_on_every_tensor(tmp_path: Path) -> None:
    folder = ModelFolder("m", write_tiny_llama(tmp_path / "m"))
    file, tensors = folder.path / "model.safetensors", load_file(folder.path / "model.safetensors")
    ids = {content_id(folder)}
    for name, tensor in tensors.items():
        save_file(tensors | {name: tensor * 1.5}, file)
        ids.add(content_id(folder))
    assert len(ids) == 1 + len(tensors)


def test_every_byte_of_a_file_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "PIECE_BYTES", 8)
    path, bytes_ = tmp_path / "file", bytearray(range(100, 121))
    path.write_bytes(bytes_)
    ids = {content.hash_file(path)}
    for place in range(len(bytes_)):
        bytes_[place] ^= 1
        path.write_bytes(bytes_)
        ids.add(content.hash_file(path))
        bytes_[place] ^= 1
    path.write_bytes(bytes_[8:16] + bytes_[:8] + bytes_[16:])
    assert len({*ids, content.hash_file(path)}) == 23, "neither do pieces change places"


def test_a_file_that_shrinks_while_it_is_hashed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: a mapped file would end it. An adapter may be written again while a gateway reads it."""
    path = tmp_path / "weights"
    script = f"""if True:
        from pathlib import Path
        from workers.errors import ModelError
        from workers.model import content
        path, piece = Path({str(path)!r}), content._piece
        content.PIECE_BYTES = 4096
        path.write_bytes(bytes(12 * 4096))
        def truncating(*args):
            path.write_bytes(b"new")
            return piece(*args)
        content._piece = truncating
        try:
            content.hash_file(path)
        except ModelError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{path} was changed while it was read; try again when it is complete\n"


def test_a_large_file_is_read_once_until_it_changes(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "PIECE_BYTES", 8)
    reads, hash_file = [], content.hash_file

    def counted(path: Path) -> Any:
        reads.append(path)
        return hash_file(path)

    monkeypatch.setattr(content, "hash_file", counted)
    path = tmp_path / "file"
    path.write_bytes(bytes(99))
    first, stat = file_id(path), path.stat()
    assert [file_id(path) for _ in range(3)] == [first] * 3 and len(reads) == 1
    (entry,) = (cache / "content").iterdir()
    entry.write_text(entry.read_text()[:5])
    assert file_id(path) == first and len(reads) == 2, "what a process that died left half is computed again"
    with path.open("r+b") as file:
        file.write(b"x")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file_id(path) != first and len(reads) == 3, "as old and as long, and yet another file"
    monkeypatch.setenv("DIPTYCH_CACHE", str(path))
    assert file_id(path) != first and len(reads) == 4, "without a cache it is read each time"


def test_inspect_counts_what_is_there(tiny: ModelFolder) -> None:
    summary = store.inspect(str(tiny.path))
    assert summary.weight_bytes == 4 * summary.num_parameters
    assert summary.config.num_layers == 2
