"""Sampling on the device: the host's tokens, its time against the host's, and the waits of a whole step."""

import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kvtransfer.layout import KVLayout
from workers.engine.step import Chunk, Draw, StepPlan
from workers.executor import device_sampler
from workers.executor.device_sampler import Sampled, sample_on_device
from workers.executor.grammar_masks import Allowed
from workers.executor.inputs import step_arrays
from workers.executor.kv_pool import allocate_pool
from workers.executor.sampler import sample
from workers.model.feed_forward import GroupedExperts
from workers.model.folder import ModelFolder
from workers.model.load import load_decoder
from workers.ops.attention import best_attention
from workers.ops.staging import to_device
from workers.request import SamplingParams

VOCAB, ROWS = 128256, (1, 8, 64, 256)  # the vocabulary of Llama 3
COMPARED = 32  # rows at most; the host takes up to ten milliseconds for one
PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "plain": SamplingParams(temperature=0.8),
    "top_p": SamplingParams(temperature=0.8, top_p=0.9),
    "top_k": SamplingParams(temperature=0.8, top_k=50),
    "min_p": SamplingParams(temperature=0.8, min_p=0.05),
    "top_k_top_p": SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
    "penalties": SamplingParams(temperature=0.8, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.1),
    "logprobs": SamplingParams(temperature=0.8, logprobs=5),
}
FAMILIES = ("llama 3", "gemma 2", "mixtral")


def measure(device: torch.device, *, tiny: bool) -> dict[str, object]:
    """Raises if a token differs from the host's, if sampling waits more than once, or if a layer waits at all."""
    if device.type == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    figures: dict[str, object] = {}
    close: list[int] = []
    with asked_host(close):
        for rows in (1,) if tiny else ROWS:
            figures |= _sampling(device, rows, 300 if tiny else VOCAB, torch.bfloat16)
        _sampling(device, 2 if tiny else 8, 300 if tiny else VOCAB, torch.float32)  # the same tokens there too
    figures["rows_left_to_the_host"] = sum(close)
    families = FAMILIES[:1] if tiny else FAMILIES
    for family in families:
        _forward_waits(device, family)
    figures["families_without_a_wait"] = ", ".join(families)
    return figures


def _sampling(device: torch.device, rows: int, vocab_size: int, dtype: torch.dtype) -> dict[str, object]:
    generator = torch.Generator(device).manual_seed(rows)
    logits = (4 * torch.randn(rows, vocab_size, device=device, generator=generator)).to(dtype)
    logits[:, vocab_size // 2] = logits.amax(-1)  # a tie at the top
    some = min(rows, COMPARED)
    figures: dict[str, object] = {f"rows_{rows}_copy_us": _median_us(lambda: logits.cpu())}
    for name, params in PARAMS.items():
        draws = [_draw(params, row) for row in range(rows)]
        tokens, waits = _waits(lambda draws=draws: sample_on_device(logits, draws), device)  # type: ignore[misc]
        sample(logits[:1].cpu(), draws[:1])  # may compile
        begun = time.perf_counter()
        wanted = sample(logits[:some].cpu(), draws[:some])[0]
        host_us = 1e6 * (time.perf_counter() - begun) * rows / some
        differ = [row for row in range(some) if tokens[0][row] != wanted[row]]
        assert not differ, f"{name}: rows {differ[:9]} of {some} differ from the host's tokens"
        assert waits <= 1, f"{name}: {waits} waits for the device"
        prefix = f"rows_{rows}_{name}"
        if device.type == "cuda":
            figures[f"{prefix}_us"] = _median_us(lambda draws=draws: sample_on_device(logits, draws))  # type: ignore[misc]
        figures[f"{prefix}_host_us"] = host_us
    return figures


def _draw(params: SamplingParams, row: int) -> Draw:
    if params.repetition_penalty == 1.0:
        return Draw(params, 2**64 - 1 - row, row)
    seen = np.arange(99, dtype=np.int32) * 3
    return Draw(params, 2**64 - 1 - row, row, seen.tobytes(), (seen % 4).tobytes(), (7, 8))


@contextmanager
def asked_host(close: list[int]) -> Iterator[None]:
    """Appends how many rows the device left to the host each time."""

    def counted(logits: Tensor, draws: Sequence[Draw], allowed: Allowed) -> object:
        close.append(len(draws))
        return sample(logits, draws, allowed)

    setattr(device_sampler, "sample", counted)  # noqa: B010
    yield
    setattr(device_sampler, "sample", sample)  # noqa: B010


def _waits(call: Callable[[], Sampled], device: torch.device) -> tuple[Sampled, int]:
    """The call's result and how often it waited, or copied from memory that is not pinned."""
    result = call()
    if device.type != "cuda":
        return result, 0
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            result = call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return result, sum("synchronizing" in str(each.message) for each in found)


def _forward_waits(device: torch.device, family: str) -> None:
    """Raises if the forward pass of a small model waits for the device, its inputs included."""
    from tests.model.families import write_family

    dtype = torch.bfloat16
    with tempfile.TemporaryDirectory() as folder:
        path = write_family(Path(folder) / "model", family)
        attention = best_attention(device, dtype, False)
        model = load_decoder(ModelFolder("tiny", path), device, dtype, attention)
    if family == "mixtral" and device.type == "cuda":
        _experts_agree(model.layers[0].feed_forward, device)
    config = model.config
    layout = KVLayout("tiny", config.num_layers, config.num_kv_heads, config.head_dim, 16, "bfloat16")
    pool = allocate_pool(layout, 8, device)
    draw = Draw(SamplingParams(temperature=0.0), 0, 41)
    decode = Chunk("a", (5,), 40, (1, 2, 3), draw)
    plan = StepPlan(1, (decode, Chunk("b", tuple(range(3, 33)), 0, (4, 5), draw, targets=(4, 5), num_top=1)))

    @torch.inference_mode()
    def forward() -> Tensor | None:
        arrays = step_arrays(plan, 16)
        inputs = arrays.tensors(to_device(arrays.all, device))
        hidden = model.run(model.embed(inputs.tokens), inputs.positions, inputs.rows, inputs.batch, pool.blocks)
        return model.logits(hidden)

    forward()
    if device.type != "cuda":
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _experts_agree(experts: object, device: torch.device) -> None:
    """Raises if experts are not grouped, or compute other numbers than one expert after another."""
    assert isinstance(experts, GroupedExperts), "experts are not grouped"
    for tokens in (1, 3, 200):
        x = torch.randn(tokens, experts.down.shape[1], device=device, dtype=torch.bfloat16)
        weights, chosen = experts.router(x)
        wanted = torch.zeros(x.shape, device=device)
        for expert, (gate_up, down) in enumerate(zip(experts.gate_up.float(), experts.down.float(), strict=True)):
            gate, up = (x.float() @ gate_up.T).chunk(2, dim=-1)
            share = torch.where(chosen == expert, weights, 0.0).sum(-1, keepdim=True)
            wanted += share * ((torch.nn.functional.silu(gate) * up) @ down.T)
        torch.testing.assert_close(experts(x).float(), wanted, rtol=3e-2, atol=3e-2)


def _median_us(call: Callable[[], object], rounds: int = 5) -> float:
    def once() -> float:
        begun = time.perf_counter()
        call()  # ends with a copy to the host
        return time.perf_counter() - begun

    return 1e6 * statistics.median(once() for _ in range(rounds))
