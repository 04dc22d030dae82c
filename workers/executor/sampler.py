"""Samples tokens from logits, on the host, and computes log probabilities.

A draw depends only on its own row, parameters, seed and position, not on other rows, earlier draws or the machine. The
logits change in this order:

    repetition   for tokens in prompt and answer: divides positive logits, multiplies negative ones
    frequency    subtracted once per occurrence in the answer; presence once if the token occurs at all
    bias         added
    bans         end tokens before `min_tokens` become -inf
    grammar      tokens that do not continue the answer's grammar become -inf

then they are divided by the temperature. Each filter is a floor on the probability: a token stays if it is at least as
likely as

    top_k   the k-th likeliest token
    top_p   the last token of the smallest set, likeliest first, whose mass reaches top_p (of what top_k left)
    min_p   min_p times the likeliest token

so tokens that tie at a floor stay or go together. Gumbel-max (`workers.executor.gumbel_max`) samples one of the tokens
that stay. Noise in the last digits of the logits, or a token at a floor, changes the result only if it was close; an
inverse CDF would shift the ranges of all later tokens. Log probabilities are those of the unchanged logits.

Rows are filtered one after another on the host, in a third of the time that a batch takes: one row of the vocabulary
fits the core's cache. Rows without filters are sampled in parallel on all cores.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.step import Draw
from workers.executor.grammar_masks import Allowed, Mask, unpacked
from workers.executor.gumbel_max import (
    Categorical,
    Row,
    draw_tokens,
    gumbel_max,
    uniforms_of,
    uniforms_of_all,
    weights_of,
)
from workers.ops.staging import to_device, to_host
from workers.request import SamplingParams, TokenLogprobs

NOTHING: Allowed = {}
_NEAR = 1024  # tokens among which the nucleus is searched first
_FEW = 16  # a draw among fewer than vocabulary / _FEW tokens computes only their random numbers


def sample_finite(
    logits: Tensor, draws: Sequence[Draw], allowed: Allowed = NOTHING
) -> tuple[list[int | None], list[TokenLogprobs | None]]:
    """As `sample`; None for rows that are not finite. May write to the logits."""
    # A NaN or infinity in a row makes the row's sum one too.
    finite = logits.sum(-1, dtype=torch.float32).isfinite()
    rows: list[bool] = finite.tolist()
    if not all(rows):
        logits[~finite] = 0  # so that sampling them is harmless
    tokens, logprobs = sample(logits, draws, allowed)
    return (
        [token if real else None for token, real in zip(tokens, rows, strict=True)],
        [found if real else None for found, real in zip(logprobs, rows, strict=True)],
    )


def sample(
    logits: Tensor, draws: Sequence[Draw], allowed: Allowed = NOTHING
) -> tuple[list[int], list[TokenLogprobs | None]]:
    """One token per row of logits [draws, vocab], and log probabilities for the rows that request them.

    `allowed`: the masks of rows with a grammar. They include the row's bans.
    """
    assert logits.shape[0] == len(draws)
    if not draws:
        return [], []
    logits = logits.float()
    tokens = _choose(logits, draws, allowed)
    scored_rows = [row for row, draw in enumerate(draws) if draw.params.logprobs is not None]
    logprobs: list[TokenLogprobs | None] = [None] * len(draws)
    if scored_rows:
        rows = logits if len(scored_rows) == len(draws) else logits[scored_rows]
        tops = [draws[row].params.logprobs or 0 for row in scored_rows]
        for row, scored in zip(scored_rows, score(rows, [tokens[row] for row in scored_rows], tops), strict=True):
            logprobs[row] = scored
    return tokens, logprobs


@dataclass(frozen=True, slots=True)
class _Candidates:
    """The tokens of a row that passed the filters, if they are few."""

    row: int
    tokens: NDArray[np.int64]
    weights: NDArray[np.float32]


def _choose(logits: Tensor, draws: Sequence[Draw], allowed: Allowed) -> list[int]:
    special = [row for row, draw in enumerate(draws) if draw.params.temperature > 0 or draw.adjusts or row in allowed]
    tokens = _likeliest(logits) if len(special) < len(draws) else [0] * len(draws)
    few: list[_Candidates] = []
    whole: dict[int, Categorical] = {}
    scratch = np.empty(logits.shape[-1], np.float32)
    for row, scores in zip(special, _on_host(logits, special), strict=True):
        draw = draws[row]
        if draw.adjusts or row in allowed:
            scores = scores.copy()
            _adjust(scores, draw, allowed.get(row))
        if draw.params.temperature == 0:
            tokens[row] = int(scores.argmax())
            continue
        floor = 0.0
        if filters(draw.params, len(scores)):
            np.copyto(scratch, scores)
            weights_of(scratch, draw.params.temperature)
            floor = _floor(scratch, draw.params)
        if not floor > 0:
            whole[row] = Categorical(scores, draw.params.temperature, draw.seed, draw.position)
            continue
        kept = np.flatnonzero(~(scratch < floor))  # written so that a row of NaN keeps a token too
        if len(kept) * _FEW < len(scratch):
            few.append(_Candidates(row, kept, scratch[kept]))
        else:
            scratch[scratch < floor] = 0.0
            tokens[row] = gumbel_max(scratch, uniforms_of_all(draw.seed, draw.position, len(scratch)))
    for each, numbers in zip(few, _random_numbers(few, draws), strict=True):
        tokens[each.row] = int(each.tokens[gumbel_max(each.weights, numbers)])
    for row, token in zip(whole, draw_tokens(list(whole.values())), strict=True):
        tokens[row] = token
    return tokens


def _likeliest(logits: Tensor) -> list[int]:
    """The argmax of each row. On a CPU numpy's takes a tenth of torch's time."""
    best: list[int] = (logits.numpy() if logits.device.type == "cpu" else logits).argmax(-1).tolist()
    return best


def _on_host(logits: Tensor, rows: list[int]) -> Sequence[Row]:
    if logits.device.type == "cpu":
        host = logits.numpy()
        return [host[row] for row in rows]
    return list(logits[rows].cpu().numpy()) if rows else []


def _adjust(scores: Row, draw: Draw, mask: Mask | None) -> None:
    """Penalties, bias, and bans or the mask, in place."""
    params = draw.params
    if draw.seen:
        tokens, counts = np.frombuffer(draw.seen, np.int32), np.frombuffer(draw.counts, np.int32)
        seen = scores[tokens]
        if params.repetition_penalty != 1.0:
            seen = np.where(seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty)
        scores[tokens] = seen - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    if params.logit_bias:
        biased = [token for token, _ in params.logit_bias]
        scores[biased] += np.array([bias for _, bias in params.logit_bias], np.float32)
    if mask is not None:
        np.putmask(scores, ~unpacked(mask, len(scores)), -np.inf)
    elif draw.banned:
        scores[list(draw.banned)] = -np.inf


def filters(params: SamplingParams, vocab_size: int) -> bool:
    return params.min_p > 0 or params.top_p < 1.0 or 0 < params.top_k < vocab_size


def _floor(weights: Row, params: SamplingParams) -> float:
    """The least weight that the filters keep; the largest weight is 1."""
    if params.top_p < 1.0 or 0 < params.top_k < len(weights):
        return max(params.min_p, _ranked_floor(weights, params.top_k or len(weights), params.top_p))
    return params.min_p


def _ranked_floor(weights: Row, top_k: int, top_p: float) -> float:
    """The weight of the last token that top-k and top-p keep together.

    At a low temperature most weights are 0, and a partition with many equal numbers takes ten times as long: so it
    only gets the others.
    """
    count = min(top_k, len(weights))
    if count == len(weights):
        return _nucleus_floor(weights, top_p)
    present = weights if weights.min() > 0 else weights[weights > 0]
    if top_p == 1.0:
        return float(np.partition(present, -count)[-count]) if count <= len(present) else 0.0
    ranked = _descending(present, min(count, len(present)))
    mass = ranked.cumsum(dtype=np.float64)
    return float(ranked[mass.searchsorted(top_p * mass[-1])]) if len(mass) else 0.0


def _nucleus_floor(weights: Row, top_p: float) -> float:
    """The weight of the last token that top-p keeps."""
    total = float(weights.sum(dtype=np.float64))
    wanted = top_p * total
    # Together, the tokens below the first cut weigh less than what top_p leaves out.
    for cut in ((1 - top_p) * total / len(weights), 0.0):
        present = weights[weights > cut]
        for count in (_NEAR, len(present)):
            ranked = _descending(present, min(count, len(present)))
            mass = ranked.cumsum(dtype=np.float64)
            if len(mass) and mass[-1] >= wanted:
                return float(ranked[mass.searchsorted(wanted)])
    return float(weights.min())  # rounding of the sums: all tokens stay


def _descending(weights: Row, count: int) -> Row:
    """The largest `count` weights, largest first."""
    ranked = np.partition(weights, -count)[-count:] if count < len(weights) else weights.copy()
    ranked.sort()
    return ranked[::-1]


def _random_numbers(few: list[_Candidates], draws: Sequence[Draw]) -> list[NDArray[np.float64]]:
    """The random numbers of all rows' candidates, computed at once."""
    if not few:
        return []
    lengths = [len(each.tokens) for each in few]
    keys = np.array([(draws[each.row].seed, draws[each.row].position) for each in few], np.uint64)
    seeds, positions = np.repeat(keys, lengths, axis=0).T
    numbers = uniforms_of(seeds, positions, np.concatenate([each.tokens for each in few]))
    return np.split(numbers, np.cumsum(lengths)[:-1])


def score(logits: Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[TokenLogprobs]:
    """The log probability of tokens[i] under logits[i] [vocab], and those of the tops[i] likeliest tokens."""
    (chosen,) = to_device([np.array(tokens, np.int64)], logits.device)
    return as_logprobs(to_host(log_probabilities(logits.float(), chosen, max(tops))), tops)


def log_probabilities(logits: Tensor, tokens: Tensor, num_top: int) -> list[Tensor]:
    """Of tokens [rows] under logits [rows, vocab]: [rows]; the likeliest tokens, and theirs: [rows, num_top or 1]."""
    best = logits.topk(min(max(1, num_top), logits.shape[-1]), dim=-1)
    largest = best.values[:, :1]  # [rows, 1]; subtracted first, since float32 is more exact for small numbers
    rest = (logits - largest).exp_().sum(dim=-1, keepdim=True).log()
    chosen = logits.gather(-1, tokens[:, None]) - largest - rest
    return [chosen[:, 0], best.indices, best.values - largest - rest]


def as_logprobs(found: Sequence[Tensor], tops: Sequence[int]) -> list[TokenLogprobs]:
    """What `log_probabilities` found, on the host, with the tops[i] likeliest tokens of row i."""
    return [
        TokenLogprobs(own, tuple(zip(ids[:top], values[:top], strict=True)))
        for own, ids, values, top in zip(*(each.tolist() for each in found), tops, strict=True)
    ]
