"""Prints compared runs, real or simulated, and writes their report folder."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cluster.cli.screen import console, print_json, say

if TYPE_CHECKING:
    from cluster.offline.report.html import ExtraContent
    from cluster.offline.report.table import SystemResult
    from workers.request import SLO


def positive_slo(ttft_s: float | None, tpot_s: float | None) -> "SLO":
    """The SLO of --ttft and --tpot. Raises `click.UsageError` unless they are above 0."""
    from workers.request import SLO

    for name, value in (("--ttft", ttft_s), ("--tpot", tpot_s)):
        if value is not None and not 0.0 < value < float("inf"):
            raise click.UsageError(f"{name} is {value}; an SLO is above 0 seconds")
    return SLO(ttft_s, tpot_s)


def print_comparison(compared: "Sequence[SystemResult]", as_json: bool) -> None:
    """Tables, or one JSON list."""
    from cluster.offline.report.table import comparison, pools, terminal

    if as_json:
        print_json([each.as_json() for each in compared])
        return
    screen = console()
    screen.print(terminal(comparison(compared)))
    if (of_pools := pools(compared)).rows:
        screen.print(terminal(of_pools))
    for system in compared:
        for found in system.goodputs:
            screen.print(f"{system.name}: {found.summary}", markup=False)


def _file_name(name: str) -> str:
    """The system's name as a safe file name."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "system"


def write_report(
    compared: "Sequence[SystemResult]",
    out: Path,
    title: str,
    source: str,
    *,
    document: Any = None,
    notes: Sequence[str] = (),
    extra: "ExtraContent | None" = None,
) -> None:
    """Write figures.json, each picture as PNG, report.html with all of them, and a Perfetto trace of each run.

    Without matplotlib there are no pictures, and a line says so. `document` replaces the systems' figures in the JSON.
    The page has `notes` and `more`.
    """
    import json

    from cluster.offline.report import perfetto
    from cluster.offline.report.html import NO_EXTRA, page, pictures
    from cluster.offline.report.style import NoPictures, png

    extra = extra or NO_EXTRA
    out.mkdir(parents=True, exist_ok=True)
    shown = document if document is not None else [each.as_json() for each in compared]
    (out / "figures.json").write_text(json.dumps(shown, indent=2) + "\n")
    written = ["figures.json", "report.html"]
    try:
        images = {each.name: png(each.draw()) for each in (*extra.pictures, *pictures(compared))}
    except NoPictures as error:
        images = {}
        say(f"no pictures: {error}")
    (out / "report.html").write_text(page(title, compared, subtitle=source, notes=notes, images=images, extra=extra))
    for name, image in images.items():
        (out / f"{name}.png").write_bytes(image)
        written.append(f"{name}.png")
    for system in compared:
        if system.run is not None and (system.run.steps or system.run.clock == "real"):
            name = f"{_file_name(system.name)}.trace.json"
            perfetto.write(system.run, out / name)
            written.append(f"{name} (open it in ui.perfetto.dev)")
    say(f"written to {out}: {', '.join(written)}")
