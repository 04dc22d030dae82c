"""Pictures that compare systems with matplotlib: goodput, attainment and latency over the rate, requests and the SLO;
and the phases of one request.

Rates are per GPU, counting all that were provisioned.
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

from cluster.observe.ledger import TRANSFER, Span
from cluster.offline.report.spans import phases, transfer
from cluster.offline.report.style import (
    BLUE,
    COLORS,
    GRAY,
    GREEN,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    legend,
    look,
    panels,
    plain,
    styled,
)
from cluster.offline.report.table import SystemResult, unit_of
from cluster.offline.scoring.figures import Figures, Percentiles, attainment, slo_text
from cluster.offline.scoring.goodput import Goodput
from cluster.offline.scoring.records import RequestRecord, Run, latencies
from workers.request import SLO

LINES = {"p50": "-", "p90": "--", "p99": ":"}
COLUMNS = 3
# name -> figure, factor, and its SLO
METRICS: Mapping[str, tuple[Callable[[Figures], Percentiles | None], float, Callable[[SLO], float | None]]] = {
    "TTFT, s": (lambda figures: figures.ttft_s, 1.0, lambda slo: slo.ttft_s),
    "TPOT, ms": (lambda figures: figures.tpot_s, 1e3, lambda slo: slo.tpot_s),
    "E2E, s": (lambda figures: figures.e2e_s, 1.0, lambda slo: None),
}
PHASE_COLORS = {
    "admission": GRAY,
    "route": GRAY,
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
def goodput_bars(systems: Sequence[SystemResult]) -> Any:
    """Goodput per GPU for each target, with the 95 % confidence interval over seeds."""
    targets = sorted({goodput.target for system in systems for goodput in system.goodputs})
    if not targets:
        raise ValueError("no system's goodput was searched: there are no bars to draw")
    picture, ((panel,),) = panels(1, 1, 8.0, 1.7 + len(systems) * (0.2 + 0.22 * len(targets)))
    height = 0.8 / len(targets)
    for number, target in enumerate(targets):
        for row, system in enumerate(systems):
            for goodput in (each for each in system.goodputs if each.target == target):
                at = row - 0.4 + (number + 0.5) * height
                label = f"at least {100 * target:g} % of requests"
                panel.barh(at, goodput.per_gpu, height=0.9 * height, color=COLORS[number], label=label)
                _interval(panel, goodput, at)
    panel.set_yticks(range(len(systems)), [f"{each.name}\n({each.figures.provisioned})" for each in systems])
    panel.set_ylim(len(systems) - 0.5, -0.5)
    panel.margins(x=0.15)
    panel.set_xlim(left=0.0)
    panel.grid(axis="y", visible=False)
    slo = next(goodput.slo for system in systems for goodput in system.goodputs)
    panel.set(
        xlabel=f"goodput, requests/s per {unit_of(systems)} (black: 95 % CI over seeds)",
        title=f"Goodput with {slo_text(slo)}",
    )
    legend(picture, panel)
    return picture


def _interval(panel: Any, goodput: Goodput, at: float) -> None:
    low, high = goodput.low / goodput.gpus, goodput.high / goodput.gpus
    if high > low:
        panel.plot([low, high], [at, at], "|-", color="black", linewidth=1.0, markersize=5)
    label = (
        "not attainable" if goodput.unattainable else f"{'at least ' if goodput.capped else ''}{goodput.per_gpu:.3g}"
    )
    panel.annotate(label, (high, at), (5, 0), textcoords="offset points", va="center", fontsize=8)


@styled
def attainment_curves(systems: Sequence[SystemResult]) -> Any:
    """SLO attainment over the rate: the mean of all seeds, and a dot for each seed's probe."""
    targets = sorted({goodput.target for system in systems for goodput in system.goodputs})
    if not targets:
        raise ValueError("no system's goodput was searched, so there are no curves to draw")
    picture, ((panel,),) = panels(1, 1, 8.5, 4.4)
    for number, system in enumerate(systems):
        if system.goodputs:
            goodput = max(system.goodputs, key=lambda each: len(each.probes))
            style = look(number)
            curve = [(rate / goodput.gpus, 100 * attained.both) for rate, attained in goodput.curve]
            dots = [(probe.rate / goodput.gpus, 100 * probe.attained.both) for probe in goodput.probes]
            panel.plot(
                *zip(*curve, strict=True),
                **style,
                markersize=5,
                label=f"{system.name} ({goodput.provisioned})",
            )
            panel.plot(*zip(*dots, strict=True), ".", color=style["color"], alpha=0.35, markersize=4)
    for target in targets:
        panel.axhline(100 * target, color="black", linewidth=0.8, linestyle="--")
        panel.annotate(
            f"{100 * target:g} %", (1.0, 100 * target), (4, 0), ("axes fraction", "data"), "offset points", va="center"
        )
    panel.set_xscale("log")
    plain(panel.xaxis)
    panel.set_ylim(-3, 103)
    slo = next(goodput.slo for system in systems for goodput in system.goodputs)
    panel.set(
        xlabel=f"requests/s per {unit_of(systems)}",
        ylabel="SLO attainment, %",
        title=f"Attainment of {slo_text(slo)}",
    )
    legend(picture, panel)
    return picture


@styled
def scatter(runs: Sequence[Run], slo: SLO) -> Any:
    """TTFT and TPOT of every finished request, with the SLO as a box; one panel per run."""
    columns = min(COLUMNS, len(runs))
    rows = -(-len(runs) // columns)
    picture, grid = panels(rows, columns, 1.0 + 3.6 * columns, 0.9 + 3.0 * rows, sharex=True, sharey=True)
    for panel, run in zip(grid.flat, runs, strict=False):
        panel.set(xscale="log", yscale="log")
        each = latencies(run.served)
        done = each.finished & (each.output_tokens > 1)
        ttft, tpot = each.ttft_s[done], 1e3 * each.tpot_s[done]
        met = (ttft <= _bound(slo.ttft_s)) & (each.tpot_s[done] <= _bound(slo.tpot_s))
        for mask, color, marker, label in ((met, BLUE, "o", "met"), (~met, RED, "x", "missed")):
            dots = {"color": color, "markersize": 2.5, "alpha": 0.5, "rasterized": True}
            panel.plot(ttft[mask], tpot[mask], marker, label=label, **dots)
        missing = len(each.finished) - int(each.finished.sum())
        unserved = f", {missing} not served" if missing else ""
        both = attainment(run, slo).both
        panel.set_title(f"{run.system}\nSLO attainment {both:.1%}, {len(done)} shown{unserved}")
    for panel in grid.flat[len(runs) :]:
        panel.axis("off")
    for panel in grid.flat[: len(runs)]:
        _box(panel, slo)
        plain(panel.xaxis)
        plain(panel.yaxis)
    for panel in grid[:, 0]:
        panel.set_ylabel("TPOT, ms")
    for panel in grid.flat[max(0, len(runs) - columns) : len(runs)]:
        panel.set_xlabel("TTFT, s")
        panel.tick_params(labelbottom=True)
    legend(picture, grid.flat[0], markerscale=2.5)
    return picture


def _bound(seconds: float | None) -> float:
    return inf if seconds is None else seconds


def _box(panel: Any, slo: SLO) -> None:
    """The SLO as a box from the lower left corner; extends the axes beyond it."""
    ttft_s, tpot_ms = _bound(slo.ttft_s), 1e3 * _bound(slo.tpot_s)
    (left, right), (low, high) = panel.get_xlim(), panel.get_ylim()
    right, high = (max(end, 1.3 * bound) if bound < inf else end for end, bound in ((right, ttft_s), (high, tpot_ms)))
    corner = min(right, ttft_s), min(high, tpot_ms)
    panel.fill_between([left, corner[0]], low, corner[1], color=GREEN, alpha=0.12, linewidth=0, label="SLO")
    panel.plot([corner[0], corner[0], left], [low, corner[1], corner[1]], color=GREEN, linewidth=1.0)
    panel.set(xlim=(left, right), ylim=(low, high))


@styled
def latency_curves(systems: Sequence[SystemResult]) -> Any:
    """TTFT, TPOT and E2E over the offered rate: p50 solid, p90 dashed, p99 dotted."""
    swept = [system for system in systems if system.sweep]
    if not swept:
        raise ValueError("no system was run at several rates: there are no curves to draw")
    picture, grid = panels(1, len(METRICS), 11.5, 4.2)
    for panel, (label, (metric, factor, slo_of)) in zip(grid.flat, METRICS.items(), strict=True):
        for number, system in enumerate(swept):
            taken = [(each.offered_rate / each.gpus, metric(each)) for each in system.sweep]
            for name, line in LINES.items():
                points = [(rate, factor * getattr(found, name)) for rate, found in taken if found is not None]
                style = look(number) if name == "p50" else {"color": look(number)["color"]}
                panel.plot([x for x, _ in points], [y for _, y in points], **style, linestyle=line, markersize=4)
        if (bound := slo_of(swept[0].sweep[0].slo)) is not None:
            panel.axhline(factor * bound, color="black", linewidth=1.2, alpha=0.6)
        panel.set(yscale="log", title=label, xlabel=f"offered requests/s per {unit_of(systems)}")
        plain(panel.yaxis)
    _linelegend(picture, swept)
    return picture


def _linelegend(picture: Any, systems: Sequence[SystemResult]) -> None:
    from matplotlib.lines import Line2D

    looks: list[dict[str, Any]] = [
        *(
            {**look(number), "label": f"{each.name} ({each.figures.provisioned})"}
            for number, each in enumerate(systems)
        ),
        *({"color": GRAY, "linestyle": line, "label": name} for name, line in LINES.items()),
        {"color": "black", "alpha": 0.6, "linewidth": 1.2, "label": "SLO"},
    ]
    handles = [Line2D([], [], **each) for each in looks]
    picture.legend(handles=handles, loc="outside lower center", ncols=4)


@styled
def phase_bars(systems: Sequence[SystemResult]) -> Any:
    """Mean time of finished requests in each ledger phase."""
    measured = [system for system in systems if system.figures.phases_s]
    if not measured:
        raise ValueError("no request has a ledger: there are no phases to draw")
    picture, ((panel,),) = panels(1, 1, 9.0, 1.9 + 0.42 * len(measured))
    most_s = max(sum(seconds for _, seconds in system.figures.phases_s) for system in measured)
    for row, system in enumerate(measured):
        left = 0.0
        for name, seconds in system.figures.phases_s:
            label = name.replace("_", " ") if seconds > 1e-3 * most_s else None  # too narrow to see
            panel.barh(row, seconds, left=left, height=0.7, color=PHASE_COLORS[name], label=label)
            left += seconds
        panel.annotate(f"{left:.3g} s", (left, row), (4, 0), textcoords="offset points", va="center", fontsize=8)
    panel.set_yticks(range(len(measured)), [each.name for each in measured])
    panel.set_ylim(len(measured) - 0.5, -0.5)
    panel.margins(x=0.1)
    panel.grid(axis="y", visible=False)
    panel.set(xlabel="mean seconds of a finished request", title="Where the time went")
    legend(picture, panel, ncols=6)
    return picture


@styled
def request_gantt(served: RequestRecord) -> Any:
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


def _rows(served: RequestRecord) -> list[Span]:
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
    return {"color": PHASE_COLORS[span.name], "linewidth": 1.0}  # so that the shortest phase is visible


def _label(span: Span) -> str:
    return "transfer, elapsed" if span.name == TRANSFER else span.name.replace("_", " ")


def _time(ns: float) -> str:
    ms = ns / 1e6
    return f"{ms / 1e3:.3g} s" if ms >= 1e4 else f"{ms:.0f} ms" if ms >= 100.0 else f"{ms:.3g} ms"


def _title(served: RequestRecord) -> str:
    where = " to ".join(dict.fromkeys(filter(None, (served.prefill_worker, served.decode_worker))))
    asked = f"Request {served.index}: {served.prompt_tokens} prompt tokens, {len(served.token_s)} answered"
    took = f"TTFT {_time(1e9 * (served.ttft_s or 0.0))} (dashed), TPOT {_time(1e9 * (served.tpot_s or 0.0))}"
    return f"{asked}{where and ', '}{where}\n{took}"
