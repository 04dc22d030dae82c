"""Samples on a GPU the tokens that `sampler` samples on the host, with one synchronization for all rows.

Penalties, bias, bans, argmax, Gumbel-max and log probabilities are computed on the device for all rows at once. Filters
become bounds on a row's scores. The device's weights differ from numpy's by rounding, so there are two bounds: tokens
from `sure` on pass the filters, those below `lowest` do not. A result that is too close, or a token between the bounds,
goes to the host's sampler, which copies its row: about one row in ten thousand.
"""

import functools
import logging
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.step import Draw
from workers.executor.gumbel_max import MIN_TEMPERATURE
from workers.executor.logprobs import as_logprobs, log_probabilities
from workers.executor.sampler import sample, sample_finite
from workers.ops.staging import to_device, to_host
from workers.request import SamplingParams, TokenLogprobs

logger = logging.getLogger(__name__)

Sampled = tuple[list[int | None], list[TokenLogprobs | None]]
Tables = dict[str, NDArray[np.number]]
Moved = dict[str, Tensor]

_ROUNDING = 1e-6  # of a weight; more than float32 exponentials of two libraries differ
_MASS_ROUNDING = 1e-5  # of the mass of a row's likeliest tokens
_SORTED_ROWS = 32  # at a time: bounds the memory for sorted rows


@functools.cache
def sampler_on(device: torch.device) -> Callable[[Tensor, Sequence[Draw]], Sampled]:
    """The fastest sampler that works on the device; the first call may compile."""
    return sample_on_device if device.type == "cuda" and _agrees(device) else sample_finite


def _agrees(device: torch.device) -> bool:
    """Whether `sample_on_device` runs here and takes the host's tokens."""
    logits = 3 * torch.randn(10, 3000, generator=torch.Generator().manual_seed(0))
    filters = [SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(top_k=50), SamplingParams(min_p=0.1)]
    params = [SamplingParams(temperature=0.0), *filters]
    draws = [Draw(each, 2**64 - 1, position) for position in range(2) for each in params]
    try:
        tokens, _ = sample_on_device(logits.to(device), draws)
    except Exception as error:
        logger.warning("sampling does not work on %s: %s; tokens are sampled on the host", device, error)
        return False
    if tokens == sample(logits, draws)[0]:
        return True
    logger.warning("sampling gives wrong tokens on %s; tokens are sampled on the host", device)
    return False


def sample_on_device(logits: Tensor, draws: Sequence[Draw]) -> Sampled:
    """As `sample_finite`, for logits [draws, vocab] on the device."""
    if all(draw.params.temperature == 0 and draw.params.logprobs is None and not draw.adjusts for draw in draws):
        return _greedy(logits), [None] * len(draws)
    tables = _tables(draws, logits.shape[-1])
    moved = dict(zip(tables, to_device(list(tables.values()), logits.device), strict=True))
    chosen = _choose(_adjusted(logits, moved), draws, moved)
    tops = [draw.params.logprobs for draw in draws if draw.params.logprobs is not None]
    scored = []
    if tops:
        rows = moved["scored"]
        scored = log_probabilities(logits[rows].float(), chosen[0, rows], max(tops))
    on_host = to_host([chosen, *scored])  # the only synchronization
    tokens, finite, certain = on_host[0].tolist()

    each_logprobs = iter(as_logprobs(on_host[1:], tops) if tops else ())
    logprobs = [next(each_logprobs) if draw.params.logprobs is not None else None for draw in draws]
    close = [row for row, draw in enumerate(draws) if finite[row] and not certain[row]]
    if close:
        again = sample(torch.stack([logits[row] for row in close]).cpu(), [draws[row] for row in close])
        for row, token, found in zip(close, *again, strict=True):
            tokens[row], logprobs[row] = token, found
    if all(finite):
        return tokens, logprobs
    return (
        [token if real else None for token, real in zip(tokens, finite, strict=True)],
        [found if real else None for found, real in zip(logprobs, finite, strict=True)],
    )


def _greedy(logits: Tensor) -> list[int | None]:
    from workers.ops.triton_argmax import likeliest  # only where Triton is installed

    tokens, finite = (each.tolist() for each in to_host(likeliest(logits)))
    return [token if real else None for token, real in zip(tokens, finite, strict=True)]


def _tables(draws: Sequence[Draw], vocab_size: int) -> Tables:
    """The parameters that the device needs, by name; those of no row are left out."""
    params = [draw.params for draw in draws]
    temperatures = [max(each.temperature, MIN_TEMPERATURE) if each.temperature > 0 else 0.0 for each in params]
    seeds, positions = [draw.seed for draw in draws], [draw.position for draw in draws]
    keys = np.array([[0] * len(draws), seeds, positions], np.uint64)
    keys[0] = np.array(temperatures).view(np.uint64)
    tables: Tables = {"keys": keys.view(np.int64)}
    if scored := [row for row, each in enumerate(params) if each.logprobs is not None]:
        tables["scored"] = np.array(scored)
    if any(draw.seen for draw in draws):
        seen = [np.frombuffer(draw.seen, np.int32) for draw in draws]
        tables["seen"] = np.stack(
            [np.repeat(np.arange(len(draws)), [len(each) for each in seen]), np.concatenate(seen)]
        )
        tables["counts"] = np.concatenate([np.frombuffer(draw.counts, np.int32) for draw in draws])
        tables["penalties"] = np.array(
            [(each.repetition_penalty, each.frequency_penalty, each.presence_penalty) for each in params]
        )
    if biased := [(row, *bias) for row, each in enumerate(params) for bias in each.logit_bias]:
        tables["biased"] = np.array([(row, token) for row, token, _ in biased]).T.copy()
        tables["bias"] = np.array([bias for _, _, bias in biased], np.float32)
    if banned := [(row, token) for row, draw in enumerate(draws) for token in draw.banned]:
        tables["banned"] = np.array(banned).T.copy()
    filtered = [each if each.temperature > 0 else SamplingParams() for each in params]
    if any(each.min_p > 0 for each in filtered):
        tables["min_p"] = np.array([each.min_p for each in filtered], np.float32)
    tops = [(each.top_k if 0 < each.top_k < vocab_size else vocab_size, each.top_p) for each in filtered]
    if ranked := [row for row, (top_k, top_p) in enumerate(tops) if top_k < vocab_size or top_p < 1.0]:
        tables["ranked"] = np.array(ranked)
        tables["top_k"] = np.array([tops[row][0] for row in ranked])
        tables["top_p"] = np.array([tops[row][1] for row in ranked])
    return tables


def _adjusted(logits: Tensor, moved: Moved) -> Tensor:
    """Penalties, bias and bans, rounded as numpy rounds them on the host."""
    if moved.keys().isdisjoint({"seen", "biased", "banned"}):
        return logits
    scores = logits.to(torch.float32, copy=True)
    if "seen" in moved:
        rows, tokens = at = tuple(moved["seen"])
        repetition, frequency, presence = moved["penalties"][rows].unbind(1)
        repetition, counts, seen = repetition.float(), moved["counts"], scores[rows, tokens]
        seen = torch.where(seen > 0, seen / repetition, seen * repetition)
        adjusted = seen - frequency * counts - presence * (counts > 0)  # in float64
        scores.index_put_(at, adjusted.float())
    if "biased" in moved:
        at = tuple(moved["biased"])
        scores.index_put_(at, scores[at] + moved["bias"])
    if "banned" in moved:
        # The least finite number: a row with an infinity counts as broken.
        least = scores.new_full(moved["banned"].shape[1:], torch.finfo(torch.float32).min)
        scores.index_put_(tuple(moved["banned"]), least)
    return scores


def _choose(scores: Tensor, draws: Sequence[Draw], moved: Moved) -> Tensor:
    """[3, rows] int64: each row's token, whether it is finite, and whether the token is the host's for certain."""
    from workers.ops.triton_sampling import choose, summarize  # only where Triton is installed

    summary, bounds = summarize(scores), None
    if not moved.keys().isdisjoint({"min_p", "ranked"}):
        bounds = _bounds(scores, summary.largest.amax(-1).double(), moved)
    return choose(scores, summary, moved["keys"], bounds, greedy=all(draw.params.temperature == 0 for draw in draws))


def _bounds(scores: Tensor, most: Tensor, moved: Moved) -> Tensor:
    """[2, rows] in float64: tokens with a score below the first are filtered, from the second on none is."""
    temperature = moved["keys"][0].view(torch.float64)
    bounds = torch.full((2, len(scores)), -torch.inf, dtype=torch.float64, device=scores.device)
    if "min_p" in moved:
        below = temperature * moved["min_p"].double().clamp(min=1e-300).log()  # 0 filters nothing
        margin = _margin(most + below, most, temperature)
        bounds = torch.stack([most + below - margin, torch.minimum(most + below + margin, most)])
    if "ranked" in moved:
        rows = moved["ranked"]
        parts = (torch.split(each, _SORTED_ROWS) for each in (rows, moved["top_k"], moved["top_p"]))
        ranked = [
            _ranked_bounds(scores[part], most[part], temperature[part], top_k, top_p)
            for part, top_k, top_p in zip(*parts, strict=True)
        ]
        bounds.index_copy_(1, rows, torch.maximum(bounds[:, rows], torch.cat(ranked, dim=1)))
    return bounds


def _ranked_bounds(scores: Tensor, most: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The bounds by top-k and top-p together. A token that ties with the last one that they keep stays, too."""
    ranked = scores.sort(dim=-1, descending=True).values
    mass = ((ranked.double() - most[:, None]) / temperature[:, None]).exp_()  # in float64
    mass.masked_fill_(torch.arange(ranked.shape[1], device=ranked.device) >= top_k[:, None], 0.0)
    mass = mass.cumsum(-1)
    wanted, last = top_p * mass[:, -1], top_k - 1

    def score_at(share: float) -> Tensor:
        at = torch.searchsorted(mass, (wanted * share)[:, None])[:, 0]
        at = torch.where(top_p < 1.0, torch.minimum(at, last), last)
        return ranked.gather(1, at[:, None])[:, 0].double()

    least = score_at(1 + _MASS_ROUNDING)
    return torch.stack([least - _margin(least, most, temperature), score_at(1 - _MASS_ROUNDING)])


def _margin(scores: Tensor, most: Tensor, temperature: Tensor) -> Tensor:
    """How far apart two scores are if the host's rounding may make their weights equal."""
    return _ROUNDING * (temperature + (scores - most).abs())
