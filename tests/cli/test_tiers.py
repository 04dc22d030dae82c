"""Tiers of the prefix cache: what `diptych status` and `diptych top` say of them, over the wire too."""

from dataclasses import replace
from io import StringIO

from msgspec import structs
from rich.console import Console

from cluster.cli.dashboard import screen
from cluster.cli.rates import Snapshot, StatusWindow
from cluster.cli.tiers import tier_lines, tier_problems, tiers_table
from diptych.client import ClusterStatus
from diptych.v1 import admin_pb2
from diptych.view import ClusterView, TierStats
from tests.frontend.grpc.fake import view

HOST = TierStats("host", 120, 1000, 737_280, 300, 5_000_000, 9_000_000, saved_s=2.25, lent_tokens=16)
DISK = TierStats("disk", 0, 2000, 737_280, 40, dropped_blocks=7)
STOPPED = structs.replace(DISK, blocks=3, failures=3, problem="writes stopped: [Errno 5] Input/output error")
FETCHED: dict[str, float] = {"fetched_tokens": 20, "fetched_saved_s": 0.5, "device_saved_s": 1.0}


def seen(*tiers: TierStats) -> ClusterView:
    """The prefill worker has tiers."""
    plain = view()
    stats = structs.replace(plain.workers[0].stats, sought_tokens=900, found_tokens=420, tiers=tiers, **FETCHED)
    return replace(plain, workers=(structs.replace(plain.workers[0], stats=stats), *plain.workers[1:]))


def text_of(content: object) -> str:
    console = Console(width=200, record=True, file=StringIO())
    console.print(content)
    return console.export_text()


def test_tiers_arrive_as_they_were_sent() -> None:
    sent = ClusterStatus(seen(HOST, STOPPED), "gateway-0", 0, 1)
    message = admin_pb2.GetClusterResponse.FromString(sent.message().SerializeToString())
    stats = ClusterStatus.read(message).view.workers[0].stats
    assert stats.tiers == (HOST, STOPPED)
    assert (stats.sought_tokens, stats.found_tokens, stats.device_hit_tokens) == (900, 420, 60)
    assert [(each.name, each.hit_tokens, each.saved_s, each.lent_tokens) for each in stats.sources] == [
        ("device", 60, 1.0, 0), ("fetched", 20, 0.5, 0), ("host", 300, 2.25, 16), ("disk", 40, 0.0, 0),
    ]  # fmt: skip


def test_a_table_has_each_tier_of_each_worker() -> None:
    rows = [line.split() for line in text_of(tiers_table(seen(HOST, STOPPED))).splitlines()]
    host = [
        "host",
        "120",
        "1000",
        "737.3",
        "MB",
        "300",
        "tok",
        "2.2",
        "s",
        "16",
        "tok",
        "5.0",
        "MB",
        "9.0",
        "MB",
        "0",
        "0",
        "0",
    ]
    assert host in rows
    assert [row[:2] for row in rows if row[1:2] == ["device"]] == [["prefill-0", "device"], ["decode-0", "device"]]
    assert next(row[-2:] for row in rows if row[:2] == ["prefill-0", "device"]) == ["1.0", "s"]
    assert ["fetched", "20", "tok", "0.5", "s"] in rows and sum(row[:1] == ["fetched"] for row in rows) == 1


def test_a_tier_that_stopped_or_stores_nothing_is_named() -> None:
    assert [*tier_problems(seen(HOST, STOPPED))] == [f"prefill-0: disk cache: {STOPPED.problem}"]
    assert [*tier_problems(seen(HOST, DISK))] == ["prefill-0: disk cache: stores nothing: dropped 7 blocks"]
    assert not [*tier_problems(seen(HOST, structs.replace(DISK, dropped_blocks=0)))]


def test_top_has_a_line_for_a_pool_with_tiers() -> None:
    (line,) = tier_lines(seen(HOST, STOPPED))
    blocks, hits = "host 120/1000 blocks, disk 3/2000 blocks", "device 60, fetched 20, host 300, disk 40"
    assert line == f"prefill cache: {blocks}; tokens found: {hits}; saved 3.8 s"
    assert not [*tier_lines(seen())]
    snapshots = StatusWindow()
    snapshots.add(Snapshot(0.0, ClusterStatus(seen(HOST, STOPPED), "gateway-0", 0, 1)))
    shown = text_of(screen(snapshots, 200, once=True))
    assert line in shown and STOPPED.problem in shown
