"""Generates the prompts of a workload as token ids. Equal prefix blocks get equal tokens; all other tokens differ.

    tokens of a segment     [ its number in base vocab_size - 3, lowest digit first | ordinary tokens ]

A segment is a named prefix block, or the rest of a prompt after its named blocks. It begins with its number, so two
segments always differ within their first tokens (5 for vocabularies above 22,000). The rest is a slice of a fixed
table, so long prompts are cheap.
"""

import random
from functools import lru_cache

from cluster.offline.workload.arrivals import Workload, WorkloadError
from workers.request import SLO, Request, SamplingParams

FIRST_TOKEN = 3  # tokens below are often end-of-sequence tokens
_TABLE_TOKENS = 1 << 16
_NUMBERS = 2**72  # more than twice any block id or request index
_STRIDE = 40_503  # odd, so that consecutive slices begin far apart and the whole table is used
_NO_SLO = SLO()


def prompt_tokens(workload: Workload, index: int, vocab_size: int) -> tuple[int, ...]:
    """The prompt of request `index`: token ids from `FIRST_TOKEN` to below `vocab_size`.

    Two prompts share the tokens of their common leading prefix blocks. Prompts of very few tokens may be equal by
    chance.
    """
    arrival = workload.arrivals[index]
    size, wanted = workload.block_tokens, arrival.prompt_tokens
    tokens: list[int] = []
    for block in arrival.prefix:
        tokens += _segment(2 * block, min(size, wanted - len(tokens)), vocab_size)
    if len(tokens) < wanted:
        tokens += _segment(2 * (index - arrival.sample) + 1, wanted - len(tokens), vocab_size)
    return tuple(tokens)


def request(workload: Workload, index: int, vocab_size: int, *, slo: SLO = _NO_SLO, seed: int = 0) -> Request:
    """A greedy request that generates exactly the workload's number of output tokens (`ignore_eos`).

    One of several answers to a prompt is a request of their `group`, as `cluster.frontend.parallel_sampling` makes it.
    """
    arrival = workload.arrivals[index]
    first = index - arrival.sample
    group = f"w-{first}" if workload.num_answers(first) > 1 else ""
    prompt, sampling = prompt_tokens(workload, index, vocab_size), _sampling(arrival.output_tokens, seed)
    return Request(f"w-{index}", prompt, sampling, slo, session=arrival.session, group=group)


@lru_cache(maxsize=4096)
def _sampling(max_tokens: int, seed: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, seed=seed, max_tokens=max_tokens, ignore_eos=True)


def _segment(number: int, count: int, vocab_size: int) -> list[int]:
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
    """The table of ordinary tokens, repeated once so that a slice can begin anywhere; and the digits of a number."""
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
