"""Lengths like those of ShareGPT in DistServe's runs of OPT-13B, which the project does not carry.

Tenths of the prompts and answers of the first 219 requests of `opt-13b-sharegpt-workload/distserve-300-3.exp` in
DistServe's repository (simdistserve, Apache-2.0): means 778 and 178, correlation -0.15. Drawn apart, evenly in between.
"""

import random
from collections.abc import Sequence

from cluster.offline.workload.arrivals import Arrival, Workload

PROMPTS = (9, 91, 270, 387, 552, 740, 863, 1043, 1336, 1516, 2003)
ANSWERS = (2, 7, 12, 20, 34, 66, 149, 235, 336, 481, 923)
COUNT = 2000


def _draw(tenths: Sequence[int], source: random.Random) -> int:
    tenth = source.randrange(10)
    return source.randint(tenths[tenth], tenths[tenth + 1])


def workload() -> Workload:
    source = random.Random("ShareGPT")
    pairs = [(_draw(PROMPTS, source), _draw(ANSWERS, source)) for _ in range(COUNT)]
    return Workload("ShareGPT-like", tuple(Arrival(float(at), *pair) for at, pair in enumerate(pairs)))
