"""KV that comes from other workers: pulled into given blocks, or, as a prefix, into this worker's cache.

Knows blocks, tickets and peers; of sequences it knows only the tokens.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from kvtransfer.copies import union_of_pieces
from kvtransfer.errors import PeerLost, TransferError
from kvtransfer.pull import pull
from kvtransfer.ticket import TransferReport, TransferTicket
from kvtransfer.transport import PullOrder, Read
from workers.config import WorkerConfig
from workers.engine.blocks import OutOfBlocks
from workers.engine.engine import Engine
from workers.engine.executor import Executor
from workers.peers import Peers

logger = logging.getLogger(__name__)


class Fetching:
    """Owned by a Worker. `changed` is called when blocks became free. `close` before the peers."""

    def __init__(
        self, config: WorkerConfig, engine: Engine, executor: Executor, peers: Peers, changed: Callable[[], None]
    ) -> None:
        self._config = config
        self._engine = engine
        self._executor = executor
        self._peers = peers
        self._changed = changed
        self._borrowing: set[asyncio.Task[int]] = set()

    async def pull(self, ticket: TransferTicket, blocks: tuple[int, ...], skip_tokens: int) -> TransferReport:
        """Bring what the ticket holds behind `skip_tokens` into these blocks of ours. Errors: `TransferError`."""
        try:
            client, link = await self._peers.meet(ticket.owner)
            ours = [(shard.layout, shard.rank) for shard in self._executor.shards()]
            return await pull(
                client,
                self._read,
                ticket,
                blocks,
                link=link,
                read_timeout_s=self._config.transfer.read_timeout_s,
                block_size=self._config.engine.block_size,
                pieces=union_of_pieces([shard.layout for shard in ticket.owner.shards], ours),
                skip_tokens=skip_tokens,
            )
        except PeerLost:
            self._peers.unlink(ticket.owner.incarnation)
            raise

    async def borrow(self, tokens: Sequence[int], ticket: TransferTicket, timeout_s: float) -> int:
        """Bring the beginning that the ticket holds into our cache; answers how many tokens of it lie there.

        0 when there is no room or it did not come: then the prompt is computed, and nothing is lost but time.
        """
        task = asyncio.ensure_future(self._borrow(tokens, ticket, timeout_s))
        self._borrowing.add(task)
        task.add_done_callback(self._borrowing.discard)
        return await task

    async def _borrow(self, tokens: Sequence[int], ticket: TransferTicket, timeout_s: float) -> int:
        try:
            loan = self._engine.loans.borrow(tokens[: ticket.num_tokens])
        except OutOfBlocks:
            return 0
        arrived = False
        try:
            skip_tokens = loan.num_shared * self._config.engine.block_size
            async with asyncio.timeout(timeout_s):
                await self.pull(ticket, loan.blocks[loan.num_shared :], skip_tokens)
            arrived = True
        except (TransferError, TimeoutError) as error:
            reason = str(error) or f"it took longer than {timeout_s:.1f} s"
            logger.warning("worker %s: a prefix did not come: %s", self._config.name, reason)
        finally:
            self._engine.loans.end(loan, arrived=arrived)
            self._changed()
        return ticket.num_tokens if arrived else 0

    async def close(self) -> None:
        """End what is being borrowed."""
        for task in self._borrowing:
            task.cancel()
        if self._borrowing:
            await asyncio.wait(self._borrowing)

    def _read(self, order: PullOrder) -> Read:
        read = self._executor.pull(order)
        self._engine.transfer_begins(order.target_blocks)
        read.settled.add_done_callback(lambda _: self._settled(order.target_blocks))
        return read

    def _settled(self, blocks: tuple[int, ...]) -> None:
        self._engine.transfer_settled(blocks)
        self._changed()
