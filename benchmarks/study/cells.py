"""The grid of the study: policies by lengths and loads; each cell is computed in virtual time.

Deterministic: the same cost model gives the same figures.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

from benchmarks.study.answers import StudyFigures, StudyRun, figures, run
from benchmarks.study.virtual import EngineArrival, replay
from benchmarks.study.workload import LONGEST_ANSWER, MIXES, StudyRequest, study_requests
from kvtransfer.open import RESERVED_BLOCKS
from workers.config import EngineConfig
from workers.costs import CostModel
from workers.engine.engine import Engine
from workers.engine.estimate import plan_seconds
from workers.executor.simulated import SimulatedModel, simulated_facts

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
class PolicyVariant:
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


CHUNKED = tuple(PolicyVariant(f"chunked {budget}", "chunked", budget) for budget in BUDGETS)
PREFILL_ONLY = tuple(PolicyVariant(f"prefill-only {budget}", "prefill-only", budget) for budget in BUDGETS)
STATIC, ORCA, PREFILL_FIRST = (PolicyVariant(name, name) for name in ("static", "orca", "prefill-first"))
TPOT_SLO = PolicyVariant("chunked 512, TPOT SLO", "chunked", slo_steps=2.0)
ORCA_LONGEST = PolicyVariant(f"orca, max {LONGEST_ANSWER}", "orca", max_tokens=LONGEST_ANSWER)
VARIANTS = (STATIC, ORCA, ORCA_LONGEST, PREFILL_FIRST, *CHUNKED, TPOT_SLO, *PREFILL_ONLY)
REFERENCE = CHUNKED[BUDGETS.index(BUDGET)]  # its requests per second under full load are the capacity


@dataclass(frozen=True, slots=True)
class Cell:
    """`load`: the rate of arrivals as a share of the mix's capacity; None: all requests arrive at time 0."""

    variant: str
    mix: str
    load: float | None


@dataclass(frozen=True, slots=True)
class CellResult:
    """`pooled`: figures over all seeds; `seeds`: figures of each seed."""

    rate: float | None
    pooled: StudyFigures
    seeds: tuple[StudyFigures, ...]


Grid = Mapping[Cell, CellResult]


def variant(name: str) -> PolicyVariant:
    return next(each for each in VARIANTS if each.name == name)


def virtual_run(
    cost: CostModel, config: EngineConfig, requests: Sequence[StudyRequest], max_tokens: int | None = None
) -> StudyRun:
    """The production engine over these requests, in virtual time."""
    facts = simulated_facts(config.block_size, SimulatedModel(context_length=CONTEXT_LENGTH, vocab_size=VOCAB_SIZE))
    engine = Engine(config, facts, reserved=RESERVED_BLOCKS, cost=cost)
    arrivals = [EngineArrival(each.at_s, each.request(max_tokens), each.answer_tokens) for each in requests]
    token_s = replay(engine, arrivals, partial(plan_seconds, cost))
    engine.check()
    return run(requests, token_s, engine.stats().preemptions)


def compute(cost: CostModel, cell: Cell, rate: float | None) -> CellResult:
    policy = variant(cell.variant)
    runs = [
        virtual_run(cost, policy.config(cost), study_requests(cell.mix, COUNT, seed, rate), policy.max_tokens)
        for seed in SEEDS
    ]
    return CellResult(rate, figures(runs), tuple(figures([each]) for each in runs))


def capacity(cost: CostModel, mix: str) -> float:
    """Requests per second of the reference policy under full load."""
    return _rounded(compute(cost, Cell(REFERENCE.name, mix, None), None).pooled.requests_rate)


def rate(capacity: float, load: float) -> float:
    return _rounded(capacity * load)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def grid(cost: CostModel, processes: int, progress: Callable[[str], None]) -> Grid:
    """Compute all cells, on `processes` processes."""
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        capacities = dict(zip(MIXES, pool.map(partial(capacity, cost), MIXES), strict=True))
        wanted = list(cells())
        rates = [None if cell.load is None else rate(capacities[cell.mix], cell.load) for cell in wanted]
        found: dict[Cell, CellResult] = {}
        for cell, outcome in zip(wanted, pool.map(partial(compute, cost), wanted, rates), strict=True):
            found[cell] = outcome
            if len(found) % 50 == 0:
                progress(f"virtual time: {len(found)} of {len(wanted)} cells")
    return found


def cells() -> Iterator[Cell]:
    """All cells, in display order."""
    for mix in MIXES:
        for load in (*LOADS, None):
            for each in VARIANTS:
                yield Cell(each.name, mix, load)
