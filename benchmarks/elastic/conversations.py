"""Synthetic conversations about long documents: each turn's prompt begins with the whole conversation so far. Seeded.

Held out: nothing was tuned on it. As in Mooncake's conversation trace, prompts are long, most of them cacheable, and
some answers are very short.
"""

import random

from cluster.offline.workload.arrivals import Arrival, Workload

BLOCK = 512  # tokens of a prefix block
SYSTEMS, SYSTEM_BLOCKS = 4, 4  # shared system prompts
DOCUMENT = (1_000, 24_000)  # tokens of the first prompt's document
QUESTION = (30, 600)
ANSWER, SHORT_ANSWER, SHORT = (50, 600), (2, 25), 0.2  # tokens, and the share of short ones
TURNS, THINKING_S = 4.0, 30.0  # means
MAX_TOKENS = 32_000


def conversations(name: str, seconds: float, rate: float, seed: int) -> Workload:
    """`rate` new conversations per second; earlier ones are in progress at the start."""
    source = random.Random(f"{name}, {seed}")
    arrivals: list[Arrival] = []
    at_s, block = -3.0 * TURNS * THINKING_S, SYSTEMS * SYSTEM_BLOCKS
    while (at_s := at_s + source.expovariate(rate)) < seconds:
        turns = _turns(source, at_s, block)
        block += MAX_TOKENS // BLOCK
        arrivals += [each for each in turns if 0.0 <= each.at_s < seconds]
    arrivals.sort(key=lambda each: each.at_s)
    return Workload(name, tuple(arrivals), BLOCK, (f"{len(arrivals)} turns of conversations (seed {seed})",))


def _turns(source: random.Random, begin_s: float, first_block: int) -> list[Arrival]:
    """`first_block`: the first block id that is not shared."""
    system = source.randrange(SYSTEMS) * SYSTEM_BLOCKS
    context = SYSTEM_BLOCKS * BLOCK + source.randint(*DOCUMENT)
    turns: list[Arrival] = []
    at_s = begin_s
    while True:
        prompt = context + source.randint(*QUESTION)
        answer = source.randint(*(SHORT_ANSWER if source.random() < SHORT else ANSWER))
        if prompt + answer > MAX_TOKENS:
            return turns
        own = prompt // BLOCK - SYSTEM_BLOCKS
        prefix = (*range(system, system + SYSTEM_BLOCKS), *range(first_block, first_block + own))
        turns.append(Arrival(at_s, prompt, answer, prefix))
        if source.random() < 1.0 / TURNS:
            return turns
        context, at_s = prompt + answer, at_s + source.expovariate(1.0 / THINKING_S)
