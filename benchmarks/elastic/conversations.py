"""Conversations about long documents, whose turns begin with all that was said: shared prefixes, drawn from a seed.

Held out: nothing was tuned on it. Like Mooncake's conversation trace it has long prompts, most of which a cache may
hold, and answers of which some are very short.
"""

import random

from cluster.offline.workload.arrivals import Arrival, Workload

BLOCK = 512  # tokens of a prefix block
SYSTEMS, SYSTEM_BLOCKS = 4, 4  # system prompts that conversations have in common
DOCUMENT = (1_000, 24_000)  # tokens of what the first prompt brings along
QUESTION = (30, 600)
ANSWER, SHORT_ANSWER, SHORT = (50, 600), (2, 25), 0.2  # tokens, and the share of short ones
TURNS, THINKING_S = 4.0, 30.0  # in the mean
MOST_TOKENS = 32_000


def conversations(name: str, seconds: float, rate: float, seed: int) -> Workload:
    """So many new conversations a second; those that began before are under way at the start."""
    source = random.Random(f"{name}, {seed}")
    arrivals: list[Arrival] = []
    at_s, block = -3.0 * TURNS * THINKING_S, SYSTEMS * SYSTEM_BLOCKS
    while (at_s := at_s + source.expovariate(rate)) < seconds:
        turns = _turns(source, at_s, block)
        block += MOST_TOKENS // BLOCK
        arrivals += [each for each in turns if 0.0 <= each.at_s < seconds]
    arrivals.sort(key=lambda each: each.at_s)
    return Workload(name, tuple(arrivals), BLOCK, (f"{len(arrivals)} turns of conversations (seed {seed})",))


def _turns(source: random.Random, begin_s: float, first_block: int) -> list[Arrival]:
    """`first_block`: the first id of its own."""
    system = source.randrange(SYSTEMS) * SYSTEM_BLOCKS
    said = SYSTEM_BLOCKS * BLOCK + source.randint(*DOCUMENT)
    turns: list[Arrival] = []
    at_s = begin_s
    while True:
        prompt = said + source.randint(*QUESTION)
        answer = source.randint(*(SHORT_ANSWER if source.random() < SHORT else ANSWER))
        if prompt + answer > MOST_TOKENS:
            return turns
        own = prompt // BLOCK - SYSTEM_BLOCKS
        prefix = (*range(system, system + SYSTEM_BLOCKS), *range(first_block, first_block + own))
        turns.append(Arrival(at_s, prompt, answer, prefix))
        if source.random() < 1.0 / TURNS:
            return turns
        said, at_s = prompt + answer, at_s + source.expovariate(1.0 / THINKING_S)
