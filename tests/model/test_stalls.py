"""Nothing in a forward pass or in sampling waits for the device: a CPU model whose calls are watched.

The kernels of attention and sampling are left out: they take no part of a tensor to the host, and Triton's interpreter
would. `benchmarks/gpu/parts/sampling.py` watches the whole step on a GPU.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.model.families import write_family
from tests.model.paging import pool_for, ragged
from tests.model.test_sampler import draw
from workers.executor import device_sampler
from workers.executor.device_sampler import sample_on_device
from workers.model import delta_net, feed_forward
from workers.model.feed_forward import Experts, GroupedExperts
from workers.model.folder import ModelFolder
from workers.model.load import load_decoder
from workers.ops import fused
from workers.ops.attention import Attention
from workers.ops.batch import RaggedBatch, Scoring
from workers.ops.linear import dense

METHODS = {"item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__contains__"}
CREATION = {"tensor", "as_tensor", "from_numpy", "new_tensor"}  # copies from memory that is not pinned
OPERATIONS = {
    *("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "nonzero_numpy", "argwhere"),
    *("masked_select", "unique", "_unique2", "bincount"),
}


class Calls(TorchFunctionMode):
    """Methods that need the numbers of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.stalls: list[str] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in METHODS or name in CREATION:
            self.stalls.append(name)
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Operations whose result has a shape that depends on numbers, or that copy a number to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.stalls: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        masked = any(index is not None and index.dtype == torch.bool for index in indices)
        repeated = name == "repeat_interleave" and "output_size" not in (kwargs or {})
        located = name == "where" and len(args) == 1
        if name in OPERATIONS or masked or repeated or located:
            self.stalls.append(name)
        return func(*args, **(kwargs or {}))


def stalls_of(call: Callable[[], object]) -> list[str]:
    with torch.inference_mode(), Calls() as calls, Operations() as operations:
        call()
    return calls.stalls + operations.stalls


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.tolist(),
        lambda x: x[0, 0].item(),
        lambda x: bool(x.sum() > 0),
        lambda x: x[x > 0],
        lambda x: x.masked_fill_(x > 0, 1.0) if x.any() else None,
        lambda x: x.nonzero(),
        lambda x: torch.where(x > 0),
        lambda x: x.sum() * torch.tensor(2.0),
        lambda x: x.cpu(),
    ],
)
def test_stalls_are_seen(call: Callable[[Tensor], object]) -> None:
    assert stalls_of(lambda: call(torch.randn(3, 4)))


def no_write(pool: Tensor, key: Tensor, value: Tensor, layer: int, slot_mapping: Tensor) -> None:
    """Writes nothing."""


def echo(query: Tensor, pool: Tensor, layer: int, batch: RaggedBatch, scoring: Scoring) -> Tensor:
    """Attends to nothing."""
    return query.clone()


@pytest.mark.parametrize(
    "family",
    [
        *("llama 3", "qwen 2", "qwen 3", "gemma 2", "gemma 3", "phi 3, partial rotary", "mixtral", "qwen 2 moe"),
        *("mistral, window", "smollm 3", "qwen 3 moe", "llama 4", "llama 4, some dense", "gpt oss", "gpt oss, mxfp4"),
        *("deepseek 2", "deepseek 3", "qwen 3 next", "qwen 3.5"),
    ],
)
def test_no_layer_stalls(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "library", lambda: None)
    monkeypatch.setattr(dense, "library", lambda: None)
    monkeypatch.setattr(feed_forward, "_can_group", lambda weight: True)
    monkeypatch.setattr(delta_net, "causal_conv", lambda mixed, *_: mixed)  # Triton kernels, on a GPU
    monkeypatch.setattr(delta_net, "gated_delta_rule", lambda query, key, value, *_: value)
    folder = ModelFolder("m", write_family(tmp_path / "m", family))
    model = load_decoder(folder, torch.device("cpu"), torch.float32, Attention("echo", no_write, echo))
    batch, pool = ragged([[1], [2, 3]], [1, 5], [3, 7], 4), pool_for(model.config, 5)
    tokens, positions, rows = torch.arange(6), torch.tensor([2, 2, 3, 4, 5, 6]), torch.tensor([0, 5])

    def forward() -> None:
        model.logits(model.run(model.embed(tokens), positions, rows, batch, pool.blocks))

    assert stalls_of(forward) == []


def test_experts_that_are_not_grouped_stall(tmp_path: Path) -> None:
    folder = ModelFolder("m", write_family(tmp_path / "m", "mixtral"))
    model = load_decoder(folder, torch.device("cpu"), torch.float32)
    experts = model.layers[0].feed_forward
    assert isinstance(experts, Experts) and not isinstance(experts, GroupedExperts)
    assert stalls_of(lambda: experts(torch.randn(3, 32)))


def test_sampling_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that comes before the copy to the host, and after it only lists of numbers on the host."""
    triton_sampling = pytest.importorskip("workers.ops.triton_sampling")
    triton_filters = pytest.importorskip("workers.ops.triton_filters")
    rows = [
        draw(0),
        draw(1, temperature=0, banned=(3,), logprobs=2),
        draw(2, top_k=5, top_p=0.9, min_p=0.1, logprobs=0),
        draw(3, top_p=0.5, repetition_penalty=1.2, prompt=(1, 2), answer=(4,), logit_bias=((7, 1.0),)),
    ]
    copies: list[int] = []

    def summarize(scores: Tensor) -> Any:
        return triton_sampling.TileSummary(scores.float(), scores.argsort(-1))

    def choose(scores: Tensor, *_: object, **__: object) -> Tensor:
        return scores.argsort(-1).T[:3]

    class Copied(Exception):
        pass

    def to_host(tensors: list[Tensor]) -> list[Tensor]:
        copies.append(len(tensors))
        raise Copied

    monkeypatch.setattr(triton_sampling, "summarize", summarize)
    monkeypatch.setattr(triton_sampling, "choose", choose)
    monkeypatch.setattr(triton_filters, "filter_bounds", lambda scores, *_: scores.T[:2])
    logits = torch.randn(4, 300)
    tables = device_sampler._tables(rows, 300)
    moved = [torch.from_numpy(table) for table in tables.values()]
    monkeypatch.setattr(device_sampler, "to_device", lambda *_: moved)
    monkeypatch.setattr(device_sampler, "to_host", to_host)

    def until_the_copy() -> None:
        with pytest.raises(Copied):
            sample_on_device(logits, rows)

    assert stalls_of(until_the_copy) == [] and copies == [4]
