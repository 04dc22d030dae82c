"""The results of systems, and tables that compare them, for a terminal and for the HTML report."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cluster.offline.scoring.figures import Figures, Percentiles, PoolFigures, slo_text
from cluster.offline.scoring.goodput import Goodput
from cluster.offline.scoring.records import Run

NOTHING = "-"
SPREAD = "p50/p90/p99"


@dataclass(frozen=True, slots=True)
class SystemResult:
    """`figures` at the main load; `goodputs` by rising target; `sweep` at rising rates, for curves.

    `run`: the run behind `figures`, with its steps if it was traced.
    """

    name: str
    figures: Figures
    goodputs: tuple[Goodput, ...] = ()
    sweep: tuple[Figures, ...] = ()
    run: Run | None = None

    def as_json(self) -> dict[str, Any]:
        """All but the sweep and the run's records."""
        goodputs = [goodput.as_json() for goodput in self.goodputs]
        return {"system": self.name, "figures": self.figures.as_json(), "goodput": goodputs}


def unit_of(systems: Sequence[SystemResult]) -> str:
    """What all of these systems count: GPUs, or ranks if any ran in real time."""
    return "GPU" if all(system.figures.unit == "GPU" for system in systems) else "rank"


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of text; the first column names the rows."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def comparison(systems: Sequence[SystemResult]) -> Grid:
    """One row per system: goodput by target, then its figures at the main load."""
    targets = sorted({goodput.target for system in systems for goodput in system.goodputs})
    unit = unit_of(systems)
    headers = (
        *("system", f"{unit}s", *(f"goodput/{unit}\nat {100 * target:g} %, req/s" for target in targets)),
        *("SLO\nattainment", f"TTFT, ms\n{SPREAD}", f"TPOT, ms\n{SPREAD}", "rejected/\nfailed/\npreempted"),
    )
    return Grid(_title(systems), headers, tuple(_row(system, targets) for system in systems))


def _title(systems: Sequence[SystemResult]) -> str:
    figures = [system.figures for system in systems]
    workloads, rates, slos = (
        ", ".join(dict.fromkeys(texts))
        for texts in (
            (each.workload for each in figures),
            (f"{each.offered_rate:.3g}" for each in figures),
            (slo_text(each.slo) for each in figures),
        )
    )
    sure = f"Goodput counts all {unit_of(systems)}s provisioned, with its 95 % CI over seeds. "
    return (
        f"{workloads} at {rates} requests/s; {slos}. {sure if any(system.goodputs for system in systems) else ''}"
        "Percentiles cover finished requests; SLO attainment counts every request, failures included."
    )


def _row(system: SystemResult, targets: Sequence[float]) -> tuple[str, ...]:
    figures = system.figures
    return (
        system.name,
        str(figures.gpus),
        *(_goodput([each for each in system.goodputs if each.target == target]) for target in targets),
        f"{figures.attainment.both:.1%}",
        _spread(figures.ttft_s, 1e3),
        _spread(figures.tpot_s, 1e3),
        f"{figures.rejected}/{figures.failed + figures.unfinished}/{figures.preemptions}",
    )


def _goodput(found: Sequence[Goodput]) -> str:
    if not found:
        return NOTHING
    goodput = found[0]
    if goodput.unattainable:
        return f"0\n{goodput.closest.attained.both:.0%} at best"
    least = ">= " if goodput.capped else ""
    sure = f"\n{goodput.low / goodput.gpus:.3g}..{goodput.high / goodput.gpus:.3g}" if len(goodput.seeds) > 1 else ""
    return f"{least}{goodput.per_gpu:.3g}{sure}"


def probes(systems: Sequence[SystemResult]) -> Grid:
    """One row for each rate and seed that the goodput search probed."""
    rows = [
        (
            *(f"{system.name}, {probe.rate:.4g}", str(probe.seed)),
            *(f"{share:.1%}" for share in (probe.attained.ttft, probe.attained.tpot, probe.attained.both)),
            f"{probe.attained.served:.1%}",
        )
        for system in systems
        if system.goodputs
        for probe in max(system.goodputs, key=lambda each: len(each.probes)).probes
    ]
    headers = ("system, requests/s", "seed", "TTFT attainment", "TPOT attainment", "SLO attainment", "served")
    return Grid("All rates probed", headers, tuple(rows))


def details(systems: Sequence[SystemResult]) -> Grid:
    """All figures: one column per system, one row per figure."""
    rows = [_detail(system.figures) for system in systems]
    names = list(rows[0]) if rows else []
    return Grid(
        "All figures at this load",
        ("", *(system.name for system in systems)),
        tuple((name, *(row[name] for row in rows)) for name in names),
    )


def _detail(figures: Figures) -> dict[str, str]:
    latencies = {
        "TTFT, s": (figures.ttft_s, 1.0),
        "TPOT, ms": (figures.tpot_s, 1e3),
        "TBT (all gaps), ms": (figures.tbt_s, 1e3),
        "worst TBT (mean of a request's worst 10 %), ms": (figures.worst_tbt_s, 1e3),
        "E2E, s": (figures.e2e_s, 1.0),
        "normalized latency, ms/token": (figures.normalized_s, 1e3),
    }
    attained = figures.attainment
    return {
        "clock, seed": f"{figures.clock}, {figures.seed}",
        f"{figures.unit}s provisioned": str(figures.gpus),
        "seconds": f"{figures.seconds:.4g}",
        "requests": str(figures.requests),
        "finished / rejected / failed / unfinished": (
            f"{figures.finished} / {figures.rejected} / {figures.failed} / {figures.unfinished}"
        ),
        "failure reasons": ", ".join(f"{count} {reason}" for reason, count in figures.reasons) or NOTHING,
        "retried requests, preemptions": f"{figures.retried}, {figures.preemptions}",
        "offered / finished, requests/s": f"{figures.offered_rate:.4g} / {figures.requests_rate:.4g}",
        "prompt / output tokens/s": f"{figures.prompt_tokens_rate:.4g} / {figures.output_tokens_rate:.4g}",
        "attainment: TTFT / TPOT / both": f"{attained.ttft:.1%} / {attained.tpot:.1%} / {attained.both:.1%}",
        "effective request capacity": f"{figures.effective_capacity:.1%}",
        **{f"{name}, {SPREAD}": _spread(taken, factor) for name, (taken, factor) in latencies.items()},
        "MFU": _percent(figures.mfu),
        "KV occupancy": _percent(figures.kv_occupancy),
        "transfer / exposed transfer, of E2E": (
            f"{_percent(figures.transfer_share)} / {_percent(figures.exposed_transfer_share)}"
        ),
        "prompt tokens cached": _percent(figures.cached_share),
    }


def pools(systems: Sequence[SystemResult]) -> Grid:
    """One row per pool of each system."""
    headers = (
        *("system", "pool", "role", "workers", f"{unit_of(systems)}s", "busy", "KV occupancy"),
        *("steps", "prompt tokens", "output tokens", "preemptions"),
    )
    rows = [(system.name, *_pool(pool)) for system in systems for pool in system.figures.pools]
    return Grid("Pools", headers, tuple(rows))


def _pool(pool: PoolFigures) -> tuple[str, ...]:
    shares = _percent(pool.busy_share), _percent(pool.kv_occupancy)
    known = not pool.steps or pool.prompt_tokens or pool.output_tokens
    tokens = (str(pool.prompt_tokens), str(pool.output_tokens)) if known else (NOTHING, NOTHING)
    counts = (str(pool.steps), *tokens, str(pool.preemptions))
    return (pool.pool, pool.role, str(pool.workers), str(pool.gpus), *shares, *counts)


def _spread(taken: Percentiles | None, factor: float) -> str:
    if taken is None:
        return NOTHING
    return "/".join(_short(factor * value) for value in (taken.p50, taken.p90, taken.p99))


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100.0 else f"{value:.3g}"


def _percent(share: float | None) -> str:
    return NOTHING if share is None else f"{share:.1%}"


def terminal(grid: Grid) -> Any:
    """As a rich table."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(grid.title), title_justify="left", header_style="bold", box=box.SIMPLE_HEAD)
    for number, header in enumerate(grid.headers):
        table.add_column(escape(header), justify="right" if number else "left", overflow="fold")
    for row in grid.rows:
        table.add_row(*map(escape, row))
    return table
