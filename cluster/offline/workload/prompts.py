"""A workload's requests with token ids for prompts. Equal blocks get equal tokens, and nothing else is alike.

    tokens of a stretch     [ its number in base vocab_size - 3, lowest digit first | ordinary tokens ]

A stretch is a block that a prefix names, or what a prompt has behind these. Its number says which, so that two
stretches differ within their first few tokens (5 for vocabularies above 22,000) without any chance in it; the rest is a
slice of a fixed table, which makes a prompt of 12,000 tokens a matter of copying references.
"""

import random
from functools import lru_cache

from cluster.offline.workload.arrivals import Workload, WorkloadError
from workers.request import SLO, Request, SamplingParams

FIRST_TOKEN = 3  # the tokens below often end a text
_TABLE_TOKENS = 1 << 16
_NUMBERS = 2**72  # above twice any block's id or request's index
_STRIDE = 40_503  # odd: neighbours' slices begin far apart, and every place in the table is used
_NO_SLO = SLO()


def prompt_tokens(workload: Workload, index: int, vocab_size: int) -> tuple[int, ...]:
    """The prompt of request `index`, from `FIRST_TOKEN` on and below `vocab_size`.

    Two prompts begin with the same tokens as far as their prefixes name the same blocks. The last block of a prompt
    may be too short to tell it from others: with very few tokens there are only so many prompts.
    """
    arrival = workload.arrivals[index]
    size, wanted = workload.block_tokens, arrival.prompt_tokens
    tokens: list[int] = []
    for block in arrival.prefix:
        tokens += _stretch(2 * block, min(size, wanted - len(tokens)), vocab_size)
    if len(tokens) < wanted:
        tokens += _stretch(2 * index + 1, wanted - len(tokens), vocab_size)
    return tuple(tokens)


def request(workload: Workload, index: int, vocab_size: int, *, slo: SLO = _NO_SLO, seed: int = 0) -> Request:
    """Greedy, and with exactly as many output tokens as the workload says: no end token ends it sooner."""
    arrival = workload.arrivals[index]
    sampling = SamplingParams(temperature=0.0, seed=seed, max_tokens=arrival.output_tokens, ignore_eos=True)
    prompt = prompt_tokens(workload, index, vocab_size)
    return Request(f"w-{index}", prompt, sampling, slo, session=arrival.session)


def _stretch(number: int, count: int, vocab_size: int) -> list[int]:
    table, width = _table(vocab_size)
    if not 0 <= number < _NUMBERS:
        raise WorkloadError(f"a prefix block's id is {number // 2}; ids must be 0 to {_NUMBERS // 2 - 1}")
    base, rest = vocab_size - FIRST_TOKEN, number
    tokens = []
    for _ in range(width):
        rest, digit = divmod(rest, base)
        tokens.append(FIRST_TOKEN + digit)
    begin = number * _STRIDE % _TABLE_TOKENS
    while len(tokens) < count:
        tokens += table[begin : begin + count - len(tokens)]
        begin = 0
    return tokens[:count]


@lru_cache(maxsize=4)
def _table(vocab_size: int) -> tuple[list[int], int]:
    """Ordinary tokens, twice in a row, so that a slice may begin anywhere; and how many digits a number has."""
    base = vocab_size - FIRST_TOKEN
    if base < 2:
        raise WorkloadError(
            f"a vocabulary of {vocab_size} tokens is too small; prompts need at least {FIRST_TOKEN + 2}"
        )
    width, reach = 0, 1
    while reach < _NUMBERS:
        width, reach = width + 1, reach * base
    once = random.Random("prompt tokens").choices(range(FIRST_TOKEN, vocab_size), k=_TABLE_TOKENS)
    return once + once, width
