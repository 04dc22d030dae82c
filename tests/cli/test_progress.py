"""Bars advance on a terminal, and are lines elsewhere."""

import contextlib
import os
import pty
from concurrent.futures import ThreadPoolExecutor
from io import StringIO

import pytest

from cluster.cli.screen import LINE_S, ProgressLines, hanging, progress_bar


def seen(terminal: int) -> str:
    """All that was written until the other end was closed; a terminal hands it on in pieces."""
    shown = b""
    with contextlib.suppress(OSError):  # how a terminal tells that nobody writes any more
        while piece := os.read(terminal, 1 << 16):
            shown += piece
    os.close(terminal)
    return shown.decode()


def test_a_progress_bar_advances_on_a_terminal_and_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TERM", "xterm"), ("COLUMNS", "80")):
        monkeypatch.setenv(name, value)
    terminal, there = pty.openpty()
    reading = ThreadPoolExecutor(1).submit(seen, terminal)
    with open(there, "w") as stream:
        monkeypatch.setattr("sys.stderr", stream)
        with progress_bar() as tell:
            tell("model.safetensors", 0, 200)
            tell("model.safetensors", 50, 200)
    shown = reading.result(30.0)
    frames = [frame for frame in shown.split("model.safetensors") if "%" in frame]
    assert " 0%" in frames[0] and " 25%" in frames[-1]
    assert shown.rindex("\x1b[2K") > shown.rindex("25%"), "the bar's line is wiped at the end"


def test_without_a_terminal_each_part_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    with progress_bar() as tell:
        for done in range(3):
            tell("model.safetensors", done, 200)
    assert stream.getvalue() == "model.safetensors\n"


def test_without_a_terminal_progress_is_printed_every_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    now_s = 0.0
    lines = ProgressLines(lambda: now_s)
    for done in range(9):
        lines.update("requests finished", done, 8)
        now_s += LINE_S / 2
    assert capsys.readouterr().err.splitlines() == [
        "requests finished",
        *(f"requests finished: {done} of 8 ({done / 8:.0%})" for done in (2, 4, 6, 8)),
    ]


def test_long_lines_hang_at_a_terminals_width() -> None:
    line = "  goodput at least 20.96 requests/s on 2 GPUs: at least 90 % of requests with TTFT <= 0.4 s"
    assert hanging(line, 0) == line == hanging(line, 200)
    first, *rest = hanging(line, 40).split("\n")
    assert first.startswith("  goodput") and rest and all(each.startswith("      ") for each in rest)
    assert all(len(each) <= 40 for each in (first, *rest))
    assert " ".join(" ".join((first, *rest)).split()) == line.strip()
