"""The owners that this worker reads from: one control connection and one verified link for each incarnation.

Opened on first use, shared by all fetches, dropped when the connection breaks. A rebuilt transport, ours or the
owner's, has another address; the next fetch verifies the link again. Knows no sequence and no lease.
"""

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

from diptych.background_tasks import BackgroundTasks
from kvtransfer.control import ControlClient
from kvtransfer.ticket import LinkReport, PeerAddress, ShardAddress
from workers.config import WorkerConfig
from workers.engine.executor import Executor

logger = logging.getLogger(__name__)


Addresses: TypeAlias = tuple[tuple[tuple[str, bytes], ...], ...]  # of each rank's transports


@dataclass(frozen=True, slots=True)
class _Link:
    """`proof`: preflight from `ours` to `peer`; None when it must run again.

    `known` are all addresses that the peer has had: an older ticket has an older address of the same memory.
    """

    peer: PeerAddress
    ours: Addresses
    known: frozenset[Addresses]
    proof: "asyncio.Future[LinkReport] | None"


class PeerLinks:
    """Owned by a Worker."""

    def __init__(self, config: WorkerConfig, executor: Executor) -> None:
        self._secret = config.secret.encode()
        self._deadline_s = config.transfer.read_timeout_s
        self._executor = executor
        self._clients: dict[str, asyncio.Future[ControlClient]] = {}
        self._links: dict[str, _Link] = {}  # incarnation -> link the executor may hold, verified or not
        self._forgetting = BackgroundTasks()
        self._closed = False

    async def meet(self, peer: PeerAddress, *, measures: bool = False) -> tuple[ControlClient, LinkReport]:
        """The connection to this incarnation and its link, verified by preflight.

        `measures`: also measure a link that is not verified yet. Errors: `TransferError`.
        """
        client = await self._client(peer)
        return client, await asyncio.shield(self._proof(peer, measures))

    def _proof(self, peer: PeerAddress, measures: bool) -> "asyncio.Future[LinkReport]":
        ours, theirs = _addresses(self._executor.shards()), _addresses(peer.shards)
        link = self._links.get(peer.incarnation)
        known = link.known if link else frozenset[Addresses]()
        if link and theirs in known:
            peer = link.peer  # the latest address
            if link.ours == ours and link.proof and not _failed(link.proof):
                return link.proof
        proof = asyncio.ensure_future(self._executor.connect(peer, measures=measures))
        proof.add_done_callback(_failed)  # its callers may have been cancelled
        self._links[peer.incarnation] = _Link(peer, ours, known | {theirs}, proof)
        return proof

    def unlink(self, incarnation: str) -> None:
        """A read found the owner's memory gone: the next fetch verifies the link again, if the owner still runs."""
        link = self._links.get(incarnation)
        if link and link.proof and link.proof.done():
            self._links[incarnation] = replace(link, proof=None)

    async def close(self) -> None:
        self._closed = True
        for opening in list(self._clients.values()):
            if opening.done() and not _failed(opening):
                await opening.result().close()
            opening.cancel()

    async def _client(self, peer: PeerAddress) -> ControlClient:
        opening = self._clients.get(peer.incarnation)
        if opening is None or _failed(opening):
            opening = asyncio.ensure_future(
                ControlClient.connect(
                    peer.host,
                    peer.control_port,
                    self._secret,
                    expected_incarnation=peer.incarnation,
                    deadline_s=self._deadline_s,
                    on_lost=lambda: self._lost(peer.incarnation),
                )
            )
            opening.add_done_callback(_failed)
            self._clients[peer.incarnation] = opening
        return await asyncio.shield(opening)

    def _lost(self, incarnation: str) -> None:
        """The control connection broke: treat that incarnation and its memory as gone."""
        self._clients.pop(incarnation, None)
        link = self._links.pop(incarnation, None)
        if link is not None and not self._closed:
            self._forgetting.start(self._forget(incarnation, link.proof))

    async def _forget(self, incarnation: str, linking: "asyncio.Future[LinkReport] | None") -> None:
        """Release the transport's threads, handles and memory for this owner."""
        if linking is not None:
            await asyncio.wait([linking])  # a link that is still being made would leak
        try:
            await self._executor.forget(incarnation)
        except Exception:
            logger.exception("could not drop the link to %s", incarnation)


def _addresses(shards: Iterable[ShardAddress]) -> Addresses:
    return tuple(shard.transports for shard in shards)


def _failed(future: "asyncio.Future[ControlClient] | asyncio.Future[LinkReport]") -> bool:
    return future.done() and (future.cancelled() or future.exception() is not None)
