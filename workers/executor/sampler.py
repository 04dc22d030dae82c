"""From logits to tokens, for a whole batch at once.

A draw depends on its own row, parameters, seed and position: never on its neighbours, on earlier draws, or on where it
runs. Each filter is a floor on the probability: a token stays when it is at least as likely as

    top_k   the k-th likeliest token
    top_p   the last token of the smallest set, likeliest first, whose mass reaches top_p (of what top_k left)
    min_p   min_p times the likeliest token

so tokens that tie at a floor stand or fall together. The kept tokens then run an exponential race (Gumbel-max): each
has a number of its own, from a Philox generator keyed by (seed, position), and the largest probability / number wins.
Noise in the last digits of the logits, or a doubtful token at a floor, changes the winner only if it is part of a
photo finish; an inverse CDF would shift the borders of all tokens behind it.

Sources: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011); Maddison et al., A* sampling (2014).
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.step import Draw
from workers.request import TokenLogprobs

# Below this the division leaves the range of float32; the likeliest token has all the mass long before.
_MIN_TEMPERATURE = 1e-6


def sample(logits: Tensor, draws: Sequence[Draw]) -> tuple[list[int], list[TokenLogprobs | None]]:
    """One token for each row of logits [draws, vocab], and log probabilities for the rows that want them."""
    assert logits.shape[0] == len(draws)
    if not draws:
        return [], []
    logits = logits.float()
    adjusted = _adjust(logits, draws)
    tokens = adjusted.argmax(dim=-1)
    drawn = [row for row, draw in enumerate(draws) if draw.params.temperature > 0]
    if drawn:
        rows = torch.tensor(drawn, device=logits.device)
        tokens[rows] = _draw(adjusted[rows], [draws[row] for row in drawn])
    chosen: list[int] = tokens.tolist()
    return chosen, _logprobs(logits, chosen, draws)


def race_times(seed: int, position: int, vocab_size: int) -> NDArray[np.float64]:
    """The exponential number [vocab_size] of each token for this seed and position, the same on every machine."""
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, position], dtype=np.uint64)))
    return np.maximum(-np.log1p(-generator.random(vocab_size)), np.finfo(np.float64).tiny)


def _adjust(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Logits after repetition penalties and bans; the same tensor when nobody asked for any."""
    changed = [row for row, draw in enumerate(draws) if draw.banned or draw.params.repetition_penalty != 1.0]
    if not changed:
        return logits
    logits = logits.clone()
    for row in changed:
        draw = draws[row]
        if draw.params.repetition_penalty != 1.0 and draw.history:
            seen = torch.tensor(sorted(set(draw.history)), device=logits.device)
            scores = logits[row, seen]
            penalty = draw.params.repetition_penalty
            logits[row, seen] = torch.where(scores > 0, scores / penalty, scores * penalty)
        if draw.banned:
            logits[row, list(draw.banned)] = -torch.inf
    return logits


def _draw(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Tokens [rows] from logits [rows, vocab], every row with a temperature above 0."""
    device = logits.device
    temperature = torch.tensor([max(draw.params.temperature, _MIN_TEMPERATURE) for draw in draws], device=device)
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature[:, None]
    probabilities = scaled.softmax(dim=-1)  # [rows, vocab]
    floor = _floor(probabilities, draws)
    kept = torch.where(probabilities >= floor[:, None], probabilities, 0.0).double()
    times = np.stack([race_times(draw.seed, draw.position, logits.shape[-1]) for draw in draws])
    return (kept / torch.from_numpy(times).to(device)).argmax(dim=-1)


def _floor(probabilities: Tensor, draws: Sequence[Draw]) -> Tensor:
    """The least probability [rows] that each row's filters keep."""
    vocab_size = probabilities.shape[-1]
    min_p = torch.tensor([draw.params.min_p for draw in draws], device=probabilities.device)
    floor = probabilities.amax(dim=-1) * min_p
    filtered = [row for row, draw in enumerate(draws) if 0 < draw.params.top_k < vocab_size or draw.params.top_p < 1.0]
    if filtered:
        rows = torch.tensor(filtered, device=probabilities.device)
        ranked = _ranked_floor(probabilities[rows], [draws[row] for row in filtered])
        floor[rows] = torch.maximum(floor[rows], ranked)
    return floor


def _ranked_floor(probabilities: Tensor, draws: Sequence[Draw]) -> Tensor:
    """The floors [rows] of top-k and top-p, for rows that have at least one of them."""
    vocab_size, device = probabilities.shape[-1], probabilities.device
    limits = [min(draw.params.top_k or vocab_size, vocab_size) for draw in draws]
    last = torch.tensor(limits, device=device)[:, None] - 1  # rank of the k-th token
    top_p = torch.tensor([[draw.params.top_p] for draw in draws], dtype=torch.float64, device=device)
    ranked = _descending(probabilities)
    mass = ranked.cumsum(dim=-1, dtype=torch.float64)
    nucleus = torch.searchsorted(mass, top_p * mass.gather(-1, last))  # the first rank that reaches what is wanted
    return ranked.gather(-1, torch.minimum(nucleus, last))[:, 0]


def _descending(probabilities: Tensor) -> Tensor:
    """Each row, likeliest first. On a CPU numpy's vectorised sort takes a tenth of torch's time."""
    if probabilities.device.type != "cpu":
        return probabilities.sort(dim=-1, descending=True).values
    return torch.from_numpy(np.sort(probabilities.numpy(), axis=-1)).flip(-1)


def _logprobs(logits: Tensor, tokens: Sequence[int], draws: Sequence[Draw]) -> list[TokenLogprobs | None]:
    """From the raw logits, before temperature, penalties and filters."""
    answers: list[TokenLogprobs | None] = [None] * len(draws)
    for row, draw in enumerate(draws):
        if draw.params.logprobs is None:
            continue
        logprobs = logits[row].log_softmax(dim=-1)  # [vocab]
        best = logprobs.topk(min(draw.params.logprobs, logprobs.shape[0]))
        top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        answers[row] = TokenLogprobs(float(logprobs[tokens[row]]), top)
    return answers
