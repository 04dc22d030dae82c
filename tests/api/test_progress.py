"""Bars advance on a terminal, and are lines elsewhere."""

import os
import pty
from io import StringIO

import pytest

from cluster.cli.screen import progress_bar


def test_a_bar_advances_on_a_terminal_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, told in (("TERM", "xterm"), ("COLUMNS", "80")):
        monkeypatch.setenv(name, told)
    terminal, there = pty.openpty()
    with open(there, "w") as stream:
        monkeypatch.setattr("sys.stderr", stream)
        with progress_bar() as tell:
            tell("model.safetensors", 0, 200)
            tell("model.safetensors", 50, 200)
        stream.flush()
        shown = os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    frames = [frame for frame in shown.split("model.safetensors") if "%" in frame]
    assert " 0%" in frames[0] and " 25%" in frames[-1]
    assert shown.rindex("\x1b[2K") > shown.rindex("25%"), "the bar's line is wiped at the end"


def test_elsewhere_each_part_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    with progress_bar() as tell:
        for done in range(3):
            tell("model.safetensors", done, 200)
    assert stream.getvalue() == "model.safetensors\n"
