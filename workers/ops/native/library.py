"""Compiles the C++ sources in this folder, once per machine and version, and loads them.

    sources + flags + compiler + CPU ──hash──> cache/native/<hash>.so ──ctypes──> functions

The sources do not use torch: they take pointers and sizes, so a build takes seconds, not the half minute of torch's
headers. They link the OpenMP library that torch has loaded, and so share its threads. Without a compiler there is no
library, and callers use torch instead.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from platformdirs import user_cache_dir
from torch import Tensor

logger = logging.getLogger(__name__)

SWITCH = "DIPTYCH_NATIVE"  # "0" in the environment: never compile, never load
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno", "-ffp-contract=off")
COMPILE_TIMEOUT_S = 300.0

Pointer = ctypes.c_void_p
Size = ctypes.c_int64
Float = ctypes.c_float
Word = ctypes.c_uint64

# Argument types of the functions `diptych_<name>` in the C++ sources; none returns a value.
_LAYOUTS = ("float32", "bfloat16", "int8", "q8_0", "q4_0", "q4_1", "q4_k")
_PACK, _LINEAR = [Pointer] * 2 + [Size] * 2, [Pointer] * 4 + [Size] * 4
_PAGED: list[type] = [Pointer, Size, Size, *[Pointer] * 3, *[Size] * 4]
_QUERY, _SCORES = [Pointer, Size, Size, Pointer, Size, Pointer] + [Size] * 7, [Float, Size, Float]
_ARGUMENTS: dict[str, Sequence[type]] = {
    "rms_norm": [Pointer, Size, Pointer, Pointer, Size, Size, Float, Size],
    "add_rms_norm": [Pointer] * 5 + [Size, Size, Float, Size],
    "gated": [Pointer] * 2 + [Size] * 4,
    "rotate": [Pointer, Size, Size] + [Pointer] * 3 + [Size] * 5,
    "attend": [*_QUERY, *[Pointer] * 3, Size, Size, *_SCORES, Pointer, Pointer],
    "attend_span": [*_QUERY, *[Size] * 3, Pointer, Size, *_SCORES, Pointer],
    "write_kv": [Pointer, Size, Pointer, Size, Pointer] + [Size] * 7 + [Pointer, Size],
    "lora": [Pointer, Size] * 2 + [Pointer] * 2 + [Size] + [Pointer] * 2 + [Size],
    "shared_sum": [Pointer] + [Size] * 3 + [Pointer] + [Size] * 4 + [Pointer],
    "causal_conv": [*[Pointer] * 3, *[Size] * 3, *_PAGED],
    "delta_rule": [*[Pointer] * 8, *[Size] * 5, *_PAGED],
    "uniforms": [Pointer, Word, Word, Size],
    "gumbel_max": [Pointer] * 6 + [Size] * 3,
    **{f"pack_{layout}": _PACK for layout in _LAYOUTS},
    **{f"linear_{layout}": _LINEAR for layout in (*_LAYOUTS, "bfloat16_tiled")},
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None if they cannot be built (the log says why). The first call may compile."""
    if os.environ.get(SWITCH) == "0":
        return None
    try:
        return ctypes.CDLL(str(_built()))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        logger.warning("no native kernels, using slower torch operations: %s", str(detail).strip()[-500:])
        return None


@functools.cache
def kernel(name: str) -> Callable[..., None]:
    """The C++ function `diptych_<name>`. Raises `RuntimeError` without a library."""
    loaded = library()
    if loaded is None:
        raise RuntimeError(f"{name} needs the native kernels: install g++ and do not set {SWITCH}")
    found = getattr(loaded, f"diptych_{name}")
    found.argtypes, found.restype = _ARGUMENTS[name], None
    return found  # type: ignore[no-any-return]


def pointer(tensor: Tensor) -> int:
    """The address of a tensor's first number. The caller must keep the tensor alive during the call."""
    return tensor.data_ptr()


def _built() -> Path:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise OSError("there is no C++ compiler (g++)")
    sources = sorted(Path(__file__).parent.glob("*.cpp"))
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
    threads = _openmp()
    identity = hashlib.sha256("\0".join([*FLAGS, *threads, version, _cpu(), torch.__version__]).encode())
    for source in sorted(Path(__file__).parent.glob("*.[ch]pp")):
        identity.update(source.read_bytes())
    folder = Path(os.environ.get("DIPTYCH_CACHE") or user_cache_dir("diptych")) / "native"
    target = folder / f"{identity.hexdigest()[:16]}.so"
    if not target.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=folder) as scratch:
            made = Path(scratch) / "native.so"
            logger.info("compiling the native kernels, once for this machine")
            command = [compiler, *FLAGS, *map(str, sources), *threads, "-o", str(made)]
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=COMPILE_TIMEOUT_S)
            made.replace(target)  # atomic: two processes may build the same file at once
    return target


def _openmp() -> list[str]:
    """Linker arguments for the OpenMP library of this process, so that `-fopenmp` does not link another one."""
    try:
        mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    except OSError:
        return []
    found = sorted(path for path in mapped if re.match(r"lib(gomp|iomp5|omp)\b", Path(path).name))
    return ["-Wl,--as-needed", found[0]] if found else []


def _cpu() -> str:
    """What `-march=native` depends on, since machines may share a cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
