"""The trace keeps the rules of the Trace Event Format by which Perfetto lays it out."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.offline.report.perfetto import REQUESTS, write
from cluster.offline.scoring.records import Run, StepRecord
from tests.offline.report.trace_rules import check
from tests.offline.scoring.made import refused, split_run


def written(run: Run, folder: Path) -> list[dict[str, Any]]:
    path = folder / "deep" / "trace.json"
    count = write(run, path)
    document = json.loads(path.read_text())
    assert set(document) == {"displayTimeUnit", "otherData", "traceEvents"}
    events: list[dict[str, Any]] = document["traceEvents"]
    assert len(events) == count
    return events


def test_a_split_run_has_workers_steps_requests_phases_and_arrows(tmp_path: Path) -> None:
    run = split_run(4)
    events = written(run, tmp_path)
    check(events)
    names = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert list(names) == ["requests of split by hand", "prefill-0", "decode-0"]
    steps = [event for event in events if event["ph"] == "X"]
    assert len(steps) == len(run.steps)
    assert {event["pid"] for event in steps} == {names["prefill-0"], names["decode-0"]}
    begun = [event["name"] for event in events if event["ph"] == "b"]
    assert begun.count("prefill_compute") == begun.count("transfer_wait") == 4
    assert all(f"request {n}" in begun and f"transfer {n}" in begun for n in range(4))
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert set(starts) == set(ends) and len(starts) == 4
    for number, start in starts.items():
        assert (start["pid"], ends[number]["pid"]) == (names["prefill-0"], names["decode-0"])
        assert start["ts"] < ends[number]["ts"]


def test_times_are_those_of_the_run_in_microseconds(tmp_path: Path) -> None:
    run = split_run(1)
    events = written(run, tmp_path)
    step = next(event for event in events if event["ph"] == "X")
    assert (step["ts"], step["dur"]) == (round(run.steps[0].begin_s * 1e6), 40_000)
    request = next(event for event in events if event["ph"] == "b")
    assert request["pid"] == REQUESTS and request["ts"] == 1_000_000
    assert request["args"]["ttft_ms"] == pytest.approx(50.0)


def test_steps_in_flight_at_once_lie_on_threads_of_their_own(tmp_path: Path) -> None:
    steps = tuple(StepRecord("prefill-0", 0.1 * n, 0.1 * n + 0.15, 8, 1, (0,)) for n in range(6))
    events = written(replace(split_run(1), steps=steps), tmp_path)
    check(events)
    assert len({event["tid"] for event in events if event["ph"] == "X"}) == 2
    named = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert sorted(named.values()) == ["engine", "engine", "engine, lane 1"]  # the decode worker has one too


def test_an_arrow_leaves_the_last_prefill_step_and_enters_the_first_decode_step(tmp_path: Path) -> None:
    chunks = tuple(StepRecord("prefill-0", 1.0 + 0.1 * n, 1.1 + 0.1 * n, 64, 0, (0,)) for n in range(3))
    decodes = tuple(StepRecord("decode-0", 1.4 + 0.1 * n, 1.5 + 0.1 * n, 0, 1, (0,)) for n in range(3))
    events = written(replace(split_run(1), steps=chunks + decodes), tmp_path)
    check(events)
    start, end = (event["ts"] for event in events if event["ph"] in "sf")
    assert 1_200_000 < start < 1_300_000 and end == 1_400_000


def test_a_run_without_steps_and_requests_without_tokens_can_be_opened(tmp_path: Path) -> None:
    run = replace(split_run(2), steps=(), served=(refused(0, 0.5), split_run(2).served[1]))
    events = written(run, tmp_path)
    check(events)
    assert not [event for event in events if event["ph"] in "Xsf"]
    ending = next(event for event in events if event["name"] == "request 0")
    assert ending["args"]["ending"] == "rejected"


def test_a_colocated_run_has_no_arrows(tmp_path: Path) -> None:
    run = split_run(2)
    together = tuple(replace(each, decode_worker="prefill-0") for each in run.served)
    events = written(replace(run, served=together), tmp_path)
    check(events)
    assert not [event for event in events if event["ph"] in "sf"]


def test_times_since_a_boot_long_ago_stay_exact(tmp_path: Path) -> None:
    run = split_run(3)
    shifted = tuple(
        replace(each, arrival_s=each.arrival_s + 1e7, token_s=[at + 1e7 for at in each.token_s]) for each in run.served
    )
    steps = tuple(replace(each, begin_s=each.begin_s + 1e7, end_s=each.end_s + 1e7) for each in run.steps)
    check(written(replace(run, served=shifted, steps=steps), tmp_path))
