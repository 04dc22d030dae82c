"""Gantt charts with matplotlib: one request's phases, and the steps of workers."""

from collections.abc import Sequence
from typing import Any

from cluster.observe.ledger import TRANSFER, Span
from cluster.offline.report.spans import lanes, middle, phases, transfer
from cluster.offline.report.style import BLUE, GREY, ORANGE, PURPLE, RED, SKY, YELLOW, panels, styled
from cluster.offline.scoring.records import Run, Served, StepRecord

PHASE_COLOURS = {
    "admission": GREY,
    "route": GREY,
    "reserve": "#B0B0B0",
    "prefill_queue": SKY,
    "prefill_compute": BLUE,
    "prefill_wire": "#C8D8E8",
    "transfer_wait": PURPLE,
    "decode_queue": ORANGE,
    "decode_compute": RED,
    "decode_wire": "#F0D8C8",
    "recovery": "#000000",
}
PREFILL, MIXED, DECODE = "prompts only", "prompts and decodes", "decodes only"
STEP_COLOURS = {PREFILL: BLUE, MIXED: YELLOW, DECODE: RED}
MAX_WORKERS = 24
ANNOTATION: dict[str, Any] = {"va": "center", "fontsize": 8, "bbox": {"color": "white", "pad": 0.5, "alpha": 0.8}}


@styled
def request_gantt(served: Served) -> Any:
    """One row for each ledger phase, a row for the KV handoff, and a tick for each token."""
    rows = _rows(served)
    picture, ((panel,),) = panels(1, 1, 8.5, 1.6 + 0.27 * (len(rows) + 1))
    begin_ns = served.arrival_s * 1e9
    unit, unit_ns = ("s", 1e9) if rows[-1].end_ns - begin_ns > 10e9 else ("ms", 1e6)
    for row, span in enumerate(rows):
        left, width = (span.begin_ns - begin_ns) / unit_ns, (span.end_ns - span.begin_ns) / unit_ns
        panel.barh(row, width, left=left, height=0.7, **_bar_style(span))
        panel.annotate(
            _time(span.end_ns - span.begin_ns), (left + width, row), (4, 0), textcoords="offset points", **ANNOTATION
        )
    tokens = [1e9 / unit_ns * (at - served.arrival_s) for at in served.token_s]
    panel.plot(tokens, [len(rows)] * len(tokens), "|", color="black")
    panel.axvline(tokens[0], color="black", linewidth=0.8, linestyle="--", zorder=0.5)
    panel.set_yticks(range(len(rows) + 1), [*(_label(span) for span in rows), "tokens"])
    panel.invert_yaxis()
    panel.margins(x=0.12)
    panel.set_xlim(left=0.0)
    panel.grid(axis="y", visible=False)
    panel.set(xlabel=f"{unit} since the request arrived", title=_title(served))
    return picture


def _rows(served: Served) -> list[Span]:
    """The phases up to the first token, the KV handoff, the later phases."""
    spans, moved = phases(served), transfer(served)
    if served.ledger is None or not spans:
        raise ValueError(f"request {served.index} was {served.outcome.value} and has no ledger: nothing to draw")
    first_ns = round(served.arrival_s * 1e9) + served.ledger.ttft_ns
    split = sum(span.end_ns <= first_ns for span in spans)
    return [*spans[:split], *([moved] if moved else []), *spans[split:]]


def _bar_style(span: Span) -> dict[str, Any]:
    if span.name == TRANSFER:
        return {"hatch": "////", "facecolor": "white", "edgecolor": PURPLE}
    return {"color": PHASE_COLOURS[span.name], "linewidth": 1.0}  # so that the shortest phase is visible


def _label(span: Span) -> str:
    return "transfer, elapsed" if span.name == TRANSFER else span.name.replace("_", " ")


def _time(ns: float) -> str:
    ms = ns / 1e6
    return f"{ms / 1e3:.3g} s" if ms >= 1e4 else f"{ms:.0f} ms" if ms >= 100.0 else f"{ms:.3g} ms"


def _title(served: Served) -> str:
    where = " to ".join(dict.fromkeys(filter(None, (served.prefill_worker, served.decode_worker))))
    asked = f"Request {served.index}: {served.prompt_tokens} prompt tokens, {len(served.token_s)} answered"
    took = f"TTFT {_time(1e9 * (served.ttft_s or 0.0))} (dashed), TPOT {_time(1e9 * (served.tpot_s or 0.0))}"
    return f"{asked}{where and ', '}{where}\n{took}"


@styled
def pool_gantt(run: Run, window: tuple[float, float] | None = None) -> Any:
    """Every worker's steps, coloured by their contents; steps in flight at the same time are stacked.

    `window`: begin and end in seconds on the run's clock; None: around the middle. Shows at most 24 workers.
    """
    if not run.steps:
        raise ValueError(f"the run of {run.system} was not traced: it has no steps to draw")
    begin_s, end_s = window or middle(run)
    names = list(dict.fromkeys(each.name for each in run.workers)) or sorted({step.worker for step in run.steps})
    shown = _sampled(names)
    picture, ((panel,),) = panels(1, 1, 10.0, 1.6 + 0.34 * len(shown))
    seen = [step for step in run.steps if step.end_s > begin_s and step.begin_s < end_s]
    for row, name in enumerate(shown):
        laid = lanes(step for step in seen if step.worker == name)
        height = 0.8 / (1 + max((lane for lane, _ in laid), default=0))
        for kind, colour in STEP_COLOURS.items():
            for lane in {lane for lane, step in laid if _kind(step) == kind}:
                bars = [(s.begin_s, s.end_s - s.begin_s) for at, s in laid if at == lane and _kind(s) == kind]
                below = row - 0.4 + lane * height
                panel.broken_barh(bars, (below, height), facecolor=colour, edgecolor="white", linewidth=0.3)
    panel.set_yticks(range(len(shown)), shown)
    panel.set_ylim(len(shown) - 0.4, -0.6)
    panel.set_xlim(begin_s, end_s)
    panel.grid(axis="y", visible=False)
    some = "" if len(shown) == len(names) else f", {len(shown)} of {len(names)} workers"
    panel.set(xlabel=f"s, {run.clock} time", title=f"{run.system} on {run.workload}: steps{some}")
    _legend(picture)
    return picture


def _sampled(names: Sequence[str]) -> list[str]:
    """At most `MAX_WORKERS` names, evenly spaced, so that every large pool is included."""
    if len(names) <= MAX_WORKERS:
        return list(names)
    return [names[number * len(names) // MAX_WORKERS] for number in range(MAX_WORKERS)]


def _kind(step: StepRecord) -> str:
    if not step.prompt_tokens:
        return DECODE
    return MIXED if step.batch else PREFILL


def _legend(picture: Any) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(facecolor=colour, label=kind) for kind, colour in STEP_COLOURS.items()]
    picture.legend(handles=patches, loc="outside lower center", ncols=len(patches))
