"""A Gantt chart of one request's phases, with matplotlib."""

from typing import Any

from cluster.observe.ledger import TRANSFER, Span
from cluster.offline.report.spans import phases, transfer
from cluster.offline.report.style import BLUE, GREY, ORANGE, PURPLE, RED, SKY, panels, styled
from cluster.offline.scoring.records import Served

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
