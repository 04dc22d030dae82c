"""The rules of the Trace Event Format by which Perfetto lays a trace out."""

from collections import defaultdict
from itertools import pairwise
from typing import Any

# phase of an event -> its keys beside ph, pid, tid
SCHEMA = {
    "M": {"name", "args"},
    "X": {"name", "cat", "ts", "dur", "args"},
    "b": {"name", "cat", "ts", "id"},
    "e": {"name", "cat", "ts", "id"},
    "s": {"name", "cat", "ts", "id"},
    "f": {"name", "cat", "ts", "id", "bp"},
    "i": {"name", "cat", "ts", "s", "args"},
    "C": {"name", "ts", "args"},
}


def check(events: list[dict[str, Any]]) -> None:
    """Keys, types, and everything that Perfetto drops or draws wrongly when it does not hold."""
    slices: dict[int, list[tuple[int, int]]] = defaultdict(list)
    owners: dict[int, int] = {}
    stacks: dict[tuple[str, str], list[str]] = defaultdict(list)
    latest: dict[tuple[str, str], int] = defaultdict(int)
    for event in events:
        assert set(event) - {"ph", "pid", "tid", "args"} >= SCHEMA[event["ph"]] - {"args"}
        assert all(type(event[key]) is int for key in ("pid", "tid", "ts", "dur") if key in event)
        if event["ph"] == "X":
            assert event["dur"] >= 0 and owners.setdefault(event["tid"], event["pid"]) == event["pid"]
            slices[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] in "be":
            track = event["cat"], event["id"]
            assert event["ts"] >= latest[track], "a track's events come in the order of time"
            latest[track] = event["ts"]
            if event["ph"] == "b":
                stacks[track].append(event["name"])
            else:
                assert stacks[track].pop() == event["name"]
    assert not any(stacks.values())
    for taken in slices.values():
        taken.sort()
        assert all(sooner[1] <= later[0] for sooner, later in pairwise(taken))
    for event in events:
        if event["ph"] in "sf":
            assert any(begin <= event["ts"] <= end for begin, end in slices[event["tid"]])
