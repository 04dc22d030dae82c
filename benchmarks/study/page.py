"""docs/batching.md and docs/batching.csv from the figures of the study. Its text is page.md.jinja."""

from collections.abc import Iterator, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from statistics import fmean, median

from benchmarks.study import cells, real, workload
from benchmarks.study.answers import StudyFigures, figures
from benchmarks.study.cells import (
    BUDGETS,
    CHUNKED,
    ORCA,
    ORCA_LONGEST,
    PREFILL_FIRST,
    PREFILL_ONLY,
    REFERENCE,
    STATIC,
    TPOT_SLO,
    Cell,
    CellResult,
    Grid,
    PolicyVariant,
    variant,
    virtual_run,
)
from benchmarks.study.real import NAIVE_ANSWER, Naive, RealCell, naive_config, naive_requests, requests
from benchmarks.study.record import Measured
from benchmarks.study.workload import MIXES, mean_lengths, study_requests
from benchmarks.wrapping import wrap_markdown
from workers.profiles.fit import COEFFICIENTS, Point, relative_error

PAGE, TABLE = "batching.md", "batching.csv"
TEMPLATE = Path(__file__).with_name("page.md.jinja")
LOAD = real.LOAD  # of the tables
SHOWN = (STATIC, ORCA, ORCA_LONGEST, PREFILL_FIRST, *CHUNKED, TPOT_SLO, PREFILL_ONLY[BUDGETS.index(REFERENCE.budget)])
QUEUED = 128  # requests of the sweep's last two columns


def write(folder: Path, measured: Measured, grid: Grid) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PAGE).write_text(markdown(measured, grid))
    (folder / TABLE).write_text("\n".join(csv(grid)) + "\n")


def csv(grid: Grid) -> Iterator[str]:
    """Every cell in SI units, under a header."""
    yield ",".join(("mix", "load", "arrivals_rate", "policy", *(field.name for field in fields(StudyFigures))))
    for cell, outcome in grid.items():
        yield csv_row(cell, outcome)


def csv_row(cell: Cell, outcome: CellResult) -> str:
    load, rate = ("full" if value is None else f"{value:g}" for value in (cell.load, outcome.rate))
    name = cell.variant.replace(",", ";")
    return ",".join((cell.mix, load, rate, name, *(f"{value:.5g}" for value in astuple(outcome.pooled))))


def markdown(measured: Measured, grid: Grid) -> str:
    from jinja2 import Environment, StrictUndefined

    def at(name: str, mix: str = "mixed", load: float | None = LOAD) -> StudyFigures:
        return grid[Cell(name, mix, load)].pooled

    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)
    environment.filters["pct"] = _percent
    held_out = [point for point in measured.points if point.held_out]
    text = environment.from_string(TEMPLATE.read_text()).render(
        **{"cells": cells, "real": real, "workload": workload, "LOAD": LOAD, "QUEUED": QUEUED},
        **{"s": _seconds, "ms": _milliseconds, "pct": _percent, "rate": _rate},
        measured=measured,
        at=at,
        between=lambda name, load: _between_seeds(grid, name, load),
        preemptions=lambda name: sum(o.pooled.preemptions for cell, o in grid.items() if cell.variant == name),
        tpot_slo_s=TPOT_SLO.config(measured.cost).tpot_slo_s,
        indifferent=[at(each.name, "short/long", None).total_rate for each in (ORCA, PREFILL_FIRST, *CHUNKED)],
        mixes=_mixes(grid),
        of_mix=lambda mix: _of_mix(grid, mix),
        naive=naive_table(measured),
        coefficients=", ".join(f"`{name}` {getattr(measured.cost, name):.3g}" for name in COEFFICIENTS),
        num_seen=len(measured.points) - len(held_out),
        num_held_out=len(held_out),
        errors=errors_table(measured, held_out),
        farthest=_farthest(measured, held_out),
        real_cells=real_table(measured),
    )
    return wrap_markdown(text)


def _between_seeds(grid: Grid, name: str, load: float | None) -> str:
    values = [[getattr(each, name) for each in outcome.seeds] for cell, outcome in grid.items() if cell.load == load]
    return _percent(median(max(each) / min(each) for each in values) - 1)


# ---- tables ------------------------------------------------------------------------------------------------------


def _mixes(grid: Grid) -> str:
    rows = []
    for mix, parts in MIXES.items():
        means = mean_lengths([each for seed in cells.SEEDS for each in study_requests(mix, cells.COUNT, seed, None)])
        medians = ", ".join(f"{prompt.median}/{answer.median}" for prompt, answer in parts)
        capacity = grid[Cell(REFERENCE.name, mix, None)].pooled.requests_rate
        rows.append((mix, medians, *(f"{mean:.0f}" for mean in means), f"{capacity:.2f}"))
    return _table(("prompt/answer", "medians", "mean prompt", "mean answer", "capacity, requests/s"), rows)


def _of_mix(grid: Grid, mix: str) -> str:
    headers = ("", "TTFT p50", "p90", "p99", "TPOT mean", "p90", "worst gap p99", "max", "answers, tok/s", "all, tok/s")
    return _table(headers, [_row(grid, each, mix) for each in SHOWN])


def _row(grid: Grid, policy: PolicyVariant, mix: str) -> Sequence[str]:
    at_load, full = (grid[Cell(policy.name, mix, load)].pooled for load in (LOAD, None))
    return (
        policy.name,
        *map(_seconds, (at_load.ttft_p50_s, at_load.ttft_p90_s, at_load.ttft_p99_s)),
        *map(_milliseconds, (at_load.tpot_mean_s, at_load.tpot_p90_s)),
        *map(_seconds, (at_load.gap_p99_s, at_load.gap_max_s)),
        *map(_rate, (full.output_rate, full.total_rate)),
    )


def naive_table(measured: Measured) -> str:
    """The naive sweep."""
    headers = (
        *("batch", "duration", "output tok/s", "average latency", "duration in virtual time"),
        *(f"{QUEUED} requests: duration", "average latency"),
    )
    return _table(headers, [_naive_row(measured, each) for each in measured.naive])


def _naive_row(measured: Measured, each: Naive) -> Sequence[str]:
    virtual = virtual_run(measured.cost, naive_config(each.batch), naive_requests(each.batch))
    batches = QUEUED // each.batch
    return (
        str(each.batch),
        _seconds(each.duration_s),
        _rate(each.batch * NAIVE_ANSWER / each.duration_s),
        _seconds(each.latency_s),
        f"{_seconds(virtual.seconds)} ({virtual.seconds / each.duration_s - 1:+.0%})",
        _seconds(batches * each.duration_s),
        _seconds((batches + 1) / 2 * each.duration_s),
    )


def errors_table(measured: Measured, points: Sequence[Point]) -> str:
    """Errors of the fit at these points, by kind of step."""
    rows = []
    for kind in (*dict.fromkeys(point.shape.kind for point in points), "all"):
        errors = [relative_error(measured.cost, point) for point in points if kind in (point.shape.kind, "all")]
        sizes = list(map(abs, errors))
        rows.append((kind, str(len(errors)), f"{fmean(errors):+.1%}", f"{median(sizes):.1%}", f"{max(sizes):.1%}"))
    return _table(("steps", "number", "mean", "median size", "greatest size"), rows)


def _farthest(measured: Measured, points: Sequence[Point]) -> str:
    worst = sorted(points, key=lambda point: -abs(relative_error(measured.cost, point)))[:3]
    return "; ".join(
        f"{_shape(point)}, {_milliseconds(point.seconds)}, {relative_error(measured.cost, point):+.0%}"
        for point in worst
    )


def _shape(point: Point) -> str:
    parts = [f"a chunk of {tokens} behind {cached}" for tokens, cached in point.shape.chunks]
    if point.shape.batch:
        parts.append(f"{point.shape.batch} decodes at {point.shape.context}")
    return " with ".join(parts)


def real_table(measured: Measured) -> str:
    """Cells on the real executor, beside virtual time."""
    headers = (
        *("measured / virtual", "requests", "TTFT p50", "TTFT p90", "TPOT mean", "worst gap p99", "output tok/s"),
        *("all its steps", "median step"),
    )
    return _table(headers, [_real_row(measured, each) for each in measured.real])


def _real_row(measured: Measured, real: RealCell) -> Sequence[str]:
    policy, ours = variant(real.variant), real.figures
    virtual = figures([virtual_run(measured.cost, policy.config(measured.cost), requests(real), policy.max_tokens)])
    pairs = (
        (_seconds, ours.ttft_p50_s, virtual.ttft_p50_s),
        (_seconds, ours.ttft_p90_s, virtual.ttft_p90_s),
        (_milliseconds, ours.tpot_mean_s, virtual.tpot_mean_s),
        (_seconds, ours.gap_p99_s, virtual.gap_p99_s),
        (_rate, ours.output_rate, virtual.output_rate),
    )
    compared = (f"{say(one)} / {say(other)} = {one / other:.2f}" for say, one, other in pairs)
    ratios = (f"{each:.2f}" for each in (real.steps_ratio, real.step_ratio))
    return (f"{real.variant}, {real.mix}", str(real.count), *compared, *ratios)


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = (headers, ("---", *("---:" for _ in headers[1:])), *rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# ---- numbers as they are read --------------------------------------------------------------------------------------


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"


def _milliseconds(value: float) -> str:
    return f"{value * 1e3:.0f} ms"


def _rate(value: float) -> str:
    return f"{value:.1f}"


def _percent(value: float) -> str:
    return f"{value:.0%}"
