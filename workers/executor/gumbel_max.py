"""Gumbel-max sampling with random numbers that depend only on (seed, position, token).

A token's weight is e^((score - largest score) / temperature). Each token has a uniform number u in (0, 1), and with it
an exponential variable -log(1 - u); the token with the largest weight / -log(1 - u) is sampled. The numbers come from
numpy's Philox4x64 generator, keyed by (seed, position). It is counter-based: word t of its stream can be computed
alone, so sampling from a few tokens needs only their numbers.

A native kernel finds the token of a whole row if the result is clear. Numpy decides close results, and all results
without the kernel; the token is the same.

Sources: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011); Maddison et al., A* sampling (2014).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from workers.ops.native.library import kernel, library

_MULTIPLIERS = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
_WEYL = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)
_ROUNDS = 10
_HALF, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)
_LEAST = 2.0**-54  # instead of 0, whose logarithm would be 0
# log1p may round below its argument; a token this close to the best bound is still computed.
_SLACK = 1.0 - 1e-12
# Below this the division overflows float32; the likeliest token has all the mass long before.
MIN_TEMPERATURE = 1e-6
_UNDECIDED = -1  # instead of a token: too close to call

Row = NDArray[np.float32]  # [vocab]


@dataclass(frozen=True, slots=True)
class Categorical:
    """A row of scores to sample from, and the generator's key for this draw."""

    scores: Row
    temperature: float
    seed: int
    position: int


def draw_tokens(rows: Sequence[Categorical]) -> list[int]:
    """One token from each row; all rows have the same vocabulary."""
    return [
        token if token != _UNDECIDED else _exact_token(row)
        for row, token in zip(rows, _clear_tokens(rows), strict=True)
    ]


def weights_of(scores: Row, temperature: float) -> Row:
    """Turn scores into weights in place; the largest becomes 1."""
    with np.errstate(invalid="ignore"):  # a row of nothing but -inf
        scores -= scores.max()
    if temperature != 1.0:
        scores /= max(temperature, MIN_TEMPERATURE)
    return np.exp(scores, out=scores)


def uniforms_of_all(seed: int, position: int, vocab_size: int) -> NDArray[np.float64]:
    """The uniform number [vocab] of every token."""
    if library() is not None:
        numbers = np.empty(vocab_size)
        kernel("uniforms")(numbers.ctypes.data, seed, position, vocab_size)
        return numbers
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, position], dtype=np.uint64)))
    numbers = generator.random(vocab_size)
    return np.maximum(numbers, _LEAST, out=numbers)


def uniforms_of(
    seeds: NDArray[np.uint64], positions: NDArray[np.uint64], tokens: NDArray[np.int64]
) -> NDArray[np.float64]:
    """`uniforms_of_all(seeds[i], positions[i], ...)[tokens[i]]` for every i, without the other tokens' numbers."""
    key0, key1 = seeds, positions
    block = tokens.astype(np.uint64)
    zero = np.zeros_like(block)
    a, b, c, d = (block >> np.uint64(2)) + np.uint64(1), zero, zero, zero  # numpy counts before it draws
    for _ in range(_ROUNDS):
        high_a, low_a = _product(a, _MULTIPLIERS[0])
        high_c, low_c = _product(c, _MULTIPLIERS[1])
        a, b, c, d = high_c ^ b ^ key0, low_c, high_a ^ d ^ key1, low_a
        key0, key1 = key0 + _WEYL[0], key1 + _WEYL[1]
    words = np.choose(tokens & 3, [a, b, c, d])
    numbers: NDArray[np.float64] = np.maximum((words >> np.uint64(11)) * 2.0**-53, _LEAST)
    return numbers


def gumbel_max(weights: NDArray[np.float32], numbers: NDArray[np.float64]) -> int:
    """The index of the largest weight / -log(1 - u).

    A logarithm per token would cost more than everything else. Since u <= -log(1 - u), weight / u is an upper bound,
    and the exact value is computed only for tokens whose bound exceeds the value of the token with the best bound.
    """
    bounds = weights / numbers
    best = int(bounds.argmax())
    reached = weights[best] / -np.log1p(-numbers[best])
    runners = np.flatnonzero(bounds >= reached * _SLACK) if reached > 0 else np.array([best])
    return int(runners[(weights[runners] / -np.log1p(-numbers[runners])).argmax()])


def _exact_token(row: Categorical) -> int:
    weights = weights_of(row.scores.copy(), row.temperature)
    return gumbel_max(weights, uniforms_of_all(row.seed, row.position, len(weights)))


def _clear_tokens(rows: Sequence[Categorical]) -> list[int]:
    """Each row's token if it leads by more than the rounding differences between math libraries, else `_UNDECIDED`."""
    if library() is None or not rows:
        return [_UNDECIDED] * len(rows)
    contiguous = [np.ascontiguousarray(row.scores) for row in rows]
    scores = np.array([row.ctypes.data for row in contiguous], np.uintp)
    largest = np.array([row.max() for row in contiguous])
    temperatures = np.array([max(row.temperature, MIN_TEMPERATURE) for row in rows], np.float32)
    seeds = np.array([row.seed for row in rows], np.uint64)
    positions = np.array([row.position for row in rows], np.uint64)
    found = np.empty(len(rows), np.int64)
    pointers = [array.ctypes.data for array in (scores, largest, temperatures, seeds, positions, found)]
    kernel("gumbel_max")(*pointers, len(rows), len(contiguous[0]), torch.get_num_threads())
    tokens: list[int] = found.tolist()
    return tokens


def _product(x: NDArray[np.uint64], y: np.uint64) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """The upper and the lower 64 bits of x * y."""
    x_high, x_low, y_high, y_low = x >> _HALF, x & _LOW, y >> _HALF, y & _LOW
    cross = x_high * y_low + (x_low * y_low >> _HALF)  # cannot overflow: (2^32 - 1)^2 + 2^32 - 1 < 2^64
    other = x_low * y_high + (cross & _LOW)
    return x_high * y_high + (cross >> _HALF) + (other >> _HALF), x * y
