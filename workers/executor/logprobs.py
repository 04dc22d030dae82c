"""Log probabilities of tokens under logits."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from workers.ops.staging import to_device, to_host
from workers.request import TokenLogprobs


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
