"""What is served for the page at /ui: its files without a key, its data with one, bounded whatever the cluster is."""

import json
import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
from msgspec import structs

from cluster.frontend.http.ui.routes import FILES, MAX_STREAMS, MAX_WORKERS
from cluster.observe.ledger import LatencyLedger
from cluster.spec import Role
from diptych.history import ClusterEvent, Recent, RequestTrace, Traffic
from diptych.view import PoolView, WorkerState
from tests.frontend.grpc.fake import FakeDispatcher, view
from tests.frontend.http.hostile import longest_callback
from tests.frontend.http.opened import Clients, opened

KEY = "a-key-that-is-long-enough"
SMALL = 256 << 10  # bytes of a status
CHEAP_S = 0.05  # of CPU, in one callback of the loop


def trace(number: int, moves: tuple[tuple[int, str], ...] = ()) -> RequestTrace:
    return RequestTrace(
        request_id=f"req-{number}",
        class_name="default",
        outcome="",
        detail="",
        arrived_ns=0,
        ledger=LatencyLedger((), (), 0, 0),
        phase="decode",
        open_ns=0,
        prompt_tokens=40,
        cached_tokens=0,
        output_tokens=7,
        attempts=1,
        prefill_worker="prefill-0",
        decode_worker="decode-0",
        moves=moves,
    )


async def test_the_page_status_equals_diptych_status(there: Clients, dispatcher: FakeDispatcher) -> None:
    pools = (PoolView("prefill", Role.PREFILL, 2, 2, 2), PoolView("decode", Role.DECODE, 1, 1, 1))
    dispatcher.view = replace(view(), pools=pools)
    dispatcher.traces = [trace(1, moves=((5, "decode-1"),))]
    dispatcher.past = Recent(
        9.0, (("decode-0", Traffic(output_tokens=70)),), ((1.5, ClusterEvent(0, "flip", "w", "t")),)
    )
    dispatcher.queued = 3
    answer = await there.http.get("/ui/status")
    status = answer.json()
    assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-store")
    received = (await there.grpc.status()).view
    assert [each["name"] for each in status["workers"]] == [each.name for each in received.workers]
    assert status["pools"][0] == {
        "name": "prefill",
        "model": "",
        "role": "prefill",
        "wanted": 2,
        "ready": 1,
        "running": 0,
        "waiting": 0,
        "used_blocks": 56,
        "total_blocks": 256,
    }
    assert status["gateway"]["queued"] == 3 and status["gateway"]["output_tokens"] == 70
    assert status["streams"][0]["decode_worker"] == "decode-1", "a stream is shown where it moved to"
    assert status["events"] == [{"age_s": 1.5, "kind": "flip", "worker": "w", "text": "t"}]


async def test_the_page_status_of_a_large_cluster_is_bounded(there: Clients, dispatcher: FakeDispatcher) -> None:
    workers = [
        structs.replace(dispatcher.view.workers[index % 2], name=f"worker-{index}", detail="x" * 300)
        for index in range(2000)
    ]
    dispatcher.view = replace(dispatcher.view, workers=tuple(workers))
    dispatcher.traces = [trace(number) for number in range(1000)]
    with longest_callback() as longest:
        answer = await there.http.get("/ui/status")
    status = answer.json()
    assert (len(status["workers"]), status["num_workers"]) == (MAX_WORKERS, 2000)
    assert len(status["streams"]) == MAX_STREAMS and sum(pool["ready"] for pool in status["pools"]) == 2000
    assert len(answer.content) < SMALL and longest.seconds < CHEAP_S, longest


async def test_pages_that_poll_share_a_status(there: Clients, dispatcher: FakeDispatcher) -> None:
    before = (await there.http.get("/ui/status")).json()
    dispatcher.view = view(WorkerState.DRAINING)
    assert (await there.http.get("/ui/status")).json() == before


async def test_page_files_load_nothing_from_other_hosts(there: Clients) -> None:
    for path, (name, kind) in FILES.items():
        answer = await there.http.get(path)
        assert (answer.status_code, answer.headers["content-type"]) == (200, kind)
        assert answer.content == files("cluster.frontend.http.ui").joinpath(name).read_bytes()
        policy = answer.headers["content-security-policy"].split("; ")
        assert policy[0] == "default-src 'self'" and "frame-ancestors 'none'" in policy
        assert "unsafe" not in " ".join(policy) and answer.headers["x-content-type-options"] == "nosniff"
        outside = {url for url in re.findall(r"https?://[^\"'\s]+", answer.text)} - {"http://www.w3.org/2000/svg"}
        assert outside == set()
    assert (await there.http.get("/ui/", follow_redirects=True)).status_code == 200


def test_names_never_become_markup() -> None:
    script = files("cluster.frontend.http.ui").joinpath("page.js").read_text()
    page = files("cluster.frontend.http.ui").joinpath("page.html").read_text()
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "DOMParser", "eval(", "Function("):
        assert way not in script
    assert not re.search(r"\son\w+=|style=|javascript:", page), "the policy forbids what stands inline"


async def test_page_data_needs_the_key_and_the_page_does_not(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"{KEY}\n")
    async with opened(FakeDispatcher(), api_keys_file=str(tmp_path / "keys")) as (there, _):
        for path in ("/ui", *FILES):
            assert (await there.http.get(path)).status_code == 200
        for path in ("/ui/status", "/ui/other", "/ui/page.js/"):
            assert (await there.http.get(path)).status_code == 401
        answer = await there.http.get("/ui/status", headers={"authorization": f"Bearer {KEY}"})
        assert answer.status_code == 200 and json.loads(answer.content)["gateway"]["name"] == "gateway-0"


@pytest.mark.parametrize("path", ["/ui", "/ui/status"])
async def test_the_page_routes_are_read_only(there: Clients, path: str) -> None:
    assert (await there.http.post(path, json={})).status_code == 405
    assert (await there.http.head(path)).status_code == 200
