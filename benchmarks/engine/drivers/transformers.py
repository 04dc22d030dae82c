"""Drives transformers: a static batch with its own cache, greedy. The prompts of a decode are computed once."""

import copy
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.engine.drivers.protocol import EngineDriverConfig, PhaseTimer, Task, driver_config, serve

UNTIMED_STEPS = 2


class TransformersModel:
    """A loaded model and the KV cache of the last prompts."""

    def __init__(self, config: EngineDriverConfig) -> None:
        torch.set_num_threads(config.threads)
        self._model = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32)
        self._prompts: tuple[tuple[int, ...], ...] = ()
        self._computed: Any = None

    @torch.inference_mode()
    def measure(self, task: Task) -> list[tuple[float, float]]:
        watch = PhaseTimer()
        if not task.steps:
            self._forward(torch.tensor(task.prompts))[:, -1:].argmax(-1)
            watch.lap()
            return watch.laps
        tokens, cache = self._prefilled(task.prompts)
        for number in range(UNTIMED_STEPS + task.steps):
            if number == UNTIMED_STEPS:
                watch.start()
            tokens = self._forward(tokens, cache)[:, -1:].argmax(-1)  # [batch, 1]
            if number >= UNTIMED_STEPS:
                watch.lap()
        return watch.laps

    def _prefilled(self, prompts: tuple[tuple[int, ...], ...]) -> tuple[Any, Any]:
        """First tokens and KV cache of these prompts, taken from the last batch if it begins with them."""
        if self._prompts[: len(prompts)] != prompts:
            out = self._model(torch.tensor(prompts), logits_to_keep=1, use_cache=True)
            self._prompts, self._computed = prompts, (out.logits.argmax(-1), out.past_key_values)
        tokens, cache = self._computed
        cache = copy.deepcopy(cache)
        cache.batch_select_indices(torch.arange(len(prompts)))
        return tokens[: len(prompts)], cache

    def _forward(self, tokens: Any, cache: Any = None) -> Any:
        return self._model(tokens, past_key_values=cache, logits_to_keep=1, use_cache=True).logits


if __name__ == "__main__":
    serve(TransformersModel(driver_config()).measure)
