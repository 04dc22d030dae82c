"""`diptych demo --kill`: a real worker process is killed under real streams, and no token differs."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click import ClickException
from click.testing import CliRunner

from cluster.cli import main
from cluster.cli.kill_demo import DemoStream, KillOutcome, _kill
from tests.model.tiny import write_tiny_llama

DEMO_S = 240.0
OUTCOME = KillOutcome(
    worker="decode-0",
    killed_pid=1,
    new_pid=2,
    streams=4,
    recovered_streams=4,
    tokens=256,
    lost_tokens=0,
    repeated_tokens=0,
    changed_tokens=0,
    longest_pause_s=1.0,
    back_s=3.0,
)


@pytest.mark.full
@pytest.mark.ray
@pytest.mark.timeout(300)
def test_a_killed_worker_causes_a_pause_and_loses_no_token(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "tiny", context_length=1024)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-m", "cluster.cli", "demo", "--kill", "--model", str(model), "--max-tokens", "600"]
    done = subprocess.run([*command, "--json"], env=environment, capture_output=True, text=True, timeout=DEMO_S)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["streams"], found["tokens"]) == (4, 2400)
    assert (found["lost_tokens"], found["repeated_tokens"], found["changed_tokens"]) == (0, 0, 0)
    assert found["recovered_streams"] > 0 and found["new_pid"] != found["killed_pid"]
    for words in (f"kill -9 {found['killed_pid']} (decode-0)", "continues after token", "decode-0 is ready again"):
        assert words in done.stderr


def test_only_processes_of_the_demo_are_killed() -> None:
    with pytest.raises(ClickException, match=f"process {os.getppid()} was not started by this demo"):
        _kill(os.getppid())


def test_lost_repeated_and_changed_tokens_are_counted_separately() -> None:
    stream = DemoStream("hello")
    stream.add(0, (5, 6, 7))
    stream.add(2, (7, 8))
    assert (stream.repeated, stream.tokens) == (1, [5, 6, 7, 7, 8])
    assert OUTCOME.is_exact
    assert OUTCOME.lines[0] == "Not a token was lost."
    assert not replace(OUTCOME, changed_tokens=1).is_exact


@pytest.mark.parametrize(
    ("arguments", "address", "words"),
    [
        (("--runtime", "local"), "", "--kill needs workers that are processes"),
        ((), "10.0.0.1:6379", "unset RAY_ADDRESS"),
    ],
)
def test_a_worker_that_cannot_be_killed_is_one_line(
    arguments: tuple[str, ...], address: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address:
        monkeypatch.setenv("RAY_ADDRESS", address)
    result = CliRunner().invoke(main, ["demo", "--kill", *arguments])
    assert result.exit_code == 2 and words in result.stderr
