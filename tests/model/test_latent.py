"""Latent attention in its absorbed form is attention over the keys and values of heads."""

import torch
from torch import Tensor

from tests.model.paging import ragged
from workers.model.description import MLAConfig
from workers.model.latent import BatchedLinear, HeadsLinear, Latent, LatentOutput
from workers.ops.attention import REFERENCE, SDPA
from workers.ops.batch import Scoring
from workers.ops.linear import Linear

HEADS, TOKENS = 4, 11
SIZES = MLAConfig(kv_lora_rank=20, q_lora_rank=0, qk_nope_head_dim=12, qk_rope_head_dim=6, v_head_dim=10)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_absorbed_attention_is_that_of_the_keys_and_values_of_heads() -> None:
    to_latent, from_latent = drawn(HEADS, 12, 20, seed=0) / 4, drawn(HEADS, 20, 10, seed=1) / 4
    down, angle = drawn(TOKENS, HEADS * 18 + 26, seed=2), drawn(TOKENS, 1, 3, seed=3)
    latent = Latent(SIZES, None, None, torch.ones(20), BatchedLinear(to_latent))
    query, key = latent(down, angle.cos(), angle.sin())
    pool, batch = torch.zeros(3, 1, 1, 1, 4, 26), ragged([[2, 0, 1]], [TOKENS], [TOKENS], 4)
    REFERENCE.write_kv(pool, key, key, 0, batch.slot_mapping)
    attended = SDPA.attend(query, pool, 0, batch, Scoring(18**-0.5))
    found = LatentOutput(SIZES, BatchedLinear(from_latent), lambda x, change: x)(attended.flatten(1), None)

    c, rotated = key[:, 0, :20], key[:, 0, 20:]
    keys = torch.cat([torch.einsum("hpr,tr->thp", to_latent, c), rotated[:, None].expand(-1, HEADS, -1)], -1)
    plain = torch.cat([down[:, : HEADS * 18].view(TOKENS, HEADS, 18)[..., :12], query[..., 20:]], -1)
    scores = torch.einsum("qhd,khd->hqk", plain, keys) * 18**-0.5
    weights = scores.masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), -torch.inf).softmax(-1)
    expected = torch.einsum("hqk,khv->qhv", weights, torch.einsum("tr,hrv->thv", c, from_latent))
    torch.testing.assert_close(found, expected.flatten(1), rtol=1e-4, atol=1e-4)


def test_a_product_of_all_heads_is_that_of_each() -> None:
    weight, x = drawn(HEADS, 20, 12, seed=4), drawn(TOKENS, HEADS, 20, seed=5)
    of_each = HeadsLinear(tuple(Linear(each.t().contiguous()) for each in weight))
    torch.testing.assert_close(BatchedLinear(weight)(x), of_each(x), rtol=1e-5, atol=1e-5)
