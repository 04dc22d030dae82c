"""The grid of the study: who is compared, under which lengths and loads; each cell computed in virtual time.

Deterministic: the same cost model gives the same figures. Knows how cells are computed, not how they are shown.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

from benchmarks.study.answers import Figures, Run, figures, run
from benchmarks.study.virtual import END, Arrival, replay
from benchmarks.study.workload import LONGEST_ANSWER, MIXES, Asked, asked
from kvtransfer.open import RESERVED_BLOCKS
from workers.config import EngineConfig
from workers.costs import CostModel
from workers.engine.engine import Engine
from workers.engine.estimate import plan_seconds

KV_BLOCKS = 1024  # of 16 tokens
MAX_RUNNING = 32
BUDGETS = (64, 128, 256, 512, 1024)
BUDGET = 512
COUNT, SEEDS = 120, (0, 1, 2)  # requests of a run, runs of a cell
LOADS = (0.4, 0.7, 0.9)
CONTEXT_LENGTH, VOCAB_SIZE = 8192, 49152
# `slo_steps` counts decode steps of this batch and total context.
SLO_BATCH, SLO_CONTEXT = 16, 16 * 512


@dataclass(frozen=True, slots=True)
class Contender:
    """A policy with its settings. `slo_steps`: the TPOT SLO in decode steps. `max_tokens`: of every request; None: the
    engine knows each answer's length."""

    name: str
    batching: str
    budget: int = BUDGET
    slo_steps: float | None = None
    max_tokens: int | None = None

    def config(self, cost: CostModel) -> EngineConfig:
        step_s = cost.decode_seconds(SLO_BATCH, SLO_CONTEXT)
        return EngineConfig(
            kv_blocks=KV_BLOCKS,
            max_running=MAX_RUNNING,
            batching=self.batching,
            max_batch_tokens=self.budget,
            tpot_slo_s=None if self.slo_steps is None else round(self.slo_steps * step_s, 3),
        )


CHUNKED = tuple(Contender(f"chunked {budget}", "chunked", budget) for budget in BUDGETS)
PREFILL_ONLY = tuple(Contender(f"prefill-only {budget}", "prefill-only", budget) for budget in BUDGETS)
STATIC, ORCA, PREFILL_FIRST = (Contender(name, name) for name in ("static", "orca", "prefill-first"))
TPOT_SLO = Contender("chunked 512, TPOT SLO", "chunked", slo_steps=2.0)
ORCA_LONGEST = Contender(f"orca, max {LONGEST_ANSWER}", "orca", max_tokens=LONGEST_ANSWER)
CONTENDERS = (STATIC, ORCA, ORCA_LONGEST, PREFILL_FIRST, *CHUNKED, TPOT_SLO, *PREFILL_ONLY)
YARDSTICK = CHUNKED[BUDGETS.index(BUDGET)]  # whose requests a second, when all are there at once, are the capacity


@dataclass(frozen=True, slots=True)
class Cell:
    """`load`: the rate of arrivals as a share of the mix's capacity; None: all requests are there at time 0."""

    contender: str
    mix: str
    load: float | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """`seeds` are the figures of each seed alone."""

    rate: float | None
    pooled: Figures
    seeds: tuple[Figures, ...]


Grid = Mapping[Cell, Outcome]


def contender(name: str) -> Contender:
    return next(each for each in CONTENDERS if each.name == name)


def virtual_run(cost: CostModel, config: EngineConfig, requests: Sequence[Asked], max_tokens: int | None = None) -> Run:
    """The production engine over these requests, in virtual time."""
    engine = Engine(
        config,
        context_length=CONTEXT_LENGTH,
        eos_token_ids=(END,),
        vocab_size=VOCAB_SIZE,
        lease_s=10.0,
        reserved=RESERVED_BLOCKS,
        cost=cost,
    )
    arrivals = [Arrival(each.at_s, each.request(max_tokens), each.answer_tokens) for each in requests]
    token_s = replay(engine, arrivals, partial(plan_seconds, cost))
    engine.check()
    return run(requests, token_s, engine.stats().preemptions)


def compute(cost: CostModel, cell: Cell, rate: float | None) -> Outcome:
    who = contender(cell.contender)
    runs = [virtual_run(cost, who.config(cost), asked(cell.mix, COUNT, seed, rate), who.max_tokens) for seed in SEEDS]
    return Outcome(rate, figures(runs), tuple(figures([each]) for each in runs))


def capacity(cost: CostModel, mix: str) -> float:
    """Requests a second of the yardstick when it never lacks one."""
    return _rounded(compute(cost, Cell(YARDSTICK.name, mix, None), None).pooled.requests_rate)


def rate(capacity: float, load: float) -> float:
    return _rounded(capacity * load)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def grid(cost: CostModel, processes: int, progress: Callable[[str], None]) -> Grid:
    """All cells, on so many processes."""
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        capacities = dict(zip(MIXES, pool.map(partial(capacity, cost), MIXES), strict=True))
        wanted = list(cells())
        rates = [None if cell.load is None else rate(capacities[cell.mix], cell.load) for cell in wanted]
        found: dict[Cell, Outcome] = {}
        for cell, outcome in zip(wanted, pool.map(partial(compute, cost), wanted, rates), strict=True):
            found[cell] = outcome
            if len(found) % 50 == 0:
                progress(f"virtual time: {len(found)} of {len(wanted)} cells")
    return found


def cells() -> Iterator[Cell]:
    """In the order in which they are shown."""
    for mix in MIXES:
        for load in (*LOADS, None):
            for each in CONTENDERS:
                yield Cell(each.name, mix, load)
