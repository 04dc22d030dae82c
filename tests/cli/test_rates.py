"""`diptych top` computes rates from two answers: never negative, unknown where counters began anew; any width holds."""

from dataclasses import replace
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from rich.console import Console

from cluster.cli.dashboard import screen, span
from cluster.cli.rates import Look, Looks, rates
from cluster.observe.history import Happening, Recent, Traffic
from cluster.policy.scaling.evidence import Decision
from cluster.policy.slo_attainment import ClassScore, GatewayAttainment, Kept
from cluster.spec import Role
from diptych.client import ClusterStatus
from diptych.view import Taken, WorkerState
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
    standing = GatewayAttainment(
        (ClassScore("chat", kept[0], Kept(*kept), Kept(), Kept()),), (("completed", completed),), (("waited", 0),)
    )
    recent = Recent(uptime_s, (("prefill-0", traffic or Traffic()),))
    told = replace(seen, workers=(first, seen.workers[1]))
    return ClusterStatus(told, "gateway-0", 1, 256, standing=standing, recent=recent)


def test_rates_are_differences_over_the_time_between() -> None:
    before = Look(10.0, status(completed=4, steps=100))
    traffic = Traffic(2, 100, 40, 30, 1, 5000)
    now = Look(12.0, status(uptime_s=102.0, completed=10, steps=140, traffic=traffic))
    told = rates(before, now)
    assert (told.requests_s, told.tokens_s, told.refused_s) == (3.0, 15.0, 0.0)
    worker = told.workers["prefill-0"]
    assert (worker.steps_s, worker.tokens_s, worker.bytes_s, worker.hit_share) == (20.0, 45.0, 2500.0, 0.4)


def test_a_gateway_that_restarted_has_no_rates_yet() -> None:
    before = Look(10.0, status(uptime_s=500.0, completed=900, traffic=Traffic(output_tokens=900)))
    told = rates(before, Look(11.0, status(uptime_s=0.5, completed=1)))
    assert (told.requests_s, told.tokens_s, told.kept_s) == (None, None, None)
    assert told.workers["prefill-0"].tokens_s is None


def test_a_worker_that_restarted_or_came_has_no_steps_per_second_yet() -> None:
    before = Look(10.0, status(steps=900))
    restarted = rates(before, Look(11.0, status(uptime_s=101.0, steps=3, incarnation="two")))
    assert restarted.workers["prefill-0"].steps_s is None and restarted.workers["decode-0"].steps_s == 0.0
    gone = replace(before.status, view=replace(before.status.view, workers=before.status.view.workers[1:]))
    came = rates(Look(10.0, gone), Look(11.0, status(uptime_s=101.0, steps=3)))
    assert came.workers["prefill-0"].steps_s is None


def test_a_worker_that_vanished_has_no_row() -> None:
    now = status(uptime_s=101.0)
    now = replace(now, view=replace(now.view, workers=now.view.workers[1:]))
    assert list(rates(Look(10.0, status()), Look(11.0, now)).workers) == ["decode-0"]


@given(COUNTS, COUNTS, COUNTS, COUNTS, st.floats(0.0, 10.0))
def test_no_rate_is_negative(one: int, other: int, bytes_one: int, bytes_other: int, seconds: float) -> None:
    before = Look(0.0, status(completed=one, steps=one, traffic=Traffic(output_tokens=one, transfer_bytes=bytes_one)))
    traffic = Traffic(output_tokens=other, transfer_bytes=bytes_other)
    told = rates(before, Look(seconds, status(completed=other, steps=other, traffic=traffic)), before)
    worker = told.workers["prefill-0"]
    found = [told.requests_s, told.tokens_s, worker.steps_s, worker.tokens_s, worker.bytes_s, worker.hit_share]
    assert all(value is None or value >= 0 for value in found)


def test_promises_are_those_of_the_last_minute() -> None:
    looks = Looks()
    for second in range(100):
        looks.add(Look(float(second), status(uptime_s=float(second), kept=(second, second // 2))))
    told = looks.rates()
    (chat,) = told.kept
    assert (told.kept_s, chat.ttft) == (60.0, Kept(60, 30))
    assert looks.rates(since_beginning=True).kept[0].ttft == Kept(99, 49)


@pytest.mark.parametrize("width", [80, 100, 120, 140])
def test_the_screen_keeps_to_its_width_and_height(width: int) -> None:
    seen = status(kept=(8, 6))
    some = [
        structs.replace(seen.view.workers[0], name=f"prefill-{n}", state=WorkerState.READY if n else WorkerState.DEAD)
        for n in range(40)
    ]
    some[1] = structs.replace(some[1], detail="lost [/bold] once")
    flip = (30.0, Happening(0, "flip", "prefill-2", "decode -> prefill"))
    refused = [(3.0 - n, Happening(0, "refused", "", "queue-full: it waits", f"req-{n}")) for n in range(3)]
    decision = Taken(Decision("flip", "decodes wait " * 20, "prefill-3", Role.DECODE), 5.0, "done")
    recent = replace(seen.recent, happenings=(flip, *refused))
    seen = replace(seen, view=replace(seen.view, workers=tuple(some)), decisions=(decision,), recent=recent)
    looks = Looks()
    looks.add(Look(0.0, seen))
    looks.add(Look(1.0, seen))
    console = Console(width=width, height=24, record=True, file=StringIO())
    console.print(screen(looks, width, 24, trouble="no answer for 3 s"))
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
    looks = Looks()
    for at_s in (0.0, 1.0):
        seen = status(completed=round(98 * at_s))
        refused = replace(seen.standing, refused=(("waited", round(12 * at_s)),), queued=37)
        looks.add(Look(at_s, replace(seen, active_requests=250, standing=refused)))
    console = Console(width=80, record=True, file=StringIO())
    console.print(screen(looks, 80, 24))
    assert "12.0 refused/s  250 of 256 in flight, 37 queued" in console.export_text()


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (59.9, "59 s"), (245, "4m05s"), (7620, "2h07m"), (273600, "3d04h")]
)
def test_spans_are_short(seconds: float, words: str) -> None:
    assert span(seconds) == words
