"""One thread runs the steps of many sockets."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from kvtransfer.rpc.polled import receive_into
from kvtransfer.rpc.poller import AGAIN, IDLE, Poller, Steps, pause


@pytest.fixture
def poller() -> Iterator[Poller]:
    opened = Poller("test-poller")
    yield opened
    opened.close(30.0)


class Run:
    """Steps on one end of a socket pair, and how they ended."""

    def __init__(self, poller: Poller, steps: Callable[[socket.socket], Steps[None]]) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.ends: list[Exception | None] = []
        self.ended = threading.Event()
        poller.call(lambda: self._start(poller, steps(self.ours)))

    def _start(self, poller: Poller, steps: Steps[None]) -> None:
        poller.watch(self.ours)
        poller.start(self.ours, steps, self._end)

    def _end(self, error: Exception | None) -> None:
        self.ends.append(error)
        self.ours.close()
        self.ended.set()

    def wait(self) -> Exception | None:
        assert self.ended.wait(10)
        self.theirs.close()
        [error] = self.ends
        return error


def receiving(link: socket.socket, stop_s: float = IDLE) -> Steps[None]:
    while True:
        try:
            link.recv(1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            yield stop_s
        else:
            return


def test_steps_go_on_when_their_socket_has_an_event(poller: Poller) -> None:
    run = Run(poller, receiving)
    run.theirs.send(b"x")
    assert run.wait() is None


def test_steps_that_wait_too_long_get_a_timeout_and_others_do_not(poller: Poller) -> None:
    begun_s = time.monotonic()
    late, patient = (Run(poller, partial(receiving, stop_s=begun_s + seconds)) for seconds in (0.1, 60.0))
    assert isinstance(late.wait(), TimeoutError)
    assert time.monotonic() >= begun_s + 0.1
    assert not patient.ended.is_set()
    patient.theirs.send(b"x")
    assert patient.wait() is None


def test_an_error_in_steps_ends_only_these(poller: Poller) -> None:
    def broken(link: socket.socket) -> Steps[None]:
        yield AGAIN
        raise ValueError("ours")

    assert isinstance(Run(poller, broken).wait(), ValueError)
    other = Run(poller, receiving)
    other.theirs.send(b"x")
    assert other.wait() is None


def test_an_error_in_a_call_ends_nothing(poller: Poller, caplog: pytest.LogCaptureFixture) -> None:
    poller.call(lambda: 1 / 0)  # type: ignore[arg-type]
    run = Run(poller, receiving)
    run.theirs.send(b"x")
    assert run.wait() is None
    assert "ZeroDivisionError" in caplog.text


def test_stopped_steps_end_with_that_error(poller: Poller) -> None:
    run = Run(poller, receiving)
    poller.call(lambda: poller.stop(run.ours, ConnectionError("cut")))
    assert str(run.wait()) == "cut"


def test_steps_that_never_wait_leave_turns_to_others(poller: Poller) -> None:
    begun = threading.Event()

    def busy(link: socket.socket) -> Steps[None]:
        while not other.ended.is_set():
            begun.set()
            yield AGAIN

    other = Run(poller, receiving)
    run = Run(poller, busy)
    assert begun.wait(10)
    other.theirs.send(b"x")
    assert other.wait() is None and run.wait() is None


def test_only_steps_that_move_data_alone_are_told_so(poller: Poller) -> None:
    told: list[bool] = []
    waits = threading.Semaphore(0)

    def moving(link: socket.socket) -> Steps[None]:
        is_alone = False
        while True:
            try:
                link.recv(1, socket.MSG_DONTWAIT)
            except BlockingIOError:
                waits.release()
                is_alone = yield time.monotonic() + 60.0
            else:
                told.append(is_alone)
                return

    idle = Run(poller, receiving)
    one, other = Run(poller, moving), Run(poller, moving)
    assert waits.acquire(timeout=10) and waits.acquire(timeout=10)
    for run in (one, other):  # while the other one moves data too, and then without it
        run.theirs.send(b"x")
        assert run.wait() is None
    assert told == [False, True]
    idle.theirs.send(b"x")
    idle.wait()


def test_a_pause_takes_its_time_whatever_the_socket_does(poller: Poller) -> None:
    begun_s = time.monotonic()
    run = Run(poller, lambda link: pause(0.2))
    for _ in range(5):
        run.theirs.send(b"x")
    assert run.wait() is None
    assert time.monotonic() >= begun_s + 0.2


def test_close_ends_all_steps_and_may_be_repeated() -> None:
    poller = Poller("test-poller")
    runs = [Run(poller, receiving) for _ in range(3)]
    poller.close(30.0)
    poller.close(30.0)
    assert all(isinstance(run.wait(), ConnectionError) for run in runs)
    poller.call(lambda: pytest.fail("it is closed"))


@pytest.mark.parametrize("is_first", [False, True])
def test_a_close_that_comes_with_the_last_bytes_is_noticed(poller: Poller, is_first: bool) -> None:
    """Events tell only of changes. One may tell of both, and a call that gets the bytes does not tell of the end."""

    def steps(link: socket.socket) -> Steps[None]:
        if is_first:
            yield AGAIN  # the event comes while its next step is due anyway
        yield from receive_into(link, [memoryview(bytearray(100))])

    run = Run(poller, steps)
    poller.call(lambda: time.sleep(0.1))
    run.theirs.send(b"less")
    run.theirs.shutdown(socket.SHUT_WR)
    assert run.ended.wait(5), "it waits for an event that does not come"
    assert isinstance(run.wait(), ConnectionError)
