"""Tests pairs of workers by moving one KV block, and owns the links of pairs that passed. Knows no gateway.

It tests a new worker with its peers, a worker that changes its role with the peers of the new role, and a draining
worker with those that may take over its decodes.
"""

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterable
from dataclasses import replace

from cluster.control.changes import ChangeRefused
from cluster.control.replicas import ReplicaManager
from cluster.runtime.runtime_errors import WorkerGone
from cluster.spec import Role
from diptych.view import WorkerState
from kvtransfer.errors import PeerRefused, TransferError
from kvtransfer.ticket import LinkReport, ShardAddress
from workers.errors import ModelError, WorkerError

logger = logging.getLogger(__name__)

RELINK_S = 5.0
RELINKS_AT_ONCE = 64  # between two partitioned racks, each retry takes its full timeout

Pair = tuple[ReplicaManager, ReplicaManager]  # owner, reader


class Preflight:
    """Owned by the Controller. `links_all`: link any two workers, whatever their roles. `moves`: link any two workers
    that decode, because decodes may migrate.

    `timeout_s` limits the test of one pair. `changed` is called for new links, except by `introduce`.
    """

    def __init__(self, links_all: bool, moves: bool, timeout_s: float, changed: Callable[[], None]) -> None:
        self._links_all = links_all
        self._moves = moves
        self._timeout_s = timeout_s
        self._changed = changed
        self._links: dict[tuple[str, str], LinkReport] = {}  # (owner, reader)
        # Of `_links`; None: outdated.
        self._snapshot: tuple[tuple[LinkReport, ...], frozenset[tuple[str, str]]] | None = None
        self._owner_id, self._number = uuid.uuid4().hex[:8], 0
        self._unlinked: dict[Pair, None] = {}  # failed pairs, oldest first
        self._introducing = asyncio.Lock()  # one at a time, so that two new workers do not miss each other

    @property
    def links(self) -> tuple[LinkReport, ...]:
        return self._published()[0]

    @property
    def links_id(self) -> str:
        """Identifies the current links. Never reused, not even by another controller."""
        self._published()
        return f"{self._owner_id}.{self._number}"

    @property
    def pairs(self) -> frozenset[tuple[str, str]]:
        """Owner and reader of each link."""
        return self._published()[1]

    def _published(self) -> tuple[tuple[LinkReport, ...], frozenset[tuple[str, str]]]:
        if self._snapshot is None:
            self._snapshot = tuple(self._links.values()), frozenset(self._links)
            self._number += 1
        return self._snapshot

    async def introduce(self, new: ReplicaManager, replicas: Callable[[], Iterable[ReplicaManager]]) -> None:
        """Link a new worker with every ready peer that it may exchange KV with.

        Raises `ModelError` if the worker can never work with one of them.
        """
        async with self._introducing:
            self._unlink(new.name, (replica.name for replica in replicas()))
            peers = [peer for peer in replicas() if peer is not new and peer.introduced]
            for peer in peers:
                _refuse_misfit(new, peer, moving=self._may_move(new, peer) or self._may_move(peer, new))
            pairs = [(new, peer) for peer in peers] + [(peer, new) for peer in peers]
            movable = [(owner, reader) for owner, reader in pairs if self._may_move(owner, reader)]
            for error in await asyncio.gather(*(self._link(*pair) for pair in movable)):
                # A restarted worker is accepted anyway, because it can run both phases alone.
                if isinstance(error, PeerRefused) and not new.view.incarnation:
                    raise ModelError(f"{new.name} cannot exchange KV: {error}") from error
            new.introduced = True

    async def flip(self, replica: ReplicaManager, role: Role, replicas: Callable[[], Iterable[ReplicaManager]]) -> None:
        """Change a ready worker's role, once every pair that the role needs is linked.

        Raises `ChangeRefused` without a change if a pair cannot be linked.
        """
        async with self._introducing:
            peers = [peer for peer in replicas() if peer is not replica and _is_ready(peer)]
            directions = [((replica, peer), (role, peer.role)) for peer in peers]
            directions += [((peer, replica), (peer.role, role)) for peer in peers]
            pairs = [
                (owner, reader)
                for (owner, reader), roles in directions
                if self._is_used(*roles) and (owner.name, reader.name) not in self._links
            ]
            refused = f"{replica.name} stays a {replica.role.value} worker"
            for pair in pairs:
                try:
                    _refuse_misfit(*pair, moving=True)
                except ModelError as error:
                    raise ChangeRefused(f"{refused}: {error}") from None
            for (owner, reader), failure in zip(
                pairs, await asyncio.gather(*(self._link(*pair) for pair in pairs)), strict=True
            ):
                if failure is not None:
                    why = str(failure) or "preflight timed out"
                    raise ChangeRefused(f"{refused}: no KV can move from {owner.name} to {reader.name}: {why}")
            if not _is_ready(replica):
                raise ChangeRefused(f"{refused}: it is {replica.view.state.value}; try again when it is ready")
            replica.assign(role)

    async def link_draining(self, leaving: ReplicaManager, replicas: Callable[[], Iterable[ReplicaManager]]) -> None:
        """Link a draining worker to those that may take over its decodes. Logs failures."""
        async with self._introducing:
            if leaving.info is None:
                return
            pairs = [
                (leaving, peer)
                for peer in replicas()
                if _is_ready(peer) and self._may_move(leaving, peer) and (leaving.name, peer.name) not in self._links
            ]
            made = [error is None for error in await asyncio.gather(*(self._link(*pair) for pair in pairs))]
        if any(made):
            self._changed()

    def forget(self, name: str) -> None:
        """The worker has left."""
        self._unlink(name, {end for names in self._links for end in names})
        for pair in [pair for pair in self._unlinked if name in (pair[0].name, pair[1].name)]:
            del self._unlinked[pair]

    def _unlink(self, name: str, others: Iterable[str]) -> None:
        self._snapshot = None
        for other in others:
            self._links.pop((name, other), None)
            self._links.pop((other, name), None)

    async def relink_failed_pairs(self) -> None:
        """Retry failed pairs of ready workers, every `RELINK_S`, each pair in its own task."""
        trying: set[Pair] = set()
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(RELINK_S)
                for pair in tuple(self._unlinked):
                    if not self._may_move(*pair):
                        self._unlinked.pop(pair, None)
                    elif pair not in trying and len(trying) < RELINKS_AT_ONCE and all(map(_is_ready, pair)):
                        trying.add(pair)
                        group.create_task(self._relink(pair, trying))

    async def _relink(self, pair: Pair, trying: set[Pair]) -> None:
        try:
            if await self._link(*pair) is None:
                self._changed()
        finally:
            trying.discard(pair)

    def _may_move(self, owner: ReplicaManager, reader: ReplicaManager) -> bool:
        """Whether KV may move in this direction: by role, or out of a draining worker."""
        if owner.is_leaving:
            return reader.role is not Role.PREFILL and not reader.is_leaving
        return not reader.is_leaving and self._is_used(owner.role, reader.role)

    def _is_used(self, owner: Role, reader: Role) -> bool:
        """Whether the policy may move KV between these roles: any two, or from prefill to decode."""
        return self._links_all or (reader is not Role.PREFILL and (self._moves or owner is not Role.DECODE))

    async def _link(self, owner: ReplicaManager, reader: ReplicaManager) -> Exception | None:
        """Test and link a pair. Returns the error, None on success."""
        assert owner.info is not None and reader.stub is not None, "only started workers are introduced"
        tested = owner.info, reader.info
        try:
            async with asyncio.timeout(self._timeout_s):
                link = await reader.stub.connect(owner.info.peer)
            if owner.is_over or reader.is_over:
                return WorkerGone("it has left")
            if owner.info is not tested[0] or reader.info is not tested[1]:
                return WorkerGone("it was restarted and will be introduced again")
            self._links[owner.name, reader.name] = replace(link, owner=owner.name, reader=reader.name)
            self._snapshot = None
            self._unlinked.pop((owner, reader), None)
            return None
        except (TransferError, WorkerGone, WorkerError, TimeoutError) as error:
            reason = str(error) or "preflight timed out"
            logger.error("no KV can move from %s to %s: %s", owner.name, reader.name, reason)
            self._unlinked.pop((owner, reader), None)
            if self._may_move(owner, reader):
                self._unlinked[owner, reader] = None  # retried last
            return error


def _is_ready(replica: ReplicaManager) -> bool:
    return replica.introduced and replica.view.state is WorkerState.READY


def _refuse_misfit(new: ReplicaManager, peer: ReplicaManager, *, moving: bool) -> None:
    """Raise `ModelError` if two workers could not serve one request together. `moving`: KV may move between them."""
    assert new.info is not None and peer.info is not None
    ours, theirs = new.info, peer.info
    if ours.tokenizer != theirs.tokenizer:
        raise ModelError(
            f"{new.name} on {ours.node} has tokenizer {ours.tokenizer}, {peer.name} on {theirs.node} has "
            f"{theirs.tokenizer}: give all pools the same model folder"
        )
    kv, other = ours.peer.shards[0], theirs.peer.shards[0]
    if moving and kv.layout.fingerprint != other.layout.fingerprint:
        raise ModelError(
            f"the KV of {new.name} ({_kv_text(kv)}) does not fit {peer.name} ({_kv_text(other)}): give both pools the "
            "same model and the same engine.weights"
        )


def _kv_text(shard: ShardAddress) -> str:
    layout = shard.layout
    return f"model {layout.model}, {layout.num_layers} layers, {layout.num_kv_heads} KV heads of {layout.head_dim}"
