"""Drives llama.cpp through its low-level batch interface: one KV stream per sequence, greedy.

The prompts of a decode are computed once; each measurement rewinds to them. Filling the batch is not timed, because
that is the Python binding's time; choosing the best token is.
"""

import ctypes
from pathlib import Path

import llama_cpp
import numpy as np

from benchmarks.engine.drivers.protocol import EngineDriverConfig, PhaseTimer, Task, driver_config, serve

UNTIMED_STEPS = 2
MAX_SEQUENCES = 32
TIMED_PROMPT = MAX_SEQUENCES  # the sequence of prompts that are timed
MAX_CONTEXT = 1280
FORMATS = {"F32": 0, "F16": 1}  # llama_ftype
QUIET = llama_cpp.llama_log_callback(lambda level, text, data: None)  # must stay referenced while the process lives


def converted(source: Path, target: Path, format_name: str) -> Path:
    """Convert the model to another format, once. F32 holds exactly the published weights."""
    if not target.exists():
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize = FORMATS[format_name], True
        unfinished = target.with_name(target.name + ".unfinished")
        failed = llama_cpp.llama_model_quantize(str(source).encode(), str(unfinished).encode(), ctypes.byref(params))
        if failed:
            raise OSError(f"llama.cpp could not write {unfinished}")
        unfinished.rename(target)
    return target


class LlamaContext:
    """A loaded model, its context and the prompts whose KV it holds."""

    def __init__(self, config: EngineDriverConfig) -> None:
        options = dict(config.options)
        file = Path(config.model)
        if "source" in options:
            converted(Path(options["source"]), file, options["format"])
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = 0
        model = llama_cpp.llama_model_load_from_file(str(file).encode(), model_params)
        if model is None:
            raise OSError(f"llama.cpp could not load {file}")
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max = MAX_SEQUENCES + 1
        params.n_ctx = params.n_seq_max * MAX_CONTEXT
        params.n_batch = 2048
        params.n_threads = params.n_threads_batch = config.threads
        params.kv_unified = False
        self._context = llama_cpp.llama_init_from_model(model, params)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)
        self._computed: dict[int, tuple[tuple[int, ...], int]] = {}  # sequence -> its prompt and its first token

    def measure(self, task: Task) -> list[tuple[float, float]]:
        if not task.steps:
            watch = self._prompt(TIMED_PROMPT, task.prompts[0])[1]
            self._rewind(TIMED_PROMPT, 0)
            return watch.laps
        tokens = [self._first_token(sequence, prompt) for sequence, prompt in enumerate(task.prompts)]
        sequences = list(range(len(task.prompts)))
        laps = []
        for step in range(UNTIMED_STEPS + task.steps):
            positions = [len(prompt) + step for prompt in task.prompts]
            tokens, watch = self._run(tokens, positions, sequences, sequences)
            laps += watch.laps
        for sequence, prompt in enumerate(task.prompts):
            self._rewind(sequence, len(prompt))
        return laps[UNTIMED_STEPS:]

    def _first_token(self, sequence: int, prompt: tuple[int, ...]) -> int:
        before, token = self._computed.get(sequence, ((), 0))
        if before == prompt:
            return token
        self._rewind(sequence, 0)
        token = self._prompt(sequence, prompt)[0]
        self._computed[sequence] = prompt, token
        return token

    def _prompt(self, sequence: int, prompt: tuple[int, ...]) -> tuple[int, PhaseTimer]:
        last = len(prompt) - 1
        (token,), watch = self._run(prompt, range(len(prompt)), [sequence] * len(prompt), [last])
        return token, watch

    def _run(
        self,
        tokens: "list[int] | tuple[int, ...]",
        positions: "list[int] | range",
        sequences: list[int],
        rows: list[int],
    ) -> tuple[list[int], PhaseTimer]:
        """The most likely token after each of `rows`."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for row, (token, position, sequence) in enumerate(zip(tokens, positions, sequences, strict=True)):
            batch.token[row], batch.pos[row] = token, position
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
            batch.logits[row] = False
        for row in rows:
            batch.logits[row] = True
        watch = PhaseTimer()
        status = llama_cpp.llama_decode(self._context, batch)
        best = [int(self._logits(row).argmax()) for row in rows]
        watch.lap()
        assert status == 0, f"llama_decode answered {status}"
        return best, watch

    def _logits(self, row: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
        """[vocab], after one row of the last batch."""
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self._context, row), (self._vocab_size,))

    def _rewind(self, sequence: int, length: int) -> None:
        llama_cpp.llama_memory_seq_rm(self._memory, sequence, length, -1)


if __name__ == "__main__":
    llama_cpp.llama_log_set(QUIET, None)
    llama_cpp.llama_backend_init()
    serve(LlamaContext(driver_config()).measure)
