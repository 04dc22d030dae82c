"""`diptych top` computes rates from two snapshots: never negative, None after a restart; the screen fits any width."""

from dataclasses import replace
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from rich.console import Console

from cluster.cli.dashboard import duration_text, screen
from cluster.cli.rates import Snapshot, StatusWindow, rates
from cluster.policy.slo_attainment import ClassScore, GatewayAttainment, SLOCount
from cluster.spec import Role
from diptych.client import ClusterStatus
from diptych.history import ClusterEvent, Recent, Traffic
from diptych.view import Decision, DecisionRecord, WorkerState
from tests.frontend.grpc.fake import view

COUNTS = st.integers(0, 1000)


def status(
    *,
    uptime_s: float = 100.0,
    completed: int = 0,
    steps: int = 0,
    traffic: Traffic | None = None,
    kept: tuple[int, int] = (0, 0),
    incarnation: str = "one",
) -> ClusterStatus:
    """Traffic and steps are those of prefill-0."""
    seen = view()
    first = seen.workers[0]
    first = structs.replace(first, incarnation=incarnation, stats=structs.replace(first.stats, steps=steps))
    attainment = GatewayAttainment(
        (ClassScore("chat", kept[0], SLOCount(*kept), SLOCount(), SLOCount()),),
        (("completed", completed),),
        (("waited", 0),),
    )
    recent = Recent(uptime_s, (("prefill-0", traffic or Traffic()),))
    found = replace(seen, workers=(first, seen.workers[1]))
    return ClusterStatus(found, "gateway-0", 1, 256, slo_attainment=attainment, recent=recent)


def test_rates_are_differences_divided_by_time() -> None:
    before = Snapshot(10.0, status(completed=4, steps=100))
    traffic = Traffic(2, 100, 40, 30, 1, 5000)
    now = Snapshot(12.0, status(uptime_s=102.0, completed=10, steps=140, traffic=traffic))
    found = rates(before, now)
    assert (found.requests_s, found.tokens_s, found.refused_s) == (3.0, 15.0, 0.0)
    worker = found.workers["prefill-0"]
    assert (worker.steps_s, worker.tokens_s, worker.bytes_s, worker.hit_share) == (20.0, 45.0, 2500.0, 0.4)


def test_a_gateway_that_restarted_has_no_rates_yet() -> None:
    before = Snapshot(10.0, status(uptime_s=500.0, completed=900, traffic=Traffic(output_tokens=900)))
    found = rates(before, Snapshot(11.0, status(uptime_s=0.5, completed=1)))
    assert (found.requests_s, found.tokens_s, found.kept_s) == (None, None, None)
    assert found.workers["prefill-0"].tokens_s is None


def test_a_new_or_restarted_worker_has_no_steps_per_second_yet() -> None:
    before = Snapshot(10.0, status(steps=900))
    restarted = rates(before, Snapshot(11.0, status(uptime_s=101.0, steps=3, incarnation="two")))
    assert restarted.workers["prefill-0"].steps_s is None and restarted.workers["decode-0"].steps_s == 0.0
    gone = replace(before.status, view=replace(before.status.view, workers=before.status.view.workers[1:]))
    came = rates(Snapshot(10.0, gone), Snapshot(11.0, status(uptime_s=101.0, steps=3)))
    assert came.workers["prefill-0"].steps_s is None


def test_a_worker_that_vanished_has_no_row() -> None:
    now = status(uptime_s=101.0)
    now = replace(now, view=replace(now.view, workers=now.view.workers[1:]))
    assert list(rates(Snapshot(10.0, status()), Snapshot(11.0, now)).workers) == ["decode-0"]


@given(COUNTS, COUNTS, COUNTS, COUNTS, st.floats(0.0, 10.0))
def test_no_rate_is_negative(one: int, other: int, bytes_one: int, bytes_other: int, seconds: float) -> None:
    before = Snapshot(
        0.0, status(completed=one, steps=one, traffic=Traffic(output_tokens=one, transfer_bytes=bytes_one))
    )
    traffic = Traffic(output_tokens=other, transfer_bytes=bytes_other)
    found = rates(before, Snapshot(seconds, status(completed=other, steps=other, traffic=traffic)), before)
    worker = found.workers["prefill-0"]
    values = [found.requests_s, found.tokens_s, worker.steps_s, worker.tokens_s, worker.bytes_s, worker.hit_share]
    assert all(value is None or value >= 0 for value in values)


def test_slo_attainment_covers_the_last_minute() -> None:
    snapshots = StatusWindow()
    for second in range(100):
        snapshots.add(Snapshot(float(second), status(uptime_s=float(second), kept=(second, second // 2))))
    found = snapshots.rates()
    (chat,) = found.kept
    assert (found.kept_s, chat.ttft) == (60.0, SLOCount(60, 30))
    assert snapshots.rates(since_beginning=True).kept[0].ttft == SLOCount(99, 49)


@pytest.mark.parametrize("width", [80, 100, 120, 140])
def test_the_screen_fits_its_width_and_height(width: int) -> None:
    seen = status(kept=(8, 6))
    some = [
        structs.replace(seen.view.workers[0], name=f"prefill-{n}", state=WorkerState.READY if n else WorkerState.DEAD)
        for n in range(40)
    ]
    some[1] = structs.replace(some[1], detail="lost [/bold] once")
    flip = (30.0, ClusterEvent(0, "flip", "prefill-2", "decode -> prefill"))
    refused = [(3.0 - n, ClusterEvent(0, "refused", "", "queue-full: it waits", f"req-{n}")) for n in range(3)]
    decision = DecisionRecord(Decision("flip", "decodes wait " * 20, "prefill-3", Role.DECODE), 5.0, "done")
    recent = replace(seen.recent, events=(flip, *refused))
    seen = replace(seen, view=replace(seen.view, workers=tuple(some)), decisions=(decision,), recent=recent)
    snapshots = StatusWindow()
    snapshots.add(Snapshot(0.0, seen))
    snapshots.add(Snapshot(1.0, seen))
    console = Console(width=width, height=24, record=True, file=StringIO())
    console.print(screen(snapshots, width, 24, trouble="no answer for 3 s"))
    lines = console.export_text().splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= width
    text = "\n".join(lines)
    for words in (
        "prefill-0",
        "dead",
        "and ",
        "more",
        "done: prefill-3 -> decode",
        "refused (and 2 more): req-2: queue-full",
        "flip: prefill-2",
        "[/bold]",
    ):
        assert words in text, words
    assert ("steps/s" in text) == (width >= 120)


def test_in_80_columns_a_busy_gateway_shows_its_queue() -> None:
    snapshots = StatusWindow()
    for at_s in (0.0, 1.0):
        seen = status(completed=round(98 * at_s))
        refused = replace(seen.slo_attainment, refused=(("waited", round(12 * at_s)),), queued=37)
        snapshots.add(Snapshot(at_s, replace(seen, active_requests=250, slo_attainment=refused)))
    console = Console(width=80, record=True, file=StringIO())
    console.print(screen(snapshots, 80, 24))
    assert "12.0 refused/s  250 of 256 in flight, 37 queued" in console.export_text()


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (59.9, "59 s"), (245, "4m05s"), (7620, "2h07m"), (273600, "3d04h")]
)
def test_durations_are_short(seconds: float, words: str) -> None:
    assert duration_text(seconds) == words
