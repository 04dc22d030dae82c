"""Writes benchmarks/results/elastic-campaign.md from the record. page.md.jinja has the text."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.elastic.contenders import CHUNKS, PROMPT_CHUNKS, WITH_ADMISSION, contender_named
from benchmarks.elastic.record import (
    COLOCATED,
    OURS,
    PER_PHASE,
    ROUTER,
    SPLIT,
    STATIC,
    SYSTEM,
    TIMETABLE,
    Entry,
    Phases,
    Ratio,
    Record,
    Result,
    Stale,
    ratio,
)
from benchmarks.wrapping import wrap_markdown
from cluster.offline.scoring.figures import slo_text

PAGE = "elastic-campaign.md"
PICTURES = "../../docs/pictures/elastic-{}.svg"  # from benchmarks/results
TEMPLATE = Path(__file__).with_name("page.md.jinja")
NEVER_WORSE, AHEAD, NEAR = 0.97, 1.25, 0.9  # the aims
AIMS = (
    *(("the best static choice", NEVER_WORSE), ("the best static choice", AHEAD)),
    *(("the timetable", NEAR), ("the best static per phase", NEAR)),
)
LESS = 0.01  # of a phase's requests: a smaller difference is not listed


def write(folder: Path, found: Record, pictures: str = PICTURES) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PAGE).write_text(markdown(found, pictures))


def markdown(found: Record, pictures: str = PICTURES) -> str:
    """`pictures`: their path relative to the page, with braces for the name."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)
    text = environment.from_string(TEMPLATE.read_text()).render(
        record=found,
        verdicts=verdicts(found),
        ratios=ratios(found),
        aims=aim_table(found),
        regions=regions(found),
        losing=losing(found),
        lost_phases=lost_phases(found),
        goodputs=goodputs,
        phases=phases,
        stale=stale_table(found.stale),
        slo_text=slo_text,
        per_phase=lambda result: result.of(PER_PHASE),
        timetable=lambda result: result.of(TIMETABLE),
        picture=pictures.format,
        chunks=", ".join(map(str, CHUNKS)),
        prompt_chunks=", ".join(map(str, PROMPT_CHUNKS)),
    )
    return wrap_markdown(re.sub(r"\n{3,}", "\n\n", text))


# ---- in short ----------------------------------------------------------------------------------------------------


def verdicts(found: Record) -> str:
    """One row per workload: goodput of Diptych and of the best of each kind, with intervals."""
    kinds = ((OURS,), (SPLIT,), (COLOCATED,), (SYSTEM,), (ROUTER,), (TIMETABLE,), (PER_PHASE,))
    rows = [
        (each.scenario, " and ".join(each.dates), *(_rate(each, _other(each, *kind)) for kind in kinds))
        for each in found.results
        if each.of(OURS)
    ]
    headers = (
        "workload",
        "measured",
        "Diptych",
        "best split",
        "best colocated",
        "best system",
        "best router",
        "timetable",
        PER_PHASE,
    )
    return _table(headers, rows)


def ratios(found: Record) -> str:
    """Diptych over the others, and over the best static choice seed by seed."""
    rows = []
    for each in found.results:
        kinds = (STATIC, (SYSTEM,), (ROUTER,), (TIMETABLE,), (PER_PHASE,))
        ours, others = each.of(OURS), [_other(each, *kind) for kind in kinds]
        if ours is None:
            continue
        over = ratio(ours.by_seed, others[0].by_seed) if others[0] else None
        by_seed = ", ".join(f"{one:.2f}" for one in over.by_seed) if over else "-"
        rows.append((each.scenario, by_seed, *(_ratio(ours, other) for other in others)))
    headers = ("best static, by seed", "best static", "best system", "best router", "timetable", PER_PHASE)
    return _table(("workload", *headers), rows)


def regions(found: Record) -> str:
    """Diptych over the best static choice for one steady load under several SLOs; empty without such a load."""
    steady = [each for each in found.results if len(each.boundaries) == 1 and each.of(OURS)]
    slow, late = (sorted({getattr(each.slo, name) or 0.0 for each in steady}) for name in ("tpot_s", "ttft_s"))
    rows = []
    for ttft_s in late:
        by_tpot = {each.slo.tpot_s or 0.0: each for each in steady if (each.slo.ttft_s or 0.0) == ttft_s}
        cells = (_ours_over_static(by_tpot[tpot_s]) if tpot_s in by_tpot else "-" for tpot_s in slow)
        rows.append((f"TTFT {ttft_s:g} s", *cells))
    return _table(("", *(f"TPOT {1e3 * tpot_s:g} ms" for tpot_s in slow)), rows) if rows else ""


def _ours_over_static(result: Result) -> str:
    ours = result.of(OURS)
    return _ratio(ours, result.best_static) if ours else "-"


def losing(found: Record) -> list[str]:
    """Contenders ahead of Diptych, except those that know the load: one line each, the worst first."""
    lost: list[tuple[float, str]] = []
    for each in found.results:
        ours = each.of(OURS)
        for entry in each.entries:
            if ours is None or entry.kind in (OURS, TIMETABLE, PER_PHASE):
                continue
            over = ratio(ours.by_seed, entry.by_seed)
            if over.mean < 1.0 if over else entry.rate > ours.rate:
                seeds = "" if len(entry.by_seed) > 1 else ", one seed"
                lost.append(
                    (over.mean if over else 0.0, f"{each.scenario}: {_ratio_text(over)} times {_named(entry)}{seeds}")
                )
    return [line for _, line in sorted(lost)]


def lost_phases(found: Record) -> list[str]:
    """Phases in which Diptych attains less than the best static choice at the same rate, the worst first."""
    lost = []
    for each in found.results:
        static = each.best_static
        by_name = {phases.name: {row[0]: row for row in _merged(phases)} for phases in each.phases}
        ours, theirs = by_name.get(OURS), by_name.get(static.name) if static else None
        if not ours or not theirs:
            continue
        for phase, mine in ours.items():
            other = theirs.get(phase)
            if phase != "all" and other and other[2] - mine[2] > LESS:
                line = (
                    f"{each.scenario}, {phase}: {mine[2]:.1%} of {mine[1]} requests met both SLOs, {other[2]:.1%} with "
                    f"{static.name if static else ''}, at {each.phases[0].rate:.2f} requests/s"
                )
                lost.append((mine[2] - other[2], line))
    return [line for _, line in sorted(lost)]


# ---- by workload -------------------------------------------------------------------------------------------------


def goodputs(result: Result) -> str:
    ours = result.of(OURS)
    rows = [
        (
            f"{_named(entry)} ({entry.date})" if len(result.dates) > 1 else _named(entry),
            f"{entry.rate / result.gpus:.3f}",
            f"{entry.low / result.gpus:.3f} to {entry.high / result.gpus:.3f}" if len(entry.by_seed) > 1 else "-",
            str(len(entry.by_seed)),
            f"{entry.rate / result.full_rate:.2f}",
            _ratio(ours, entry) if ours else "-",
        )
        for entry in sorted(result.entries, key=lambda each: -each.rate)
    ]
    return _table(("", "requests/s and GPU", "95 % interval", "seeds", "scale", "Diptych / this"), rows)


def _named(entry: Entry) -> str:
    match entry.kind:
        case "ours":
            return "**Diptych**"
        case "best static per phase":
            return PER_PHASE
        case "system":
            return entry.name
        case "router":
            return f"{_router_label(entry)}: {entry.name}"
    return f"best static: {entry.name}"


def phases(result: Result) -> str:
    """Missed SLOs by phase, at the goodput of the better of Diptych and the static choices."""
    rows = []
    for each in result.phases:
        for name, total, *shares, missed in _merged(each):
            rows.append((each.name, name, str(total), *(f"{share:.1%}" for share in shares), *map(str, missed)))
    headers = (
        "",
        "phase",
        "requests",
        "both SLOs",
        "TTFT",
        "TPOT",
        "late",
        "slow",
        "late and slow",
        "refused",
        "other",
    )
    return _table(headers, rows)


def _merged(of_one: Phases) -> Iterator[tuple[str, int, float, float, float, tuple[int, ...]]]:
    """Merges phases with one name: requests, shares that met both SLOs, TTFT and TPOT, and misses by kind."""
    for name in dict.fromkeys(row.phase for row in of_one.told):
        alike = [row for row in of_one.told if row.phase == name]
        total = sum(row.requests for row in alike)
        kept, ttft, tpot = (
            sum(getattr(row, field) * row.requests for row in alike) / total
            for field in ("kept", "ttft_kept", "tpot_kept")
        )
        missed = [sum(getattr(row, field) for row in alike) for field in ("late", "slow", "late_slow", "rejected")]
        yield name, total, kept, ttft, tpot, (*missed, sum(row.failed + row.cut for row in alike))


def stale_table(found: Sequence[Stale]) -> str:
    """A row per router and number of gateways, a column per age of statistics; means over seeds."""
    ages = sorted({each.stale_s for each in found})
    rows = []
    for name, gateways in dict.fromkeys((each.routing, each.gateways) for each in found):
        by_age = {each.stale_s: each for each in found if (each.routing, each.gateways) == (name, gateways)}
        kept = (f"{fmean(by_age[age].kept):.1%}" if age in by_age else "-" for age in ages)
        rows.append((name, str(gateways), *kept))
    return _table(("", "gateways", *(f"{age:g} s" for age in ages)), rows) if rows else ""


def _other(result: Result, *kinds: str) -> Entry | None:
    """The best of these kinds, except Diptych's own router, among those with the most seeds."""
    known = (each for each in result.entries if each.kind in kinds and not _is_ours_in_part(each))
    return max(known, key=lambda each: (len(each.by_seed), each.rate), default=None)


def _router_label(entry: Entry) -> str:
    if not _is_ours_in_part(entry):
        return "router"
    both = contender_named(entry.name).routing == WITH_ADMISSION
    return f"Diptych's router{' and admission' if both else ''}, fixed roles"


def _is_ours_in_part(entry: Entry) -> bool:
    return entry.kind == ROUTER and contender_named(entry.name).is_ours_in_part


def _rate(result: Result, entry: Entry | None) -> str:
    """Per GPU."""
    if entry is None:
        return "-"
    rate, low, high = (each / result.gpus for each in (entry.rate, entry.low, entry.high))
    return f"{rate:.3f} ({low:.3f} to {high:.3f})" if len(entry.by_seed) > 1 else f"{rate:.3f}"


def _ratio(ours: Entry, other: Entry | None) -> str:
    return _ratio_text(ratio(ours.by_seed, other.by_seed)) if other else "-"


def _ratio_text(over: Ratio | None) -> str:
    return over.text if over else "theirs is 0"


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = (headers, ("---", *("---:" for _ in headers[1:])), *rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# ---- the aims ----------------------------------------------------------------------------------------------------


def summary(found: Record) -> str:
    """One line per workload and aim: whether it holds, with the ratio."""
    return "\n".join(aims(found)) or "no workload is recorded"


def aims(found: Record) -> Iterator[str]:
    for each in found.results:
        for baseline, aim, over in _aimed(each):
            verdict = "holds" if over is None or over.mean >= aim else "FALLS SHORT"
            yield f"{verdict}: {each.scenario}, Diptych is {_ratio_text(over)} of {baseline}, wanted {aim:g}"


def aim_table(found: Record) -> str:
    rows = []
    for each in found.results:
        cells = {(baseline, aim): _verdict(aim, over) for baseline, aim, over in _aimed(each)}
        if cells:
            rows.append((each.scenario, *(cells.get(aim, "-") for aim in AIMS)))
    headers = (
        "0.97 of the best static",
        "1.25 of it, where load shifts",
        "0.9 of the timetable",
        "0.9 of the best static per phase",
    )
    return _table(("workload", *headers), rows)


def _verdict(aim: float, over: Ratio | None) -> str:
    held = over is None or over.mean >= aim
    return f"{'yes' if held else '**no**'}, {over.mean:.2f}" if over else "yes, theirs is 0"


def _aimed(result: Result) -> Iterator[tuple[str, float, Ratio | None]]:
    """Yields baseline, wanted ratio and actual ratio (None: the baseline has goodput 0)."""
    ours, static = result.of(OURS), result.best_static
    if ours is not None and static is not None:
        over = ratio(ours.by_seed, static.by_seed)
        yield *AIMS[0], over
        if result.shifts:
            yield *AIMS[1], over
    for aim, knowing in zip(AIMS[2:], (result.of(TIMETABLE), result.of(PER_PHASE)), strict=True):
        if ours is not None and knowing is not None:
            yield *aim, ratio(ours.by_seed, knowing.by_seed)
