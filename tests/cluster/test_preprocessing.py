"""Large inputs are processed in another process, which may die, time out or be busy, and affects no other request."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import psutil
import pytest

from cluster.events import Rejected
from cluster.frontend import preprocessing
from cluster.frontend.preprocessing import GRAMMAR_NICENESS, HUGE_BYTES, PreprocessingPool
from tests.frontend.tokenizers import ByteTokenizer
from workers.errors import InvalidRequest
from workers.request import Grammar


def process_id(tokenizer: ByteTokenizer) -> int:
    return os.getpid()


def refuse(tokenizer: ByteTokenizer) -> None:
    raise InvalidRequest("prompt", "is not for us")


def die(tokenizer: ByteTokenizer) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sleep(tokenizer: ByteTokenizer, seconds: float) -> None:
    time.sleep(seconds)


def note(tokenizer: ByteTokenizer, path: Path, name: str) -> None:
    with path.open("a") as notes:
        notes.write(name)


def wait_in(tokenizer: ByteTokenizer, folder: Path) -> None:
    """Until the folder has the file "go"."""
    (folder / "begun").touch()
    while not (folder / "go").exists():
        time.sleep(0.005)


class FakeGrammars(ByteTokenizer):
    """A grammar's text says what its compilation does."""

    def check_grammar(self, grammar: Grammar) -> Grammar:
        while grammar.text == "compute":
            pass
        if grammar.text == "wait":
            time.sleep(60.0)
        group = Path("/proc/self/autogroup")  # "/autogroup-7 nice 10"; empty if switched off
        of_session = group.read_text().split()[-1:] if group.exists() else []
        return Grammar("regex", ", ".join([str(os.nice(0)), *of_session]))


@pytest.fixture
async def processes() -> AsyncIterator[PreprocessingPool]:
    made = PreprocessingPool(ByteTokenizer)
    yield made
    await made.aclose()


async def test_results_and_errors_are_returned(processes: PreprocessingPool) -> None:
    ours = await processes.call(1, process_id)
    assert ours != os.getpid() and ours == await processes.call(1, process_id)
    with pytest.raises(InvalidRequest, match="is not for us"):
        await processes.call(1, refuse)
    assert ours == await processes.call(1, process_id)  # a refusal ends no process


async def test_a_dead_process_fails_its_call_and_is_restarted(processes: PreprocessingPool) -> None:
    first = await processes.call(1, process_id)
    with pytest.raises(Rejected, match="try again"):
        await processes.call(1, die)
    second = await processes.call(1, process_id)
    psutil.Process(second).kill()  # while it has nothing to do
    assert len({first, second, await processes.call(1, process_id)}) == 3


async def test_a_call_that_takes_too_long_kills_its_process() -> None:
    async with aclosing(PreprocessingPool(ByteTokenizer, limit_s=3.0)) as processes:
        first = await processes.call(1, process_id)
        with pytest.raises(InvalidRequest, match="takes too long to tokenize"):
            await processes.call(1, sleep, 30.0)
        assert not psutil.pid_exists(first) and await processes.call(1, process_id) != first


async def test_the_smallest_call_runs_first_and_cancelled_calls_are_skipped(
    processes: PreprocessingPool, tmp_path: Path
) -> None:
    busy = asyncio.ensure_future(processes.call(1, wait_in, tmp_path))
    await begun(tmp_path)
    notes = tmp_path / "notes"
    calls = [asyncio.ensure_future(processes.call(size, note, notes, str(size))) for size in (3, 1, 4, 2)]
    await asyncio.sleep(0)
    calls[1].cancel()
    await asyncio.wait([calls[1]])
    (tmp_path / "go").touch()
    await asyncio.gather(busy, *(each for each in calls if not each.cancelled()))
    assert notes.read_text() == "234"


async def test_a_huge_input_does_not_delay_others(processes: PreprocessingPool, tmp_path: Path) -> None:
    huge = asyncio.ensure_future(processes.call(HUGE_BYTES + 1, wait_in, tmp_path))
    assert await processes.call(HUGE_BYTES, process_id) and not huge.done()
    (tmp_path / "go").touch()
    await huge


async def test_a_full_queue_refuses(tmp_path: Path) -> None:
    async with aclosing(PreprocessingPool(ByteTokenizer, max_waiting=1)) as processes:
        busy = asyncio.ensure_future(processes.call(1, wait_in, tmp_path))
        await begun(tmp_path)
        waiting = asyncio.ensure_future(processes.call(1, process_id))
        await asyncio.sleep(0)
        with pytest.raises(Rejected, match="too many large inputs"):
            await processes.call(1, process_id)
        (tmp_path / "go").touch()
        await asyncio.gather(busy, waiting)


async def test_a_grammar_that_is_not_checked_in_time_is_named_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preprocessing, "PREPROCESS_WAIT_S", 0.01)
    async with aclosing(PreprocessingPool(ByteTokenizer)) as processes:
        with pytest.raises(Rejected, match="too many new grammars; try again"):
            await processes.check_grammar(Grammar("regex", "a"))


async def test_closing_kills_the_process_and_fails_waiting_calls(tmp_path: Path) -> None:
    processes = PreprocessingPool(ByteTokenizer)
    theirs = await processes.call(1, process_id)
    calls = [asyncio.ensure_future(processes.call(1, wait_in, tmp_path)) for _ in range(2)]
    await begun(tmp_path)
    await processes.aclose()
    for call in calls:
        with pytest.raises(Rejected, match="is closing"):
            await call
    assert not psutil.pid_exists(theirs)


@pytest.mark.full
async def test_a_grammar_is_compiled_at_a_low_priority_in_its_session_and_of_it() -> None:
    async with aclosing(PreprocessingPool(FakeGrammars)) as processes:
        found = await processes.check_grammar(Grammar("regex", "priority"))
    assert set(found.text.split(", ")) == {str(GRAMMAR_NICENESS)}


@pytest.mark.full
async def test_a_grammar_has_a_limit_of_computation_and_a_host_without_time_is_not_its_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with aclosing(PreprocessingPool(FakeGrammars)) as processes:
        monkeypatch.setattr(preprocessing, "GRAMMAR_S", 0.3)
        with pytest.raises(Rejected, match="host is too busy to compile"):
            await processes.check_grammar(Grammar("regex", "wait"))
        monkeypatch.setattr(preprocessing, "GRAMMAR_S", 25.0)
        with pytest.raises(InvalidRequest, match=r"takes more than 0\.2 s to compile"):
            await processes.check_grammar(Grammar("regex", "compute"))


async def test_callers_get_the_error_of_a_tokenizer_that_cannot_load() -> None:
    async with aclosing(PreprocessingPool(broken)) as processes:
        with pytest.raises(Rejected, match="the tokenizer process died"):
            await processes.call(1, process_id)


def broken() -> ByteTokenizer:
    raise OSError("no such file")


async def begun(folder: Path) -> None:
    async with asyncio.timeout(20.0):
        while not (folder / "begun").exists():
            await asyncio.sleep(0.005)
