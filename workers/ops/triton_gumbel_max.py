"""Gumbel-max over whole rows as one Triton kernel; see `workers.executor.gumbel_max` for the formula.

Runs on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1). Each program takes a tile of one row, computes its
tokens' values in float64, and writes the best token with the two largest values. As in the native kernel, a row's
result counts only if it leads by more than the rounding differences between math libraries.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.random import philox_impl

CLEAR = 1.0 - 1e-5  # the second-best value must be below this part of the best
TILE = 1024  # tokens


def best_tokens(
    scores: Tensor, largest: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, lowest: Tensor
) -> tuple[Tensor, Tensor]:
    """The token [rows] int64 with the best value among those with a score of at least `lowest`, and if it is clear.

    scores [rows, vocab] float32 and dense; largest [rows] float32, of each row; temperatures [rows] float32, 0: the
    row is skipped and gets any token; seeds and positions [rows] int64, the bits of unsigned numbers; lowest [rows]
    float64.
    """
    rows, vocab_size = scores.shape
    tiles = triton.cdiv(vocab_size, TILE)
    values = torch.zeros(rows, 2, tiles, dtype=torch.float64, device=scores.device)
    tokens = torch.zeros(rows, tiles, dtype=torch.int64, device=scores.device)
    _best_of_tile[(rows, tiles)](
        scores, largest, temperatures, seeds, positions, lowest, values, tokens, vocab_size, TILE=TILE
    )
    best = values.flatten(1).topk(2).values  # [rows, 2]
    token = tokens.gather(1, values[:, 0].argmax(1, keepdim=True))[:, 0]
    return token, best[:, 1] < best[:, 0] * CLEAR


@triton.jit  # type: ignore[untyped-decorator]
def _best_of_tile(  # type: ignore[no-untyped-def]
    scores, largest, temperatures, seeds, positions, lowest, values, tokens, vocab_size, TILE: tl.constexpr
):
    row, tile, tiles = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    temperature = tl.load(temperatures + row)
    if temperature > 0.0:
        seed = tl.load(seeds + row).to(tl.uint64, bitcast=True)
        position = tl.load(positions + row).to(tl.uint64, bitcast=True)
        # Four words for each counter; numpy counts before it draws.
        counter = (tile * (TILE // 4) + tl.arange(0, TILE // 4) + 1).to(tl.uint64)
        zero = counter - counter
        a, b, c, d = philox_impl(counter, zero, zero, zero, seed, position, 10)
        number = (tl.interleave(tl.interleave(a, c), tl.interleave(b, d)) >> 11).to(tl.int64)  # u in units of 2^-53
        # 1 - u is exact in float64, so this is log1p(-u); u = 0 counts as 2^-54.
        time = -tl.log((9007199254740992 - number).to(tl.float64) * 1.1102230246251565e-16)
        time = tl.where(number == 0, 5.551115123125783e-17, time)

        at = tile * TILE + tl.arange(0, TILE)
        inside = at < vocab_size
        score = tl.load(scores + row * vocab_size + at, inside, float("-inf"))
        power = tl.div_rn(score - tl.load(largest + row), temperature)
        power = tl.where(power <= 0.0, power, float("-inf"))  # not NaN
        value = tl.exp(power.to(tl.float64)) / time
        value = tl.where(inside & (score.to(tl.float64) >= tl.load(lowest + row)), value, 0.0)

        best = tl.max(value, 0)
        token = tl.min(tl.where(value == best, at, vocab_size - 1), 0)
        second = tl.max(tl.where(at == token, 0.0, value), 0)
        tl.store(values + row * 2 * tiles + tile, best)
        tl.store(values + (row * 2 + 1) * tiles + tile, second)
        tl.store(tokens + row * tiles + tile, token.to(tl.int64))
