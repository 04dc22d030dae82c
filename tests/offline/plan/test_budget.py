"""What ends a search, and what the search leaves behind."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.offline.plan.budget import INTERRUPT, LIMIT, Budget
from cluster.offline.scoring.goodput import TimeUp

FOREVER_S = 600.0


def square(number: int) -> int:
    return number * number


def stay(path: Path) -> None:
    """Write the process id, then keep working."""
    path.write_text(str(os.getpid()))
    time.sleep(FOREVER_S)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.02)


def test_a_search_in_time_has_all_results_in_order() -> None:
    with Budget(FOREVER_S, 2) as budget:
        assert budget.run(lambda: list(budget.each(square, range(5)))) == [0, 1, 4, 9, 16]
        assert not budget.ended_by


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Background jobs of a shell ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("by", [LIMIT, INTERRUPT])
def test_what_ends_a_search_ends_its_processes(by: str, tmp_path: Path) -> None:
    path = tmp_path / "pid"
    limit_s = 0.5 if by == LIMIT else FOREVER_S

    def interrupt() -> None:
        wait_until(lambda: path.exists() and bool(path.read_text()))
        os.kill(os.getpid(), signal.SIGINT)

    def search() -> str:
        if by == INTERRUPT:
            threading.Thread(target=interrupt, name="interrupt").start()
        try:
            return str(list(budget.each(stay, [path])))
        except TimeUp:
            return "the best so far"

    threads = set(threading.enumerate())
    with Budget(limit_s, 1) as budget:
        assert budget.run(search) == "the best so far"
        assert budget.ended_by == by
        with pytest.raises(TimeUp):
            budget.each(square, [1])
    left = set(threading.enumerate()) - threads
    assert not [thread for thread in left if thread.name != "interrupt"], "the interpreter would race with it at exit"
    if by == INTERRUPT:
        wait_until(lambda: not is_alive(int(path.read_text())))


def test_what_the_search_raises_is_raised() -> None:
    with Budget(FOREVER_S, 1) as budget, pytest.raises(ZeroDivisionError):
        budget.run(lambda: 1 // 0)


def test_ctrl_c_never_reaches_the_processes() -> None:
    """Not even while they start, when they would print a traceback each."""
    with Budget(FOREVER_S, 1) as budget:
        assert budget.run(lambda: list(budget.each(blocked_signals, [0]))) == [{signal.SIGINT}]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def blocked_signals(_: int) -> set[int]:
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
