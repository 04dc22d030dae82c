"""The campaign as pictures, from its record alone: the same record gives the same bytes. Needs matplotlib, an extra."""

from pathlib import Path
from typing import Any

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
LOOKS = {
    OURS: style.GREEN,
    SPLIT: style.BLUE,
    COLOCATED: style.ORANGE,
    SYSTEM: style.GREY,
    ROUTER: style.SKY,
    TIMETABLE: "#555555",
    PER_PHASE: "#000000",
}
LANES = {"steps with prompts": style.RED, "steps of decodes only": style.SKY}
COLUMNS = 3
HEADLINE = "phases-a100"
HEADLINE_NAMES = {OURS: "Diptych", SYSTEM: "best other system", SPLIT: "best static split", COLOCATED: "best colocated"}


def missing() -> str:
    """Why nothing can be drawn; empty when it can."""
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


@style.drawn
def _goodputs(found: Record) -> Any:
    """Bars by workload, ours first, with intervals."""
    rows = -(-len(found.results) // COLUMNS)
    most = max(len(result.entries) for result in found.results)
    picture, panels = style.panels(rows, COLUMNS, 12.0, (0.8 + 0.15 * most) * rows)
    cells = list(panels.flat)
    for panel, result in zip(cells, found.results, strict=False):
        shown = sorted(result.entries, key=lambda each: each.rate)
        gpus = result.gpus
        rates = [each.rate / gpus for each in shown]
        off = [[(each.rate - each.low) / gpus for each in shown], [(each.high - each.rate) / gpus for each in shown]]
        panel.barh(range(len(shown)), rates, color=[LOOKS[each.kind] for each in shown])
        panel.set_yticks(range(len(shown)), [_label(each) for each in shown])
        panel.errorbar(rates, range(len(shown)), xerr=off, fmt="none", ecolor="black", elinewidth=0.8, capsize=2)
        panel.set(title=result.scenario)
        panel.tick_params(axis="y", labelsize=6.5, length=0)
        panel.margins(y=0.01)
        panel.grid(axis="y", visible=False)
    for panel in cells[len(found.results) :]:
        panel.axis("off")
    picture.supxlabel("goodput, requests/s and GPU, 90 % keep both promises; *: first seed alone")
    return picture


@style.drawn
def _headline(result: Result) -> Any:
    """For a narrow page: goodput of ours beside the best of each kind, and what our workers computed over time."""
    kinds = list(reversed(HEADLINE_NAMES))
    best = [max((each for each in result.entries if each.kind == kind), key=lambda each: each.rate) for kind in kinds]
    picture, panels = style.panels(2, 1, 8.0, 5.2)
    above, below = panels[0][0], panels[1][0]
    rates = [each.rate for each in best]
    off = [[each.rate - each.low for each in best], [each.high - each.rate for each in best]]
    above.barh(range(len(best)), rates, xerr=off, capsize=3, color=[LOOKS[kind] for kind in kinds])
    for lane, rate in enumerate(rates):
        above.text(0.06, lane, f"{rate:.2f}", va="center", color="white", fontweight="bold", fontsize=12)
    named = [
        HEADLINE_NAMES[kind] + ("" if kind in (OURS, COLOCATED) else f"\n({each.name})")
        for kind, each in zip(kinds, best, strict=True)
    ]
    above.set_yticks(range(len(best)), named, fontsize=11)
    above.grid(axis="y", visible=False)
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


def _label(entry: Entry) -> str:
    name = f"router {entry.name.partition(' on ')[0]}" if entry.kind == ROUTER else entry.name
    alone = "" if len(entry.by_seed) > 1 else " *"
    return {OURS: "ours", TIMETABLE: "by timetable", PER_PHASE: "best per phase"}.get(entry.kind, name) + alone


@style.drawn
def _over_time(result: Result) -> Any:
    """Above, who keeps how many promises; below, what each of our workers spends its time on."""
    ours = result.timelines[0]
    picture, panels = style.panels(2, 1, 9.0, 3.0 + 0.32 * len(ours.workers), sharex=True)
    above, below = panels[0][0], panels[1][0]
    for line in result.timelines:
        at_s = [(index + 0.5) * line.bin_s for index, kept in enumerate(line.kept) if kept >= 0.0]
        kept = [100.0 * each for each in line.kept if each >= 0.0]
        above.plot(at_s, kept, color=_colour(result, line.name), linewidth=1.4, label=line.name)
    above.axhline(90, color="black", linewidth=0.8, linestyle=":")
    above.set(ylabel="kept, % of arrivals", ylim=(-3, 103))
    above.set_title(f"{result.scenario}, {ours.rate:.2f} requests/s; below, what workers of ours did")
    for panel in (above, below):
        for _, begin_s in result.boundaries[1:]:
            panel.axvline(begin_s, color=style.GREY, linewidth=0.8)
        panel.grid(visible=False)
    _roles(below, ours)
    below.set(xlabel="seconds", xlim=(0, result.seconds))
    picture.legend(loc="outside lower center", ncols=len(result.timelines) + len(LANES), fontsize=7.5)
    return picture


def _colour(result: Result, name: str) -> str:
    kind = next((each.kind for each in result.entries if each.name == name), "")
    return LOOKS.get(kind, style.PURPLE)


def _roles(panel: Any, ours: Timeline) -> None:
    """One lane a worker: in each bin, the share in steps with prompts from the left, that in other steps behind it."""
    names = list(ours.workers)
    for lane, name in enumerate(names):
        for index, (prompts, others) in enumerate(ours.workers[name]):
            begin_s = index * ours.bin_s
            spans = [(begin_s, prompts * ours.bin_s), (begin_s + prompts * ours.bin_s, others * ours.bin_s)]
            panel.broken_barh(spans, (lane - 0.4, 0.8), facecolors=list(LANES.values()))
    for told, colour in LANES.items():
        panel.barh([0], [0], color=colour, label=told)
    panel.set_yticks(range(len(names)), names, fontsize=7.5)
    panel.set_ylim(len(names) - 0.4, -0.6)
