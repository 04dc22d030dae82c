"""Reads the tokenizer of a model folder, as `transformers` understands the folder's files.

Its import takes over a second, so its result is kept in the cache folder, by a hash of those files and of the versions:

    files ──transformers──> tokenizer of `tokenizers`, chat templates, special tokens ──> cache/tokenizers/<hash>.json
"""

import hashlib
import json
import logging
import tempfile
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from threading import Lock

import msgspec

from workers.errors import ModelError
from workers.model.content import cache_folder

logger = logging.getLogger(__name__)

LAYOUT = "1"  # of the cached file
MAX_FILES = 32  # kept in the cache; one of a large model takes up to 20 MB
LIBRARIES = ("transformers", "tokenizers")
LOADING = Lock()  # threads that import transformers at once may find half of it
READ = (".json", ".jinja", ".model")  # kinds of files that transformers reads of a tokenizer


class TokenizerFiles(msgspec.Struct, frozen=True):
    """`tokenizer`: as `tokenizers.Tokenizer.from_str` reads it. `splits_special`: special tokens in a text are text.

    `chat_template`: one, or several by name; None: the model has none.
    """

    tokenizer: str
    splits_special: bool
    special_tokens: dict[str, str]
    chat_template: str | dict[str, str] | None


def read_tokenizer(folder: Path) -> TokenizerFiles:
    """Raises `ModelError` if the folder has no usable tokenizer."""
    path = cache_folder() / "tokenizers" / f"{_identity(folder)}.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=TokenizerFiles)
    except FileNotFoundError:
        pass
    except (OSError, msgspec.MsgspecError) as error:
        logger.warning("%s cannot be read (%s): reading %s instead", path, error, folder)
    with LOADING:
        found = _by_transformers(folder)
    _keep(found, path)
    return found


def _by_transformers(folder: Path) -> TokenizerFiles:
    from transformers import PreTrainedTokenizerFast

    try:
        loaded = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
        backend = loaded.backend_tokenizer
        return TokenizerFiles(
            backend.to_str(),
            bool(backend.encode_special_tokens),
            dict(loaded.special_tokens_map),
            loaded.chat_template if loaded.chat_template is not None else _processor_template(folder),
        )
    except ModelError:
        raise
    except Exception as error:  # the Rust code raises a bare Exception for a damaged file
        raise ModelError(f"{folder / 'tokenizer.json'} cannot be loaded: {error}") from error


def _processor_template(folder: Path) -> str | None:
    """The template in chat_template.json, which multimodal models have and transformers does not read."""
    path = folder / "chat_template.json"
    if not path.is_file():
        return None
    try:
        template = json.loads(path.read_text(encoding="utf-8"))["chat_template"]
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path} has no chat_template that can be read ({error!r}); fetch it again") from error
    return str(template)


def _identity(folder: Path) -> str:
    """A hash of all files that transformers may read, and of its version."""
    digest = hashlib.sha256("\0".join([LAYOUT, *map(version, LIBRARIES)]).encode())
    try:
        for path in sorted([*folder.glob("*"), *folder.glob("additional_chat_templates/*")]):
            if path.is_file() and path.suffix in READ:
                content = hashlib.sha256(path.read_bytes()).hexdigest()
                digest.update(f"{path.relative_to(folder).as_posix()}\0{content}\0".encode())
    except OSError as error:
        raise ModelError(f"{folder} cannot be read: {error}") from error
    return digest.hexdigest()[:32]


def _keep(found: TokenizerFiles, path: Path) -> None:
    """Never under its final name before it is complete. Each start reads the folder if the cache is not writable."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=path.parent) as scratch:
            made = Path(scratch) / path.name
            made.write_bytes(msgspec.json.encode(found))
            made.replace(path)
        with suppress(FileNotFoundError):  # another process removes the same files
            for old in sorted(path.parent.glob("*.json"), key=lambda each: each.stat().st_mtime)[:-MAX_FILES]:
                old.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s cannot be written (%s): each start loads transformers", path.parent, error)
