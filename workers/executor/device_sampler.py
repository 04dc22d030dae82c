"""Samples on a GPU the tokens that `sampler` samples on the host, with one synchronization for all rows.

Penalties, bias, bans, argmax, filters, Gumbel-max and log probabilities are computed on the device, for all rows at
once. A result that is too close, or a token in the rounding of a filter's floor, goes to the host's sampler, which
copies its row: about one row in ten thousand.
"""

import functools
import logging
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.step import Draw
from workers.executor.grammar_masks import Allowed
from workers.executor.gumbel_max import MIN_TEMPERATURE
from workers.executor.sampler import NOTHING, as_logprobs, filters, log_probabilities, sample, sample_finite
from workers.ops.staging import to_device, to_host
from workers.request import SamplingParams, TokenLogprobs

logger = logging.getLogger(__name__)

Sampled = tuple[list[int | None], list[TokenLogprobs | None]]
Tables = dict[str, NDArray[np.number]]
Moved = dict[str, Tensor]


def sample_rows(logits: Tensor, draws: Sequence[Draw], allowed: Allowed = NOTHING) -> Sampled:
    """As `sample_finite`, on the logits' device if that works there; the first call may compile."""
    return _sampler(logits.device, logits.dtype, logits.shape[-1])(logits, draws, allowed)


@functools.cache
def _sampler(
    device: torch.device, dtype: torch.dtype, vocab_size: int
) -> Callable[[Tensor, Sequence[Draw], Allowed], Sampled]:
    return sample_on_device if device.type == "cuda" and agree(device, dtype, vocab_size) else sample_finite


def agree(device: torch.device, dtype: torch.dtype, vocab_size: int) -> bool:
    """Whether device and host sample the same tokens. Launches every kernel that a draw may need."""
    return all(_agrees(device, each, vocab_size) for each in {dtype, torch.float32})  # penalties make it float32


def _agrees(device: torch.device, dtype: torch.dtype, vocab_size: int) -> bool:
    """Whether `sample_on_device` runs here and takes the host's tokens: plain, with filters, and with a mask too."""
    logits = (3 * torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(0))).to(dtype)
    plain = [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(temperature=0.7)]
    filtered = [SamplingParams(top_p=0.9), SamplingParams(top_k=50), SamplingParams(min_p=0.1)]
    try:
        mask = {1: np.full(-(-vocab_size // 32), 0x5A5A5A5A, np.int32)}
        for params, masks in ((plain, NOTHING), (plain + filtered, NOTHING), (plain + filtered, mask)):
            draws = [Draw(each, 2**64 - 1, position) for position, each in enumerate(params)]
            rows = logits[: len(draws)]
            if sample_on_device(rows.to(device), draws, masks)[0] != sample(rows, draws, masks)[0]:
                logger.warning("sampling gives wrong tokens on %s; tokens are sampled on the host", device)
                return False
    except Exception as error:
        logger.warning("sampling does not work on %s: %s; tokens are sampled on the host", device, error)
        return False
    return True


def sample_on_device(logits: Tensor, draws: Sequence[Draw], allowed: Allowed = NOTHING) -> Sampled:
    """As `sample_finite`, for logits [draws, vocab] on the device."""
    tables = _tables(draws, logits.shape[-1], allowed)
    moved = dict(zip(tables, to_device(list(tables.values()), logits.device), strict=True))
    chosen = _choose(_adjusted(logits, moved), draws, moved)
    tops = [draw.params.logprobs for draw in draws if draw.params.logprobs is not None]
    scored = []
    if tops:
        rows = moved["scored"]
        scored = log_probabilities(logits[rows].float(), chosen[0, rows], max(tops))
    on_host = to_host([chosen, *scored])  # the only synchronization
    tokens, finite, certain = on_host[0].tolist()

    logprobs: list[TokenLogprobs | None] = [None] * len(draws)
    if tops:
        each_logprobs = iter(as_logprobs(on_host[1:], tops))
        logprobs = [next(each_logprobs) if draw.params.logprobs is not None else None for draw in draws]
    if not all(certain) and (close := [row for row in range(len(draws)) if finite[row] and not certain[row]]):
        masks = {place: allowed[row] for place, row in enumerate(close) if row in allowed}
        again = sample(torch.stack([logits[row] for row in close]).cpu(), [draws[row] for row in close], masks)
        for row, token, found in zip(close, *again, strict=True):
            tokens[row], logprobs[row] = token, found
    if all(finite):
        return tokens, logprobs
    return (
        [token if real else None for token, real in zip(tokens, finite, strict=True)],
        [found if real else None for found, real in zip(logprobs, finite, strict=True)],
    )


def _tables(draws: Sequence[Draw], vocab_size: int, allowed: Allowed = NOTHING) -> Tables:
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
    if banned := [(row, token) for row, draw in enumerate(draws) for token in draw.banned if row not in allowed]:
        tables["banned"] = np.array(banned).T.copy()
    if allowed:
        tables["masked"] = np.array(list(allowed))
        tables["masks"] = np.stack(list(allowed.values()))
    if any(filters(each, vocab_size) for each in params):
        top_k = [each.top_k if 0 < each.top_k < vocab_size else vocab_size for each in params]
        top_p = [each.top_p for each in params]
        min_p = np.array([each.min_p for each in params], np.float32)  # as numpy compares it
        tables["filters"] = np.array([top_k, top_p, min_p])
    return tables


def _adjusted(logits: Tensor, moved: Moved) -> Tensor:
    """Penalties, bias, bans and masks, rounded as numpy rounds them on the host."""
    if moved.keys().isdisjoint({"seen", "biased", "banned", "masked"}):
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
    if "masked" in moved:
        bits = torch.arange(32, dtype=torch.int32, device=scores.device)
        is_allowed = (moved["masks"][:, :, None] >> bits & 1).flatten(1)[:, : scores.shape[1]].bool()
        rows = moved["masked"]
        scores[rows] = scores[rows].masked_fill(~is_allowed, torch.finfo(torch.float32).min)
    return scores


def _choose(scores: Tensor, draws: Sequence[Draw], moved: Moved) -> Tensor:
    """[3, rows] int64: each row's token, whether it is finite, and whether the token is the host's for certain."""
    from workers.ops.triton_filters import filter_bounds  # only where Triton is installed
    from workers.ops.triton_sampling import choose, summarize

    summary, keys = summarize(scores), moved["keys"]
    bounds = filter_bounds(scores, summary.largest, keys, moved["filters"]) if "filters" in moved else None
    return choose(scores, summary, keys, bounds, greedy=all(draw.params.temperature == 0 for draw in draws))
