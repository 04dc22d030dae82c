"""fp8 weights: a scale for each row of W and of x, whatever the split; the CPU computes the reference."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.model.adapters import merged, write_adapter
from tests.model.families import write_family
from tests.model.gangs import on_all_ranks
from tests.model.test_adapters import Model
from tests.model.test_parallel import Outcome, check_equal, drawn_prompts, outcome
from tests.model.tiny import write_tiny_llama
from workers.config import EngineConfig, ParallelConfig
from workers.errors import ModelError
from workers.executor.opening import model_facts
from workers.model.config import read_model_config
from workers.model.decoder import Decoder
from workers.model.feed_forward import Experts, FeedForward
from workers.model.folder import ModelFolder
from workers.model.load import load_decoder
from workers.model.parallel import Reduced
from workers.model.shard import shard_of
from workers.ops import narrow
from workers.ops.collective import StageLink, TensorGroup
from workers.ops.linear import Linear, check_fp8, make_linear
from workers.ops.linear.fp8 import FP8Linear, multiply, rounded_rows

CPU = torch.device("cpu")
# Columns of every part are a multiple of 16, on one rank and on two.
SIZES: dict[str, Any] = {"hidden_size": 64, "ffn_size": 128, "head_dim": 16, "num_heads": 4, "num_layers": 3}
BIASES = SIZES | {"attention_bias": True, "mlp_bias": True, "tie_embeddings": False}
SIXTEENS = st.integers(1, 6).map(lambda number: 16 * number)


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def meant(weight: Tensor) -> Tensor:
    rounded, scales = rounded_rows(weight)
    return rounded.float() * scales


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(0, 20), size=st.integers(1, 300), power=st.integers(-100, 100))
def test_rows_are_rounded_to_e4m3_by_their_own_scale(rows: int, size: int, power: int) -> None:
    x = numbers(rows, size, seed=size) * 2.0**power * torch.logspace(-3, 3, rows)[:, None]
    rounded, scales = rounded_rows(x)
    assert rounded.dtype == torch.float8_e4m3fn and scales.shape == (rows, 1)
    assert (rounded.float().abs().amax(1) == 448).all()
    steps = (x.abs() / 16).maximum(scales * 2.0**-10)  # half of the last of three bits, or of the least number
    assert ((rounded.float() * scales - x).abs() <= 1.001 * steps).all()


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(0, 9), size=st.integers(1, 300), power=st.integers(-126, 100), half=st.booleans())
def test_the_kernel_for_a_gpu_has_the_same_bits(rows: int, size: int, power: int, half: bool) -> None:
    triton_fp8 = pytest.importorskip("workers.ops.triton_fp8")
    power = max(power, -90) if half else power  # the interpreter takes bfloat16's subnormal numbers for zeros
    x = (numbers(rows, 2 * size, seed=size) * 2.0**power).to(torch.bfloat16 if half else torch.float32)[:, :size]
    if rows > 2:
        x[1] = 0
    found, scales = triton_fp8.rounded_rows(x, torch.float32)
    wanted, their_scales = narrow.rounded_rows(x.float(), torch.float8_e4m3fn)
    assert torch.equal(scales, their_scales)
    assert torch.equal(found.to(torch.float8_e4m3fn).view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_stays_so_and_alone(value: float) -> None:
    triton_fp8 = pytest.importorskip("workers.ops.triton_fp8")
    x, linear = numbers(5, 48, seed=0), FP8Linear(numbers(32, 48, seed=1))
    clean = linear(x)
    x[3, 40] = value
    others = [0, 1, 2, 4]
    rounded, scales = triton_fp8.rounded_rows(x, torch.float32)
    assert not (rounded * scales)[3].isfinite().all() and (rounded * scales)[others].isfinite().all()
    for y in (linear(x), multiply(*rounded_rows(x), linear, torch.float32)):
        torch.testing.assert_close(y[others], clean[others], rtol=1e-5, atol=1e-4)
        assert not y[3].isfinite().any()


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(0, 40), out=SIXTEENS, size=SIXTEENS, biased=st.booleans())
def test_a_layer_is_the_product_of_rounded_rows(rows: int, out: int, size: int, biased: bool) -> None:
    x, weight = numbers(rows, size, seed=rows), numbers(out, size, seed=size)
    bias = numbers(out, seed=out) if biased else None
    linear = make_linear(weight, bias, "fp8")
    assert isinstance(linear, FP8Linear) and linear.weight_format == "fp8"
    wanted = F.linear(meant(x).double(), meant(weight).double(), None if bias is None else bias.double()).float()
    torch.testing.assert_close(linear(x), wanted, rtol=1e-5, atol=1e-4)
    half = FP8Linear(weight, None if bias is None else bias.bfloat16())
    product = multiply(*rounded_rows(x), half, torch.bfloat16)  # what a GPU calls, which torch has for a CPU too
    torch.testing.assert_close(product.float(), wanted, rtol=0.01, atol=0.05)


@pytest.mark.parametrize("shape", [(16, 24), (40, 32)])
def test_a_shape_that_fp8_does_not_fit_keeps_its_dtype(shape: tuple[int, int]) -> None:
    assert isinstance(make_linear(numbers(*shape, seed=0), None, "fp8"), Linear)


def run(folder: ModelFolder, parallel: ParallelConfig, weight_format: str = "fp8") -> Outcome:
    return outcome(folder, parallel, drawn_prompts((23, 5)), [[(0, 10)], [(0, 13), (1, 5)]], weight_format)


def rank_decoders(folder: ModelFolder, parallel: ParallelConfig) -> list[Decoder]:
    def load(number: int, group: TensorGroup | None, _: StageLink | None) -> Decoder:
        shard = shard_of(read_model_config(folder.path), parallel, number)
        return load_decoder(folder, CPU, torch.float32, weight_format="fp8", shard=shard, group=group)

    return on_all_ranks(parallel, load)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return ModelFolder("m", write_tiny_llama(tmp_path_factory.mktemp("fp8") / "m", **BIASES))


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 3), (2, 1), (2, 2)])
def test_ranks_compute_what_one_does(llama: ModelFolder, tensor: int, pipeline: int) -> None:
    """Stages the same bits. Tensor ranks round their own columns of x and W, which is another rounding as large."""
    alone, ranks = run(llama, ParallelConfig()), run(llama, ParallelConfig(tensor, pipeline))
    if tensor == 1:
        check_equal(ranks, alone, ParallelConfig(tensor, pipeline))
        return
    exact = run(llama, ParallelConfig(), "float32")
    for found, one, wanted in zip(ranks.logits, alone.logits, exact.logits, strict=True):
        assert 0 < (one - wanted).norm() < 0.08 * wanted.norm()
        assert (found - wanted).norm() < 1.5 * (one - wanted).norm()


def part_of(half: Any) -> Any:
    return half.part if isinstance(half, Reduced) else half


def test_scales_are_sharded_with_their_rows(llama: ModelFolder) -> None:
    """gate_up: the whole layer's rows and scales. down: those of the rank's columns alone."""
    (whole,), ranks = rank_decoders(llama, ParallelConfig()), rank_decoders(llama, ParallelConfig(2, 1))
    gate_up = part_of(whole.layers[1].feed_forward).gate_up
    down = part_of(load_decoder(llama, CPU, torch.float32).layers[1].feed_forward).down
    for number, rank in enumerate(ranks):
        mine = part_of(rank.layers[1].feed_forward)
        gate, up = (torch.arange(first, first + 64) for first in (64 * number, 128 + 64 * number))
        rows = torch.cat([gate, up])
        assert torch.equal(mine.gate_up.weight.view(torch.uint8), gate_up.weight.view(torch.uint8)[rows])
        assert torch.equal(mine.gate_up.scales, gate_up.scales[:, rows])
        assert torch.equal(mine.down.scales.t(), rounded_rows(down.weight[:, gate])[1])
        assert (mine.down.bias is None) == (number == 1)
        assert isinstance(part_of(rank.layers[1].output).linear, FP8Linear)


def test_the_head_stays_exact_and_so_do_experts(llama: ModelFolder, tmp_path: Path) -> None:
    (decoder,) = rank_decoders(llama, ParallelConfig())
    assert isinstance(decoder.head, Linear)
    assert {type(part) for each in decoder.layers for part in (each.qkv, part_of(each.feed_forward).down)} == {
        FP8Linear
    }
    mixtral = ModelFolder("m", write_family(tmp_path / "m", "mixtral"))
    experts = load_decoder(mixtral, CPU, torch.float32, weight_format="fp8").layers[0].feed_forward
    assert isinstance(experts, Experts) and isinstance(experts.experts[0], FeedForward)
    assert isinstance(experts.experts[0].down, Linear)


def test_an_adapter_adds_to_fp8_weights(llama: ModelFolder, tmp_path: Path) -> None:
    adapter, prompts = write_adapter(tmp_path / "a", llama.path, 1), drawn_prompts((9, 9))
    fp8, bare = (Model(llama.path, [adapter], weight_format=each) for each in ("fp8", "float32"))
    plain, adapted = fp8.run(prompts, (-1, 0))
    wanted = Model(merged(llama.path, adapter, tmp_path / "m"), []).run(prompts, (-1, -1))[1]
    assert torch.equal(plain, fp8.run(prompts, (-1, -1))[0])
    error = (adapted - wanted).norm() / wanted.norm()
    assert error < 0.1 < 0.5 < (bare.run(prompts, (-1, -1))[1] - wanted).norm() / wanted.norm()


def test_blocks_of_fp8_weights_have_another_name(llama: ModelFolder) -> None:
    config, engine = read_model_config(llama.path), EngineConfig(dtype="bfloat16")
    plain, fp8, fp8_kv = (
        model_facts(llama, config, each).layout
        for each in (engine, replace(engine, weights="fp8"), replace(engine, weights="fp8", dtype="fp8"))
    )
    assert len({each.fingerprint for each in (plain, fp8)}) == 2 and fp8.model == fp8_kv.model != plain.model


@pytest.mark.parametrize("settings", [{"deterministic": True}, {"dtype": "float32"}], ids=str)
def test_what_fp8_weights_cannot_do_is_refused_with_the_configuration(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"engine\.weights is fp8, w"):
        EngineConfig(weights="fp8", **settings)


def test_other_devices_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"compute capability 8\.9 .* on cpu leave it out, or take int8"):
        check_fp8(CPU, torch.float32)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(ModelError, match=r"compute capability 8\.9 .* on cuda:0 leave it out$"):
        check_fp8(torch.device("cuda:0"), torch.bfloat16)
