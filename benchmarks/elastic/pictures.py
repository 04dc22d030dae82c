"""Draws the campaign's record; the same record gives the same bytes. Needs matplotlib (`diptych[pictures]`)."""

from pathlib import Path
from typing import Any

from benchmarks.elastic.contenders import WITH_ADMISSION, contender_named
from benchmarks.elastic.record import (
    COLOCATED,
    OURS,
    PER_PHASE,
    ROUTER,
    SPLIT,
    SYSTEM,
    TIMETABLE,
    Entry,
    Record,
    Result,
)
from benchmarks.elastic.timeline import Timeline
from cluster.offline.report import style

MISSING = "no pictures: matplotlib is missing; install it with `pip install 'diptych[pictures]'`"
FIXED_ROLES = "Diptych, fixed roles"
COLORS = {
    OURS: style.GREEN,
    FIXED_ROLES: "#7FCEB9",
    SPLIT: style.BLUE,
    COLOCATED: style.ORANGE,
    SYSTEM: style.GRAY,
    ROUTER: style.SKY,
    TIMETABLE: "#555555",
    PER_PHASE: "#000000",
}
LANES = {"steps with prompts": style.RED, "steps of decodes only": style.SKY}
COLUMNS = 2  # readable at the width of a README
KIND_LABELS = {
    OURS: "Diptych",
    FIXED_ROLES: FIXED_ROLES,
    SPLIT: "best static split",
    COLOCATED: "best colocated",
    SYSTEM: "best other system",
    ROUTER: "best other router",
    TIMETABLE: "known timetable",
    PER_PHASE: "best static per phase",
}
HEADLINE = "phases-a100"
HEADLINE_NAMES = {OURS: "Diptych", SYSTEM: "best other system", SPLIT: "best static split", COLOCATED: "best colocated"}


def missing() -> str:
    """The reason why nothing can be drawn, or an empty text."""
    from importlib.util import find_spec

    return "" if find_spec("matplotlib") else MISSING


def draw(folder: Path, found: Record, suffix: str) -> None:
    """All pictures into the folder. Raises `NoPictures`."""
    if not found.results:
        return
    style.save(_goodputs(found), folder / f"elastic-goodput.{suffix}")
    if shifting := [result for result in found.results if result.scenario == HEADLINE]:
        style.save(_headline(shifting[0]), folder / f"elastic-headline.{suffix}")
    for result in found.results:
        if len(result.boundaries) > 1:
            style.save(_over_time(result), folder / f"elastic-{result.scenario}.{suffix}")


@style.styled
def _goodputs(found: Record) -> Any:
    """One panel per workload: the best contender of each kind, with intervals. The page's tables have all of them."""
    rows = -(-len(found.results) // COLUMNS)
    picture, panels = style.panels(rows, COLUMNS, 11.0, 2.95 * rows)
    cells = list(panels.flat)
    for panel, result in zip(cells, found.results, strict=False):
        _bars(panel, [each for kind in reversed(KIND_LABELS) if (each := _labeled(result, kind))], result.gpus)
        panel.set_title(result.scenario, fontsize=14, fontweight="bold")
    for panel in cells[len(found.results) :]:
        panel.axis("off")
    picture.supxlabel(
        "goodput per GPU: requests/s with 90 % SLO attainment (lines: 95 % intervals; *: one seed)", fontsize=14
    )
    return picture


def _labeled(result: Result, kind: str) -> tuple[str, str, Entry] | None:
    """The best of a kind, with the kind and a label. A search of one seed counts only where no other one is there."""
    alike = [entry for entry in result.entries if _kind(entry) == kind]
    if not alike:
        return None
    best = max(alike, key=lambda entry: (len(entry.by_seed), entry.rate))
    return kind, KIND_LABELS[kind] + (" *" if len(best.by_seed) < 2 else ""), best


def _kind(entry: Entry) -> str:
    """The kind in the pictures. Diptych's own router is not among the routers, and is shown only with its admission."""
    if entry.kind != ROUTER or not contender_named(entry.name).is_ours_in_part:
        return entry.kind
    return FIXED_ROLES if contender_named(entry.name).routing == WITH_ADMISSION else ""


def _bars(panel: Any, labeled: list[tuple[str, str, Entry]], gpus: int) -> None:
    """Bars from the bottom up, each labeled with its figure after its interval."""
    entries = [entry for _, _, entry in labeled]
    rates = [entry.rate / gpus for entry in entries]
    highs = [entry.high / gpus for entry in entries]
    intervals = [
        [(entry.rate - entry.low) / gpus for entry in entries],
        [(entry.high - entry.rate) / gpus for entry in entries],
    ]
    lanes = range(len(entries))
    panel.barh(lanes, rates, xerr=intervals, capsize=3, color=[COLORS[kind] for kind, _, _ in labeled])
    for lane, rate, high in zip(lanes, rates, highs, strict=True):
        panel.text(high + 0.015 * max(highs), lane, f"{rate:.2f}", va="center", fontweight="bold", fontsize=12)
    panel.set_yticks(lanes, [label for _, label, _ in labeled], fontsize=12)
    panel.tick_params(axis="x", labelsize=11)
    panel.set_xlim(0, 1.12 * max(highs))
    panel.grid(axis="y", visible=False)


@style.styled
def _headline(result: Result) -> Any:
    """For a narrow page: Diptych's goodput beside the best of each kind, and what its workers computed over time."""
    kinds = list(reversed(HEADLINE_NAMES))
    best = [max((each for each in result.entries if each.kind == kind), key=lambda each: each.rate) for kind in kinds]
    picture, panels = style.panels(2, 1, 8.0, 5.2)
    above, below = panels[0][0], panels[1][0]
    labels = [
        HEADLINE_NAMES[kind] + ("" if kind in (OURS, COLOCATED) else f"\n({each.name})")
        for kind, each in zip(kinds, best, strict=True)
    ]
    _bars(above, list(zip(kinds, labels, best, strict=True)), gpus=1)
    above.set_title("requests/s with 90 % SLO attainment", fontsize=12)
    ours = result.timelines[0]
    _roles(below, ours)
    for name, begin_s in result.boundaries:
        below.axvline(begin_s, color="black", linewidth=1.0)
        below.text(begin_s + 2, -0.75, f"long {name}", va="bottom", fontsize=11)
    below.set_ylim(len(ours.workers) - 0.4, -1.5)
    below.set_yticks(range(len(ours.workers)), [f"worker {n}" for n in range(len(ours.workers))], fontsize=11)
    below.set_xlabel("seconds", fontsize=11)
    below.set_xlim(0, result.seconds)
    below.grid(visible=False)
    picture.legend(loc="outside lower center", ncols=len(LANES), fontsize=11)
    return picture


@style.styled
def _over_time(result: Result) -> Any:
    """Above, SLO attainment over time; below, what each of Diptych's workers computes."""
    ours = result.timelines[0]
    picture, panels = style.panels(2, 1, 9.0, 3.0 + 0.32 * len(ours.workers), sharex=True)
    above, below = panels[0][0], panels[1][0]
    for line in result.timelines:
        at_s = [(index + 0.5) * line.bin_s for index, kept in enumerate(line.kept) if kept >= 0.0]
        kept = [100.0 * each for each in line.kept if each >= 0.0]
        above.plot(at_s, kept, color=_color(result, line.name), linewidth=1.4, label=line.name)
    above.axhline(90, color="black", linewidth=0.8, linestyle=":")
    above.set(ylabel="SLO attainment, %", ylim=(-3, 103))
    above.set_title(f"{result.scenario}, {ours.rate:.2f} requests/s; below, what Diptych's workers computed")
    for panel in (above, below):
        for _, begin_s in result.boundaries[1:]:
            panel.axvline(begin_s, color=style.GRAY, linewidth=0.8)
        panel.grid(visible=False)
    _roles(below, ours)
    below.set(xlabel="seconds", xlim=(0, result.seconds))
    picture.legend(loc="outside lower center", ncols=len(result.timelines) + len(LANES), fontsize=7.5)
    return picture


def _color(result: Result, name: str) -> str:
    kind = next((each.kind for each in result.entries if each.name == name), "")
    return COLORS.get(kind, style.PURPLE)


def _roles(panel: Any, ours: Timeline) -> None:
    """One lane per worker. Each time bin shows the share of time in steps with prompts, then in other steps."""
    names = list(ours.workers)
    for lane, name in enumerate(names):
        for index, (prompts, others) in enumerate(ours.workers[name]):
            begin_s = index * ours.bin_s
            spans = [(begin_s, prompts * ours.bin_s), (begin_s + prompts * ours.bin_s, others * ours.bin_s)]
            panel.broken_barh(spans, (lane - 0.4, 0.8), facecolors=list(LANES.values()))
    for label, color in LANES.items():
        panel.barh([0], [0], color=color, label=label)
    panel.set_yticks(range(len(names)), names, fontsize=7.5)
    panel.set_ylim(len(names) - 0.4, -0.6)
