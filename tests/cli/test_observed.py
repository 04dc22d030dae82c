"""`top` and `trace` of a running cluster, and following one request through its logs with grep."""

import asyncio
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from cluster.cli import main
from cluster.frontend.grpc.server import GrpcServer
from diptych.client import AsyncClient
from tests.frontend.grpc.fake import FakeDispatcher, gateway_context
from tests.frontend.tokenizers import ByteTokenizer
from tests.model.tiny import write_tiny_llama
from tests.offline.report.trace_rules import check

START_S = 60.0
MARK = "zebra"  # of a prompt
ENGINE = {"block_size": 8, "kv_blocks": 96, "max_batch_tokens": 64, "max_running": 8, "threads": 1}


@dataclass
class Served:
    endpoint: str
    log: Path

    def run(self, *arguments: str) -> Result:
        command, *options = arguments
        return CliRunner().invoke(main, [command, "--endpoint", self.endpoint, *options])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`diptych serve` as a process, with one prefill and two decode workers in it."""
    folder = tmp_path_factory.mktemp("observed")
    pools = [
        {"name": "prefill", "role": "prefill", "engine": ENGINE},
        {"name": "decode", "role": "decode", "replicas": 2, "engine": ENGINE},
    ]
    gateway = {"slo": {"ttft_s": 30.0, "tpot_s": 10.0}}
    model = str(write_tiny_llama(folder / "tiny"))
    document = {"name": "observed", "model": model, "pools": pools, "gateway": gateway | {"routing": "least-loaded"}}
    (folder / "cluster.yaml").write_text(yaml.safe_dump(document | {"transfer": {"backends": ["tcp"]}}))
    command = [sys.executable, "-m", "cluster.cli", "serve", "-f", str(folder / "cluster.yaml"), "--port", "0"]
    log = folder / "log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*command, "--runtime", "local", "--log-format", "json"],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
    try:
        assert process.stdout is not None
        overdue = threading.Timer(START_S, process.kill)
        overdue.start()
        ready = next((line for line in process.stdout if line.startswith("ready: grpc://")), "")
        overdue.cancel()
        assert ready, log.read_text()
        subject = Served(ready.split("//")[1].strip(), log)
        asyncio.run(ask(subject.endpoint))
        yield subject
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(START_S) == 0


async def ask(endpoint: str) -> None:
    async with AsyncClient(endpoint) as client:
        for n in range(3):
            await client.complete(f"the {MARK} {n}", max_tokens=8, ignore_eos=True, request_id=f"first-{n}")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- logs --------------------------------------------------------------------------------------------------------


def test_grep_finds_a_request_in_the_logs_of_gateway_and_workers(served: Served) -> None:
    grep = subprocess.run(
        ["grep", '"request_id": "first-1"', str(served.log)], capture_output=True, text=True, check=True
    )
    records = [json.loads(line) for line in grep.stdout.splitlines()]
    assert [each["time"] for each in records] == sorted(each["time"] for each in records)
    way = list(dict.fromkeys(each["component"] for each in records))
    decode = next(each["decode_worker"] for each in records if "decode_worker" in each)
    assert set(way) == {"gateway-0", "prefill-0", decode} and decode.startswith("decode-")
    events = [(each["component"], each["event"]) for each in records]
    order = [
        (decode, "is reserved"),
        ("gateway-0", f"request first-1 goes to prefill-0 and {decode}"),
        ("prefill-0", "request first-1: prefill of"),
        (decode, "request first-1: decode after"),
        ("gateway-0", "request first-1 completed after 8 tokens"),
    ]
    places = [
        next(n for n, (who, event) in enumerate(events) if who == whose and words in event) for whose, words in order
    ]
    assert places == sorted(places), events
    assert any("bytes of KV arrived from prefill-0" in event for _, event in events)
    assert records[places[-1]]["output_tokens"] == 8 and records[places[-1]]["outcome"] == "completed"


def test_every_log_line_has_time_level_component_and_event_and_no_prompt(served: Served) -> None:
    records = lines(served.log)
    assert records
    for each in records:
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", each["time"]) and each["event"]
        assert each["level"] in ("debug", "info", "warning", "error") and each["component"]
    assert MARK not in served.log.read_text()


# ---- top ---------------------------------------------------------------------------------------------------------


def test_top_shows_pools_workers_and_slo_attainment(served: Served) -> None:
    shown = served.run("top", "--interval", "0.2")
    assert shown.exit_code == 0, shown.output
    rows = {line.split()[0]: line.split() for line in shown.stdout.splitlines() if line}
    assert rows["prefill-0"][1:5] == ["prefill", "ready", "0", "0"] and rows["decode"][2:5] == ["2", "of", "2"]
    assert "decode-1" in rows and rows["observed"][1] == "model"
    assert "SLO attainment, since the gateway started: default TTFT 100% of 3 TPOT 100% of 3" in shown.stdout


def test_cache_status_shows_the_tiers_of_each_worker(served: Served) -> None:
    ask = ["cache", "status", "--endpoint", served.endpoint]
    shown = CliRunner().invoke(main, ask)
    assert shown.exit_code == 0 and {"prefill-0", "decode-0", "decode-1"} <= {*shown.stdout.split()}, shown.output
    found = json.loads(CliRunner().invoke(main, [*ask, "--json"]).stdout)
    assert {*found} == {"prefill-0", "decode-0", "decode-1"} and found["prefill-0"]["sources"], found


def test_ctrl_c_leaves_the_terminal_as_it_was(served: Served) -> None:
    code, shown = in_terminal("--endpoint", served.endpoint, "--interval", "0.1")
    assert code == 0 and "prefill-0" in shown
    assert shown.index("\x1b[?1049h") < shown.index("\x1b[?1049l") and shown.rindex("\x1b[?25h") > shown.rindex(
        "\x1b[?25l"
    )
    assert "Traceback" not in shown and "Error" not in shown


def test_top_shows_one_line_while_the_gateway_is_away() -> None:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def open_server(port: int) -> tuple[GrpcServer, str]:
        server = GrpcServer(gateway_context(FakeDispatcher(), grpc_port=port), ByteTokenizer)
        return server, await server.open()

    def wait(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(10)

    server, address = wait(open_server(0))

    def away_and_back(shown: str) -> str:
        nonlocal server
        if not seen_at and "test  model bytes" in shown:
            seen_at.append(len(shown))
            wait(server.close(0))
        elif len(seen_at) == 1 and "trying again: nothing answers at" in shown:
            seen_at.append(len(shown))
            server, _ = wait(open_server(int(address.rpartition(":")[2])))
        elif (
            len(seen_at) == 2
            and "trying again" not in shown[shown.rindex("test  model bytes") :]
            and len(shown) > seen_at[1]
        ):
            seen_at.append(len(shown))
            wait(server.close(0))
        return ""

    seen_at: list[int] = []
    code, shown = in_terminal("--endpoint", address, "--interval", "0.1", "--deadline", "2", heed=away_and_back)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    assert len(seen_at) == 3 and code == 1
    behind = shown[shown.rindex("\x1b[?1049l") :]
    assert behind.count("Error: nothing answers at") == 1 and len(behind.strip().splitlines()) == 1


def in_terminal(*options: str, heed: Any = None) -> tuple[int, str]:
    """`diptych top` in a terminal of its own. `heed` sees what has been shown; without it Ctrl-C follows a screen."""
    process, terminal = pty.fork()
    if process == 0:
        os.execve(
            sys.executable, [sys.executable, "-m", "cluster.cli", "top", *options], os.environ | {"TERM": "xterm"}
        )
    shown, is_told, until_s = "", False, time.monotonic() + START_S
    while time.monotonic() < until_s:
        if not select.select([terminal], [], [], 0.1)[0]:
            continue
        try:
            shown += os.read(terminal, 1 << 16).decode(errors="replace")
        except OSError:  # the other end is closed
            break
        if heed is not None:
            heed(shown)
        elif not is_told and "prefill-0" in shown:
            os.write(terminal, b"\x03")
            is_told = True
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    os.close(terminal)
    return code, shown


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("top", "--interval", "0"), "0.0 is not in the range x>=0.1"),
        (("trace", "--last", "5x"), "'5x' is not a duration; write 60s, 5m or 1h"),
        (("trace", "--from", "noon"), "'noon' is not a time; write 14:05:09"),
        (("trace", "--last", "5s", "--from", "00:00"), "--last ends now"),
        (("trace", "--to", "00:00"), "--to needs a --from"),
        (("trace", "--from", "00:01", "--to", "00:00"), "--from is later than --to"),
        (("trace", "--endpoint", "127.0.0.1:1"), "nothing answers at 127.0.0.1:1"),
        (("top", "--endpoint", "127.0.0.1:1"), "nothing answers at 127.0.0.1:1"),
    ],
)
def test_errors_of_top_and_trace_are_one_line(options: tuple[str, ...], words: str) -> None:
    result = CliRunner().invoke(main, options)
    assert result.exit_code != 0 and words in result.stderr.splitlines()[-1]


# ---- traces ------------------------------------------------------------------------------------------------------


def test_a_trace_of_the_last_minute_has_requests_flips_and_loads(served: Served, tmp_path: Path) -> None:
    served.run("flip", "decode-1", "prefill")
    served.run("flip", "decode-1", "decode")
    out = tmp_path / "deep" / "trace.json"
    result = served.run("trace", "--last", "10m", "-o", str(out))
    assert result.exit_code == 0 and "open it in ui.perfetto.dev" in result.stderr
    assert "gateway-0: complete only from " in result.stderr, "ten minutes ago it was not there"
    events = json.loads(out.read_text())["traceEvents"]
    check(events)
    places = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {"gateway-0", "prefill-0", "decode-0", "decode-1"} < set(places.values())
    whole = {event["name"]: event for event in events if event["ph"] in "b" and "args" in event}
    assert {f"first-{n}" for n in range(3)} <= set(whole)
    parts = [event for event in events if event["ph"] == "X" and event["name"] != "transfer"]
    for name, begun in whole.items():
        ours = [event for event in parts if event["args"]["request"] == name]
        assert sum(event["dur"] for event in ours) == pytest.approx(1e3 * begun["args"]["total_ms"], abs=1)
    computed = {event["name"]: places[event["pid"]] for event in parts if event["args"]["request"] == "first-2"}
    assert computed["prefill_compute"] == "prefill-0" and computed["decode_compute"].startswith("decode-")
    flips = [event["args"]["what"] for event in events if event["ph"] == "i" and event["name"] == "flip"]
    assert flips[-2:] == ["decode -> prefill", "prefill -> decode"]
    assert {"sequences", "queued tokens", "KV blocks"} == {event["name"] for event in events if event["ph"] == "C"}


async def test_a_trace_window_includes_running_requests(served: Served) -> None:
    async with AsyncClient(served.endpoint) as client:
        name, before = await client.trace(begin_unix_ns=1, end_unix_ns=2)
        assert (name, before.traces, before.loads) == ("gateway-0", (), ())
        stream = client.generate("the sea", max_tokens=400, request_id="long", ignore_eos=True)
        async for _ in stream:
            _, now = await client.trace(last_s=5.0)
            break
        await stream.aclose()
    (trace,) = [each for each in now.traces if each.request_id == "long"]
    assert trace.outcome == "" and trace.end_ns - trace.arrived_ns >= trace.ledger.total_ns
