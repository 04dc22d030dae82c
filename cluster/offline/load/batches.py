"""A sweep over static batches: each size sent at once, again and again, sizes in turn. Knows an endpoint."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from cluster.offline.load.endpoint import Endpoint
from cluster.offline.load.sending import LoadOptions, nothing
from cluster.offline.scoring.batches import Batch, BatchFigures, batch, batch_figures
from cluster.offline.workload.arrivals import Workload, WorkloadError
from cluster.offline.workload.changes import told_apart
from cluster.offline.workload.load import load_workload

MOST = 4096  # requests of one batch
SEEDS_OF_RUNS = 1024  # numbers of runs under one seed


@dataclass(frozen=True, slots=True)
class Sweep:
    """Which sizes, how often each, and what lengths the requests have (as `load_workload` reads them)."""

    sizes: tuple[int, ...]
    repeats: int
    lengths: str
    seed: int

    @property
    def turns(self) -> tuple[int, ...]:
        """The sizes in the order in which they are sent."""
        return self.repeats * self.sizes

    def workload(self, size: int, turn: int) -> Workload:
        """Of the same seed and size always the same lengths, at every turn other prompts."""
        made = load_workload(f"burst:count={size},lengths={self.lengths}", seed=self.seed)
        return told_apart(made, number_of(self.seed, turn))


def number_of(seed: int, turn: int) -> int:
    """By which a run's prompts are told apart from those of other turns and seeds."""
    return (seed % 2**19) * SEEDS_OF_RUNS + turn % SEEDS_OF_RUNS


def sizes_of(text: str) -> tuple[int, ...]:
    """`1,2,8` as it stands, `1..128` as 1, 2, 4, … 128. Raises `WorkloadError`."""
    first, doubled, last = text.partition("..")
    try:
        if not doubled:
            found = [int(each) for each in text.split(",")]
        else:
            begin, end = int(first), int(last)
            doubled_up = [begin << power for power in range(MOST.bit_length()) if begin << power < end]
            found = [*doubled_up, end] if 1 <= begin <= end else []
    except ValueError:
        raise WorkloadError(f"--batches is {text!r}; write sizes with commas (1,2,4) or from..to (1..128)") from None
    if not found or not all(1 <= size <= MOST for size in found) or sorted(set(found)) != found:
        raise WorkloadError(f"--batches is {text!r}; sizes rise, from 1 to {MOST}")
    return tuple(found)


async def sweep(
    endpoint: Endpoint, wanted: Sweep, load: LoadOptions, done: Callable[[int], object]
) -> tuple[BatchFigures, ...]:
    """All sizes once, then all again: what slows the machine down for a while slows every size. `done`: batches."""
    all_at_once = replace(load, most_in_flight=max(wanted.sizes), concurrency=None)
    batches: dict[int, list[Batch]] = {size: [] for size in wanted.sizes}
    for turn, size in enumerate(wanted.turns):
        run = await endpoint.drive(wanted.workload(size, turn), all_at_once, nothing)
        batches[size].append(batch(run))
        done(turn + 1)
    return tuple(batch_figures(each) for each in batches.values())
