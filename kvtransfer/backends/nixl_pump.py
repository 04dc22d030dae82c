"""The thread that drives a NIXL agent: posts reads, polls reads in flight, fences reads that never end.

    job ──> begin ──> posted ──> complete               (settled)
                        ├──────> peer lost              (settled; the peer is forgotten)
                        ├──────> in doubt               (failed, but quarantined: it may still write)
                        └──────> overdue                (timed out, but quarantined: still polled)
    quarantined for longer than `quarantine_s` ──> fence: the agent is destroyed, all reads settle, a new agent starts

All methods but `submit` run on the thread. Its jobs wait in a `queue.Queue`: before CPython 3.13,
`SimpleQueue.get` blocks forever when a short timeout ends before the wait begins, and then nothing polls.
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
from kvtransfer.backends.nixl_agent import NixlAddress, NixlAgent, NixlPeer, log_errors
from kvtransfer.backends.pending_read import PendingRead
from kvtransfer.copies import refuse_outside
from kvtransfer.errors import PeerLost, TransferError, TransportUnavailable, is_gone, not_connected

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

POLL_MIN_S, POLL_MAX_S = 50e-6, 200e-6  # polling more often competes with UCX's own thread for the worker's lock


@dataclass(slots=True, eq=False)
class _Posted:
    """A read that was posted to NIXL, until it has certainly ended."""

    pending: PendingRead
    nixl_peer: NixlPeer
    handle: Any
    begun_s: float
    fence_s: float
    log_position: int | None = None  # of a trial read: where UCX's report on its path begins
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
        self._peers: dict[str, NixlPeer] = {}
        self._forgotten: list[NixlPeer] = []  # forgotten, but a read of theirs is still in flight
        self._posted: list[_Posted] = []
        self._stopped = self._ended = False
        self.thread = threading.Thread(target=self._run, name="kv-nixl", daemon=True)
        self.thread.start()

    def submit(self, action: Callable[[], Result]) -> "concurrent.futures.Future[Result]":
        """Run `action` on the thread; the future has its result. After `stop` it runs in the caller, where nothing
        blocks without an agent.
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

    def start(self) -> None:
        try:
            self._agent = self._make_agent()
            self.address = self._agent.address()
        except Exception as error:
            raise TransportUnavailable(f"NIXL cannot start here: {error}") from error

    def connect(self, pending: PendingRead, address: NixlAddress) -> None:
        """Complete `pending` once the peer is registered and a tiny read over a path without emulation worked."""
        known = self._peers.get(pending.peer)
        if known and known.address == address:
            pending.post(pending.complete, 0.0)
            return
        if not pending.begin():
            return
        nixl_peer = None
        try:
            agent = self._live_agent()
            self.forget(pending.peer)
            log_position = ucx_report.position()
            nixl_peer = agent.add_peer(pending.peer, address)
            self._post(pending, nixl_peer, agent.trial_read(nixl_peer), log_position)
        except Exception as error:
            if nixl_peer:
                self._retire(nixl_peer)
            pending.post(pending.abort, self._translate(error, pending.peer))

    def path(self, peer: str) -> str:
        return self._known(peer).path

    def read(self, pending: PendingRead) -> None:
        """Post a read. A failure before the post has moved no bytes, so it settles at once."""
        if not pending.begin():
            return
        try:
            nixl_peer = self._known(pending.peer)
            refuse_outside(pending.copies, nixl_peer.address.num_bytes, self._pool_bytes)
            if len(pending.copies):
                self._post(pending, nixl_peer, self._live_agent().prepare(nixl_peer, pending.copies))
            else:
                pending.post(pending.complete, 0.0)
        except Exception as error:
            pending.post(pending.abort, self._translate(error, pending.peer))

    def forget(self, peer: str) -> None:
        """Drop a peer; the agent keeps it while a read from it is in flight."""
        nixl_peer = self._peers.pop(peer, None)
        if nixl_peer:
            self._retire(nixl_peer)

    def stop(self) -> None:
        """Destroy the agent and end the thread. Every read in flight fails and settles."""
        self._stopped = True
        self._destroy(PeerLost("the transport closed while the read was in flight"))

    def _run(self) -> None:
        pause_s = POLL_MIN_S
        while not self._stopped:
            idle_s = self._agent.progress_s if self._agent else None
            try:
                job = self._jobs.get(timeout=pause_s if self._posted else idle_s)
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

    def _post(self, pending: PendingRead, nixl_peer: NixlPeer, handle: Any, log_position: int | None = None) -> None:
        now_s = time.monotonic()
        fence_s = now_s + pending.deadline_s + self._quarantine_s
        posted = _Posted(pending, nixl_peer, handle, now_s, fence_s, log_position)
        self._posted.append(posted)
        self._check(posted, self._live_agent().post)

    def _poll(self) -> None:
        if self._agent and self._agent.progress_s is not None:
            self._agent.progress()
        now_s = time.monotonic()
        if any(now_s > posted.fence_s for posted in self._posted):
            self._fence()
            return
        for posted in tuple(self._posted):
            if not posted.in_doubt:
                self._check(posted, self._live_agent().poll)

    def _check(self, posted: _Posted, state_of: Callable[[Any], bool]) -> None:
        """Post or poll a read once and handle the result."""
        pending = posted.pending
        try:
            over = state_of(posted.handle)
        except Exception as error:
            failure = self._translate(error, pending.peer)
            if not isinstance(failure, PeerLost):
                posted.in_doubt = True
                pending.post(pending.fail, failure)
                return
            self._end(posted)
            self._drop_peer(posted)
            pending.post(pending.abort, failure)
            return
        if over:
            self._complete(posted)

    def _complete(self, posted: _Posted) -> None:
        self._end(posted)
        pending = posted.pending
        if posted.log_position is not None:
            try:
                posted.nixl_peer.path = self._live_agent().trial_path(posted.nixl_peer, posted.log_position)
            except Exception as error:
                self._retire(posted.nixl_peer)
                pending.post(pending.abort, self._translate(error, pending.peer))
                return
            self._peers[pending.peer] = posted.nixl_peer
        pending.post(pending.complete, time.monotonic() - posted.begun_s)

    def _end(self, posted: _Posted) -> None:
        log_errors("releasing a read", posted.handle.release)
        self._posted.remove(posted)
        self._release_forgotten()

    def _drop_peer(self, posted: _Posted) -> None:
        """Drop the peer of a lost read, unless it has been connected again."""
        if self._peers.get(posted.pending.peer) is posted.nixl_peer:
            del self._peers[posted.pending.peer]
        if posted.nixl_peer not in self._forgotten:
            self._retire(posted.nixl_peer)

    def _retire(self, nixl_peer: NixlPeer) -> None:
        self._forgotten.append(nixl_peer)
        self._release_forgotten()

    def _release_forgotten(self) -> None:
        """Remove forgotten peers without reads in flight."""
        held = {id(posted.nixl_peer) for posted in self._posted}
        for nixl_peer in [each for each in self._forgotten if id(each) not in held]:
            self._forgotten.remove(nixl_peer)
            if self._agent:
                self._agent.remove_peer(nixl_peer)

    def _fence(self) -> None:
        logger.warning(
            "%d reads over NIXL did not end within their quarantine of %.1f s: the agent is rebuilt, all peers must "
            "be connected again",
            len(self._posted),
            self._quarantine_s,
        )
        self._destroy(PeerLost("the read never ended; its NIXL agent was destroyed to keep late bytes out"))
        try:
            self.start()
        except TransportUnavailable as error:
            logger.error("%s", error)

    def _destroy(self, cause: PeerLost) -> None:
        """Fence: without references to the agent nothing is written any more, so all reads settle."""
        agent, self._agent = self._agent, None
        posted, self._posted = self._posted, []
        reading = (each.nixl_peer for each in posted)
        peers = {id(each): each for each in (*self._peers.values(), *self._forgotten, *reading)}
        self._peers, self._forgotten = {}, []
        for each in posted:
            log_errors("releasing a read", each.handle.release)
            each.handle = None  # a handle keeps the agent alive
        if agent:
            agent.destroy(list(peers.values()), idle=not posted)
        for each in posted:
            each.pending.post(each.pending.abort, cause)

    def _known(self, peer: str) -> NixlPeer:
        nixl_peer = self._peers.get(peer)
        if nixl_peer is None:
            raise not_connected(peer)
        return nixl_peer

    def _live_agent(self) -> NixlAgent:
        if self._agent is None:
            raise TransportUnavailable("the NIXL agent was destroyed")
        return self._agent

    def _translate(self, error: Exception, peer: str) -> Exception:
        if isinstance(error, TransferError | ValueError):
            return error
        if self._agent and isinstance(error, self._agent.lost):
            return is_gone(peer)
        return TransferError(f"NIXL failed on a read from {peer}: {type(error).__name__} {error}")
