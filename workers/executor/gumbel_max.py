"""Gumbel-max sampling: one token out of weighted ones, by numbers that depend on (seed, position, token) alone.

A token's weight is e^((score - largest score) / temperature). Each has a number u of its own in (0, 1), and so an
exponential variable -log(1 - u); the token with the largest weight / -log(1 - u) is drawn. The numbers are those of
numpy's Philox4x64 generator keyed by (seed, position). It is counter-based: word t of its stream can be had alone, so
a few tokens cost a few numbers, and the same ones.

A native kernel finds the token of a whole row where the result is clear. Numpy decides close results, and everything
where there is no kernel: the token is the same.

Sources: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011); Maddison et al., A* sampling (2014).
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from workers.ops.native.library import Pointer, Size, function

_MULTIPLIERS = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
_WEYL = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)
_ROUNDS = 10
_HALF, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)
_LEAST = 2.0**-54  # stands for 0, whose logarithm would be 0
# log1p may round below its argument; a token this close to the best bound is still computed.
_SLACK = 1.0 - 1e-12
# Below this the division leaves the range of float32; the likeliest token has all the mass long before.
_MIN_TEMPERATURE = 1e-6
_UNDECIDED = -1  # in a token's place: too close to call
_Word = ctypes.c_uint64

Row = NDArray[np.float32]  # [vocab]


@dataclass(frozen=True, slots=True)
class Categorical:
    """A row of scores to draw from, and the generator's state for this draw."""

    scores: Row
    temperature: float
    seed: int
    position: int


def draw_tokens(rows: Sequence[Categorical]) -> list[int]:
    """One token from each row; all of one vocabulary."""
    return [
        token if token != _UNDECIDED else _exact_token(row)
        for row, token in zip(rows, _clear_tokens(rows), strict=True)
    ]


def weights_of(scores: Row, temperature: float) -> Row:
    """Scores become weights, the largest 1; in place."""
    with np.errstate(invalid="ignore"):  # a row of nothing but -inf
        scores -= scores.max()
    if temperature != 1.0:
        scores /= max(temperature, _MIN_TEMPERATURE)
    return np.exp(scores, out=scores)


def uniforms_of_all(seed: int, position: int, vocab_size: int) -> NDArray[np.float64]:
    """The uniform number [vocab] of every token."""
    if kernel := _kernel("uniforms", Pointer, _Word, _Word, Size):
        numbers = np.empty(vocab_size)
        kernel(numbers.ctypes.data, seed, position, vocab_size)
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

    A logarithm for each token would cost more than all the rest: since u <= -log(1 - u), weight / u bounds what a
    token can reach, and only those that could beat the best bound's owner are computed.
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
    """Each row's token where it leads by more than two libraries' exponentials differ, else `_UNDECIDED`."""
    kernel = _kernel("gumbel_max", *[Pointer] * 6, *[Size] * 3)
    if kernel is None or not rows:
        return [_UNDECIDED] * len(rows)
    contiguous = [np.ascontiguousarray(row.scores) for row in rows]
    scores = np.array([row.ctypes.data for row in contiguous], np.uintp)
    largest = np.array([row.max() for row in contiguous])
    temperatures = np.array([max(row.temperature, _MIN_TEMPERATURE) for row in rows], np.float32)
    seeds = np.array([row.seed for row in rows], np.uint64)
    positions = np.array([row.position for row in rows], np.uint64)
    found = np.empty(len(rows), np.int64)
    arrays = (scores, largest, temperatures, seeds, positions, found)
    kernel(*[array.ctypes.data for array in arrays], len(rows), len(contiguous[0]), torch.get_num_threads())
    tokens: list[int] = found.tolist()
    return tokens


@functools.cache
def _kernel(name: str, *arguments: type) -> Callable[..., None] | None:
    return function(f"diptych_{name}", arguments)


def _product(x: NDArray[np.uint64], y: np.uint64) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """The upper and the lower 64 bits of x * y."""
    x_high, x_low, y_high, y_low = x >> _HALF, x & _LOW, y >> _HALF, y & _LOW
    cross = x_high * y_low + (x_low * y_low >> _HALF)  # cannot overflow: (2^32 - 1)^2 + 2^32 - 1 < 2^64
    other = x_low * y_high + (cross & _LOW)
    return x_high * y_high + (cross >> _HALF) + (other >> _HALF), x * y
