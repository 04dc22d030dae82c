"""A router's choice among feed-forwards, against the sum written out token by token."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from workers.model import feed_forward
from workers.model.description import ExpertsConfig
from workers.model.feed_forward import ExpertRouter, Experts, FeedForward, GroupedExperts, SharedExpert, grouped
from workers.ops.linear import Linear

HIDDEN, FFN, COUNT, PER_TOKEN = 16, 12, 6, 2


@dataclass
class Recorded:
    """An expert that notes how many rows it was given each time."""

    feed_forward: Callable[[Tensor], Tensor]
    rows: list[int] = field(default_factory=list)

    def __call__(self, x: Tensor) -> Tensor:
        self.rows.append(len(x))
        return self.feed_forward(x)


def make(normalize: bool, whole: bool = False) -> tuple[Experts, list[Recorded]]:
    """Random experts; `whole` makes all weights small whole numbers."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        if whole:
            return torch.randint(-1, 2, shape, generator=generator).float()
        return torch.randn(*shape, generator=generator)

    recorded = [Recorded(_relu_gated(Linear(draw(2 * FFN, HIDDEN)), Linear(draw(HIDDEN, FFN)))) for _ in range(COUNT)]
    router = ExpertRouter(Linear(draw(COUNT, HIDDEN)), ExpertsConfig(COUNT, PER_TOKEN, FFN, normalize))
    return Experts(router, tuple(recorded), None), recorded  # type: ignore[arg-type]


def _relu_gated(gate_up: Linear, down: Linear) -> Callable[[Tensor], Tensor]:
    """A feed-forward that keeps whole numbers whole."""

    def compute(x: Tensor) -> Tensor:
        gate, up = gate_up(x).chunk(2, dim=-1)
        return down(torch.relu(gate) * up)

    return compute


@pytest.mark.parametrize("normalize", [False, True])
def test_a_token_gets_the_weighted_sum_of_its_best(normalize: bool) -> None:
    experts, recorded = make(normalize)
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(1))
    answers = experts(x)
    for token, answer in zip(x, answers, strict=True):
        weights = torch.softmax(experts.router.weight(token[None])[0], 0)
        best = weights.argsort(descending=True)[:PER_TOKEN]
        scale = weights[best].sum() if normalize else 1.0
        wanted = sum(weights[each] / scale * recorded[each].feed_forward(token[None])[0] for each in best.tolist())
        torch.testing.assert_close(answer, wanted, rtol=1e-5, atol=1e-5)


def test_an_expert_without_rows_is_not_asked() -> None:
    experts, recorded = make(normalize=True)
    x = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(2)).expand(5, HIDDEN)
    experts(x)
    assert sorted(len(each.rows) for each in recorded) == [0] * (COUNT - PER_TOKEN) + [1] * PER_TOKEN
    assert sum(sum(each.rows) for each in recorded) == 5 * PER_TOKEN


def test_the_order_of_a_rows_sum_is_its_own() -> None:
    """To the last bit: with small whole numbers everything before the weighted sum is exact, in any batch."""
    experts, _ = make(normalize=False, whole=True)
    x = torch.randint(-2, 3, (20, HIDDEN), generator=torch.Generator().manual_seed(3)).float()
    alone = torch.cat([experts(x[row : row + 1]) for row in range(20)])
    assert torch.equal(experts(x), alone)
    assert torch.equal(experts(x.flip(0)).flip(0), alone)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 3, 40])
@pytest.mark.parametrize(("normalize", "scales_input"), [(False, False), (True, False), (False, True)])
def test_grouped_experts_compute_the_same(
    normalize: bool, scales_input: bool, tokens: int, shared: bool, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(4)

    def linear(rows: int, columns: int) -> Linear:
        offset = torch.randn(rows, generator=generator) if bias else None
        return Linear(torch.randn(rows, columns, generator=generator), offset)

    def expert() -> FeedForward:
        return FeedForward(linear(2 * FFN, HIDDEN), linear(HIDDEN, FFN), "silu")

    experts = Experts(
        ExpertRouter(
            linear(COUNT, HIDDEN),
            ExpertsConfig(COUNT, PER_TOKEN, FFN, normalize, sigmoid=scales_input, scales_input=scales_input),
        ),
        tuple(expert() for _ in range(COUNT)),
        SharedExpert(expert(), linear(1, HIDDEN)) if shared else None,
    )
    assert grouped(experts) is experts, "a CPU's experts stay apart"
    monkeypatch.setattr(feed_forward, "_can_group", lambda weight: True)
    together = grouped(experts)
    assert isinstance(together, GroupedExperts)
    x = torch.randn(tokens, HIDDEN, generator=generator)
    torch.testing.assert_close(together(x), experts(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("capability", "groups"), [((9, 0), True), ((10, 3), True), ((8, 0), False), ((12, 0), False)])
def test_experts_are_grouped_where_torch_does_not_wait_for_their_sizes(
    capability: tuple[int, int], groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    def weight(columns: int, dtype: torch.dtype, device: str) -> Any:
        return SimpleNamespace(shape=(32, columns), dtype=dtype, device=torch.device(device))

    assert feed_forward._can_group(weight(64, torch.bfloat16, "cuda:1")) == groups
    for other in (
        weight(64, torch.bfloat16, "cpu"),
        weight(64, torch.float16, "cuda"),
        weight(60, torch.bfloat16, "cuda"),
    ):
        assert not feed_forward._can_group(other)
