"""Drives vLLM's engine in this process, step by step: token ids in and out, greedy, prefix cache off.

Sequences keep running, so a larger decode batch continues the smaller one before it.
"""

import itertools

import torch
from vllm import LLM, SamplingParams

from benchmarks.engine.drivers.protocol import EngineDriverConfig, PhaseTimer, Task, driver_config, serve

UNTIMED_STEPS = 2
MAX_TOKENS = 700  # more than any measurement decodes


class VllmEngine:
    """A loaded engine and its running sequences."""

    def __init__(self, config: EngineDriverConfig) -> None:
        self._engine = LLM(
            config.model,
            dtype="float32",
            enforce_eager=True,
            max_model_len=2048,
            max_num_batched_tokens=2048,
            max_num_seqs=32,
            enable_prefix_caching=False,
        ).llm_engine
        assert torch.get_num_threads() == config.threads, f"vLLM took {torch.get_num_threads()} threads"
        self._numbers = itertools.count()
        self._running: dict[tuple[int, ...], str] = {}

    def measure(self, task: Task) -> list[tuple[float, float]]:
        if not task.steps:
            return self._prefill(task.prompts[0])
        self._start_decodes(task.prompts)
        watch = PhaseTimer()
        for _ in range(task.steps):
            outputs = self._engine.step()
            watch.lap()
            assert len(outputs) == len(task.prompts), f"a step gave {len(outputs)} of {len(task.prompts)} tokens"
        return watch.laps

    def _prefill(self, prompt: tuple[int, ...]) -> list[tuple[float, float]]:
        self._end_all()
        watch = PhaseTimer()
        self._add(prompt, 1)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        watch.lap()
        return watch.laps

    def _start_decodes(self, prompts: tuple[tuple[int, ...], ...]) -> None:
        if not self._running.keys() <= set(prompts):
            self._end_all()
        for prompt in prompts:
            if prompt not in self._running:
                self._running[prompt] = self._add(prompt, MAX_TOKENS)
        while len(self._engine.step()) < len(prompts):
            continue
        for _ in range(UNTIMED_STEPS):
            self._engine.step()

    def _add(self, prompt: tuple[int, ...], num_tokens: int) -> str:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        name = str(next(self._numbers))
        self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)
        return name

    def _end_all(self) -> None:
        self._engine.abort_request(list(self._running.values()))
        self._running.clear()
        while self._engine.has_unfinished_requests():
            self._engine.step()


if __name__ == "__main__":
    serve(VllmEngine(driver_config()).measure)
