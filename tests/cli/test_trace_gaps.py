"""`diptych trace` says where it is not complete, on the terminal and in the trace."""

import json
from datetime import datetime
from pathlib import Path

import pytest

from cluster.cli.trace import _write
from diptych.history import Window

FORGOTTEN_S = 1_795_370_705
FORGOTTEN_NS = FORGOTTEN_S * 10**9 + 703_589_123


def test_an_incomplete_window_says_from_when_it_is_complete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "trace.json"
    _write({"gateway-0": Window(whole_ns=FORGOTTEN_NS), "gateway-1": Window()}, out)
    output = capsys.readouterr().err
    clock = datetime.fromtimestamp(FORGOTTEN_S + 1).strftime("%H:%M:%S")
    assert f"gateway-0: complete only from {clock} on" in output and "gateway-1: complete" not in output
    about = json.loads(out.read_text())["otherData"]
    assert {name: datetime.fromisoformat(when).timestamp() for name, when in about["complete_from"].items()} == {
        "gateway-0": FORGOTTEN_S + 1
    }


def test_a_complete_window_prints_no_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "trace.json"
    _write({"gateway-0": Window()}, out)
    assert "complete only" not in capsys.readouterr().err
    assert "complete_from" not in json.loads(out.read_text())["otherData"]
