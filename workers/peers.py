"""The owners that this worker reads from: one control connection and one proven link for each incarnation.

Opened by whoever needs them first, shared by all, dropped when the connection breaks. Knows no sequence and no lease.
"""

import asyncio
import logging

from kvtransfer.control import ControlClient
from kvtransfer.ticket import LinkReport, PeerAddress
from workers.config import WorkerConfig
from workers.engine.executor import Executor

logger = logging.getLogger(__name__)


class Peers:
    """Owned by a Worker."""

    def __init__(self, config: WorkerConfig, executor: Executor) -> None:
        self._secret = config.secret.encode()
        self._deadline_s = config.transfer.read_timeout_s
        self._executor = executor
        self._clients: dict[str, asyncio.Future[ControlClient]] = {}
        self._links: dict[str, asyncio.Future[LinkReport]] = {}
        self._met: set[str] = set()  # incarnations that the executor may hold a link to, proven or not
        self._forgetting: set[asyncio.Future[None]] = set()
        self._closed = False

    async def meet(self, peer: PeerAddress) -> tuple[ControlClient, LinkReport]:
        """The connection to this incarnation and its link, as proven by preflight. Errors: `TransferError`."""
        client = await self._client(peer)
        linking = self._links.get(peer.incarnation)
        if linking is None or _failed(linking):
            self._met.add(peer.incarnation)
            linking = asyncio.ensure_future(self._executor.connect(peer))
            linking.add_done_callback(_failed)  # those who asked may have left
            self._links[peer.incarnation] = linking
        return client, await asyncio.shield(linking)

    def unlink(self, incarnation: str) -> None:
        """A read found the owner's memory gone: the next reader proves the link anew, if the owner lives."""
        self._links.pop(incarnation, None)

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
        """The control connection broke: that incarnation is dead to us, and so is its memory."""
        self._clients.pop(incarnation, None)
        linking = self._links.pop(incarnation, None)
        if incarnation in self._met and not self._closed:
            self._met.discard(incarnation)
            forgetting = asyncio.ensure_future(self._forget(incarnation, linking))
            self._forgetting.add(forgetting)
            forgetting.add_done_callback(self._forgetting.discard)

    async def _forget(self, incarnation: str, linking: "asyncio.Future[LinkReport] | None") -> None:
        """Let go of the transport's threads, handles and memory for this owner."""
        if linking is not None:
            await asyncio.wait([linking])  # what is being made would stay
        try:
            await self._executor.forget(incarnation)
        except Exception:
            logger.exception("the link to %s could not be let go of", incarnation)


def _failed(future: "asyncio.Future[ControlClient] | asyncio.Future[LinkReport]") -> bool:
    return future.done() and (future.cancelled() or future.exception() is not None)
