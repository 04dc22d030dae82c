"""SLO attainment where there is room to spare: windows of Mooncake's trace, far below full load.

    python -m benchmarks.elastic.light_load [SCALE]

No search and no setting of ours was tuned on the last five windows.
"""

import sys

from benchmarks.elastic.contenders import OURS, Contender, contender_named
from benchmarks.elastic.probe import ScenarioProbe
from benchmarks.elastic.scenarios import ScenarioSize, mooncake

SCALE = 0.6
BEGINS_S = (600.0, 1350.0, 2100.0, 2700.0, 300.0, 975.0, 1725.0, 2400.0, 3000.0)
SEEDS = (0, 1, 2)
CONTENDERS = (OURS, contender_named("split 3, chunk 1024"), contender_named("colocated, chunk 1024"))


def missed(contender: Contender, begin_s: float, seed: int, scale: float = SCALE) -> tuple[int, int]:
    """Requests of one window that miss an SLO, and all of its requests. Raises `TraceNotFound` without the trace."""
    scenario = mooncake(ScenarioSize(workers=4), begin_s)
    probe = ScenarioProbe(contender, scenario, give_up=None)
    count = len(scenario.draw(scale, seed).arrivals)
    return round((1.0 - probe(scale * scenario.rate, seed).both) * count), count


def main(scale: float) -> None:
    for contender in CONTENDERS:
        totals = [0, 0]
        for begin_s in BEGINS_S:
            runs = [missed(contender, begin_s, seed, scale) for seed in SEEDS]
            totals = [totals[0] + sum(late for late, _ in runs), totals[1] + sum(count for _, count in runs)]
            print(f"{contender.name}, from {begin_s:.0f} s: {', '.join(f'{late} of {count}' for late, count in runs)}")
        late, count = totals
        share = 1.0 - late / count
        print(f"{contender.name} at {scale:g}: {late} of {count} requests miss, {share:.2%} meet both SLOs")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else SCALE)
