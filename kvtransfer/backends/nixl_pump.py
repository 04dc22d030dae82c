"""The one thread that talks to a NIXL agent: posts reads, polls those in flight, fences those that never end.

    job ──> begin ──> posted ──> landed                 (settled)
                        ├──────> peer lost              (settled; the peer is forgotten)
                        ├──────> in doubt               (failed, but quarantined: bytes may land)
                        └──────> overdue                (timed out, but quarantined: still polled)
    quarantined for longer than `quarantine_s` ──> fence: the agent is destroyed, all reads settle, a new agent starts

All methods but `submit` and `abandon` run on the thread. Its jobs wait in a `queue.Queue`: before CPython 3.13,
`SimpleQueue.get` waits for ever when a short timeout is over before the wait begins, and nobody polls any more.
"""

import concurrent.futures
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from kvtransfer.backends import ucx_report
from kvtransfer.backends.flight import Flight
from kvtransfer.backends.nixl_agent import Met, NixlAddress, NixlAgent, quietly
from kvtransfer.copies import refuse_outside
from kvtransfer.errors import PeerLost, TransferError, TransportUnavailable

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

POLL_MIN_S, POLL_MAX_S = 50e-6, 200e-6  # asking more often fights UCX's own thread for the worker's lock


@dataclass(slots=True, eq=False)
class _Posted:
    """A read that NIXL has, until it is provably over."""

    flight: Flight
    met: Met
    handle: Any
    begun_s: float
    fence_s: float
    said_before: int | None = None  # set for a first taste: where UCX's report on its path begins
    in_doubt: bool = False


class NixlPump:
    """Owned by its transport. `make_agent` starts an agent; it is called again after a fence."""

    def __init__(self, make_agent: Callable[[], NixlAgent], pool_bytes: int, quarantine_s: float) -> None:
        self.address = b""
        self._make_agent = make_agent
        self._pool_bytes = pool_bytes
        self._quarantine_s = quarantine_s
        self._lock = threading.Lock()
        self._jobs: queue.Queue[Callable[[], None]] = queue.Queue()
        self._agent: NixlAgent | None = None
        self._met: dict[str, Met] = {}
        self._leaving: list[Met] = []  # forgotten, but a read of theirs is still in flight
        self._posted: list[_Posted] = []
        self._stopped = self._ended = False
        self.thread = threading.Thread(target=self._run, name="kv-nixl", daemon=True)
        self.thread.start()

    def submit(self, action: Callable[[], Result]) -> "concurrent.futures.Future[Result]":
        """Have the thread do something; its outcome comes through the future. After `stop` it is done at once:
        without an agent nothing blocks.
        """
        outcome: concurrent.futures.Future[Result] = concurrent.futures.Future()

        def job() -> None:
            try:
                outcome.set_result(action())
            except Exception as error:
                outcome.set_exception(error)

        with self._lock:
            ended = self._ended
            if not ended:
                self._jobs.put(job)
        if ended:
            job()
        return outcome

    def abandon(self, flight: Flight) -> None:
        """A flight that has not begun never begins, and settles; one that has begun settles when it is over."""
        with self._lock:
            flight.abandoned = True
        if not flight.begun:
            flight.settle()

    def start(self) -> None:
        try:
            self._agent = self._make_agent()
            self.address = self._agent.address()
        except Exception as error:
            raise TransportUnavailable(f"NIXL cannot start here: {error}") from error

    def meet(self, flight: Flight, address: NixlAddress) -> None:
        """Land `flight` once the peer is known, a tiny read has succeeded and its path is no emulation."""
        known = self._met.get(flight.peer)
        if known and known.address == address:
            flight.post(flight.land, 0.0)
            return
        if not self._begin(flight):
            return
        met = None
        try:
            agent = self._present_agent()
            self.forget(flight.peer)
            said_before = ucx_report.position()
            met = agent.meet(flight.peer, address)
            self._post(flight, met, agent.taste(met), said_before)
        except Exception as error:
            if met:
                self._leave(met)
            flight.post(flight.crash, self._translate(error, flight.peer))

    def path(self, peer: str) -> str:
        return self._known(peer).path

    def read(self, flight: Flight) -> None:
        """Post a read. What fails before the post has moved nothing, so it settles at once."""
        if not self._begin(flight):
            return
        try:
            met = self._known(flight.peer)
            refuse_outside(flight.copies, met.address.num_bytes, self._pool_bytes)
            if len(flight.copies):
                self._post(flight, met, self._present_agent().prepare(met, flight.copies))
            else:
                flight.post(flight.land, 0.0)
        except Exception as error:
            flight.post(flight.crash, self._translate(error, flight.peer))

    def forget(self, peer: str) -> None:
        """Drop a peer; as long as a read of it is in flight, the agent keeps it."""
        met = self._met.pop(peer, None)
        if met:
            self._leave(met)

    def stop(self) -> None:
        """Destroy the agent and end the thread. Every read in flight fails and settles."""
        self._stopped = True
        self._destroy(PeerLost("the transport closed while the read was in flight"))

    def _run(self) -> None:
        pause_s = POLL_MIN_S
        while not self._stopped:
            try:
                job = self._jobs.get(timeout=pause_s if self._posted else None)
            except queue.Empty:
                pause_s = min(2 * pause_s, POLL_MAX_S)
            else:
                pause_s = POLL_MIN_S
                job()
            self._poll()
        with self._lock:
            self._ended = True
        while not self._jobs.empty():
            self._jobs.get()()

    def _begin(self, flight: Flight) -> bool:
        with self._lock:
            flight.begun = not flight.abandoned
            return flight.begun

    def _post(self, flight: Flight, met: Met, handle: Any, said_before: int | None = None) -> None:
        now_s = time.monotonic()
        fence_s = now_s + flight.deadline_s + self._quarantine_s
        posted = _Posted(flight, met, handle, now_s, fence_s, said_before)
        self._posted.append(posted)
        self._ask(posted, self._present_agent().post)

    def _poll(self) -> None:
        now_s = time.monotonic()
        if any(now_s > posted.fence_s for posted in self._posted):
            self._fence()
            return
        for posted in tuple(self._posted):
            if not posted.in_doubt:
                self._ask(posted, self._present_agent().poll)

    def _ask(self, posted: _Posted, question: Callable[[Any], bool]) -> None:
        """One post or one poll, and what follows from the answer."""
        flight = posted.flight
        try:
            over = question(posted.handle)
        except Exception as error:
            failure = self._translate(error, flight.peer)
            if not isinstance(failure, PeerLost):
                posted.in_doubt = True
                flight.post(flight.fail, failure)
                return
            self._end(posted)
            self._give_up(posted)
            flight.post(flight.crash, failure)
            return
        if over:
            self._land(posted)

    def _land(self, posted: _Posted) -> None:
        self._end(posted)
        flight = posted.flight
        if posted.said_before is not None:
            try:
                posted.met.path = self._present_agent().judge(posted.met, posted.said_before)
            except Exception as error:
                self._leave(posted.met)
                flight.post(flight.crash, self._translate(error, flight.peer))
                return
            self._met[flight.peer] = posted.met
        flight.post(flight.land, time.monotonic() - posted.begun_s)

    def _end(self, posted: _Posted) -> None:
        quietly("releasing a read", posted.handle.release)
        self._posted.remove(posted)
        self._see_off()

    def _give_up(self, posted: _Posted) -> None:
        """Drop the peer of a lost read, unless it was met anew in the meantime."""
        if self._met.get(posted.flight.peer) is posted.met:
            del self._met[posted.flight.peer]
        if posted.met not in self._leaving:
            self._leave(posted.met)

    def _leave(self, met: Met) -> None:
        self._leaving.append(met)
        self._see_off()

    def _see_off(self) -> None:
        """Let go of forgotten peers that no read holds any more."""
        for met in [met for met in self._leaving if not any(posted.met is met for posted in self._posted)]:
            self._leaving.remove(met)
            if self._agent:
                self._agent.leave(met)

    def _fence(self) -> None:
        logger.warning(
            "%d reads over NIXL did not end within their quarantine of %.1f s: the agent is rebuilt, all peers must "
            "be connected anew",
            len(self._posted),
            self._quarantine_s,
        )
        self._destroy(PeerLost("the read never ended; its NIXL agent was destroyed to keep late bytes out"))
        try:
            self.start()
        except TransportUnavailable as error:
            logger.error("%s", error)

    def _destroy(self, cause: PeerLost) -> None:
        """The fence itself: with the agent's last reference gone, no byte can land, so everything settles."""
        agent, self._agent = self._agent, None
        posted, self._posted = self._posted, []
        met = {id(each): each for each in (*self._met.values(), *self._leaving, *(each.met for each in posted))}
        self._met, self._leaving = {}, []
        for each in posted:
            quietly("releasing a read", each.handle.release)
            each.handle = None  # a handle keeps the agent alive
        if agent:
            agent.destroy(list(met.values()), idle=not posted)
        for each in posted:
            each.flight.post(each.flight.crash, cause)

    def _known(self, peer: str) -> Met:
        met = self._met.get(peer)
        if met is None:
            raise PeerLost(f"{peer} is not connected: connect to its present incarnation first")
        return met

    def _present_agent(self) -> NixlAgent:
        if self._agent is None:
            raise TransportUnavailable("the NIXL agent is gone")
        return self._agent

    def _translate(self, error: Exception, peer: str) -> Exception:
        if isinstance(error, TransferError | ValueError):
            return error
        if self._agent and isinstance(error, self._agent.lost):
            return PeerLost(f"{peer} is gone: compute the prompt again or ask another owner")
        return TransferError(f"NIXL failed on a read from {peer}: {type(error).__name__} {error}")
