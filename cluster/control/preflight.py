"""Tests pairs of workers by moving one KV block. Owns the measured links, and the pairs between which no KV can move.
Knows no gateway.

It tests a new worker with its peers, a worker that changes its role with the peers of the new role, and a draining
worker with those that may take over its decodes. In a small cluster it tests all pairs. In a larger one it tests a
sample; readers connect when a pair is first used, and gateways report those that cannot.
"""

import asyncio
import contextlib
import heapq
import logging
import uuid
from collections import defaultdict
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
SMALL = 16  # a worker with at most this many peers is tested with all of them
SAMPLE = 4  # else with this many of each pool
TESTED_AT_ONCE = 16  # so that few new workers test the same peer at once
MAX_LINKS, MAX_LINKS_OF_POOLS = SMALL * (SMALL + 1), SAMPLE * SAMPLE  # published; the second beyond the first

Pair = tuple[ReplicaManager, ReplicaManager]  # owner, reader
Tested = dict[Pair, Exception | None]  # the error of each tested pair


class Preflight:
    """Owned by the Controller. `links_all`: KV may move between any two workers, whatever their roles. `moves`: between
    any two workers that decode, because decodes may migrate.

    `timeout_s` limits the test of one pair. `changed` is called when a pair works again, or no longer.
    """

    def __init__(self, links_all: bool, moves: bool, timeout_s: float, changed: Callable[[], None]) -> None:
        self._links_all = links_all
        self._moves = moves
        self._timeout_s = timeout_s
        self._changed = changed
        self._links: defaultdict[tuple[str, str], dict[tuple[str, str], LinkReport]] = defaultdict(dict)  # see `_keep`
        self._snapshot: tuple[tuple[LinkReport, ...], frozenset[tuple[str, str]]] | None = None  # None: outdated
        self._owner_id, self._number = uuid.uuid4().hex[:8], 0
        self._unlinked: dict[Pair, None] = {}  # failed pairs, oldest first
        # How often a worker was in a sample for a worker of a pool.
        self._chosen: defaultdict[str, defaultdict[ReplicaManager, int]] = defaultdict(lambda: defaultdict(int))
        self._has_unlinked = asyncio.Event()  # a gateway reported a pair
        self._testing = asyncio.Semaphore(TESTED_AT_ONCE)

    @property
    def links(self) -> tuple[LinkReport, ...]:
        """Links that passed preflight: all in a small cluster, else some of each two pools."""
        return self._published()[0]

    @property
    def unlinked(self) -> frozenset[tuple[str, str]]:
        """Owner and reader of each pair that failed and may be needed."""
        return self._published()[1]

    @property
    def links_id(self) -> str:
        """Identifies the current links and unlinked pairs. Never reused, not even by another controller."""
        self._published()
        return f"{self._owner_id}.{self._number}"

    def made(self, links_id: str) -> bool:
        """Whether a `links_id` is of this controller."""
        return links_id.partition(".")[0] == self._owner_id

    def _published(self) -> tuple[tuple[LinkReport, ...], frozenset[tuple[str, str]]]:
        if self._snapshot is None:
            unlinked = frozenset((owner.name, reader.name) for owner, reader in self._unlinked)
            self._snapshot = tuple(link for links in self._links.values() for link in links.values()), unlinked
            self._number += 1
        return self._snapshot

    async def test_new(self, new: ReplicaManager, replicas: Callable[[], Iterable[ReplicaManager]]) -> None:
        """Test a new worker with ready peers that it may exchange KV with.

        Raises `ModelError` if the worker can never work with one of them.
        """
        async with self._testing:
            self._unlink(new.name)
            tested: Tested = {}
            while pairs := self._to_test(new, replicas(), tested):  # peers may have come meanwhile
                tested |= await self._test(pairs)
                for error in tested.values():
                    # A restarted worker is accepted anyway, because it can run both phases alone.
                    if isinstance(error, PeerRefused) and not new.view.incarnation:
                        raise ModelError(f"{new.name} cannot exchange KV: {error}") from error
            if 2 * sum(error is not None for error in tested.values()) >= max(1, len(tested)):
                self._mark_others_unlinked(new, replicas(), tested)
            new.passed_preflight = True

    def _to_test(self, new: ReplicaManager, replicas: Iterable[ReplicaManager], tested: Tested) -> list[Pair]:
        """The pairs that are left to test before a worker is ready. Raises `ModelError`."""
        peers = [peer for peer in replicas if peer is not new and peer.passed_preflight]
        kinds = {(peer.pool.name, peer.view.role, peer.is_leaving): peer for peer in peers}
        for peer in peers if len(peers) <= SMALL else kinds.values():  # the workers of a pool fit each other
            _refuse_misfit(new, peer, moving=self._may_move(new, peer) or self._may_move(peer, new))
        pairs = [pair for peer in self._sample(new, peers, tested) for pair in ((new, peer), (peer, new))]
        return [pair for pair in pairs if pair not in tested and self._may_move(*pair)]

    def _mark_others_unlinked(self, new: ReplicaManager, replicas: Iterable[ReplicaManager], tested: Tested) -> None:
        """Most of a sample failed: use no other pair of the worker until it passes preflight."""
        for peer in replicas:
            for pair in ((new, peer), (peer, new)):
                if peer is not new and peer.passed_preflight and pair not in tested and self._may_move(*pair):
                    self._failed(*pair)

    async def flip(self, replica: ReplicaManager, role: Role, replicas: Callable[[], Iterable[ReplicaManager]]) -> None:
        """Change a ready worker's role, once the pairs that the role needs are tested.

        Raises `ChangeRefused` without a change if a pair cannot be linked.
        """
        refused = f"{replica.name} stays a {replica.role.value} worker"
        tested: Tested = {}
        while pairs := self._to_flip(replica, role, replicas(), tested):
            for pair in pairs:
                try:
                    _refuse_misfit(*pair, moving=True)
                except ModelError as error:
                    raise ChangeRefused(f"{refused}: {error}") from None
            tested |= await self._test(pairs)
            for (owner, reader), failure in tested.items():
                if failure is not None:
                    why = str(failure) or "preflight timed out"
                    raise ChangeRefused(f"{refused}: no KV can move from {owner.name} to {reader.name}: {why}")
        if not _is_ready(replica):
            raise ChangeRefused(f"{refused}: it is {replica.view.state.value}; try again when it is ready")
        replica.assign(role)

    def _to_flip(
        self, replica: ReplicaManager, role: Role, replicas: Iterable[ReplicaManager], tested: Tested
    ) -> list[Pair]:
        """The pairs that are left to test before a worker gets a role."""
        peers = [peer for peer in replicas if peer is not replica and _is_ready(peer)]
        failed = {each for pair in self._unlinked if replica in pair for each in pair}
        chosen = dict.fromkeys([*self._sample(replica, peers, tested), *(peer for peer in peers if peer in failed)])
        pairs = [(replica, peer) for peer in chosen if self._is_used(role, peer.role)]
        pairs += [(peer, replica) for peer in chosen if self._is_used(peer.role, role)]
        return [pair for pair in pairs if pair not in tested and not self._has_link(*pair)]

    async def _test(self, pairs: list[Pair]) -> Tested:
        return dict(zip(pairs, await asyncio.gather(*(self._link(*pair) for pair in pairs)), strict=True))

    def _has_link(self, owner: ReplicaManager, reader: ReplicaManager) -> bool:
        return (owner.name, reader.name) in self._links[owner.pool.name, reader.pool.name]

    async def link_draining(self, leaving: ReplicaManager, replicas: Callable[[], Iterable[ReplicaManager]]) -> None:
        """Test a draining worker with those that may take over its decodes. Logs failures."""
        if leaving.info is None:
            return
        peers = [peer for peer in replicas() if _is_ready(peer) and self._may_move(leaving, peer)]
        untested = [peer for peer in self._sample(leaving, peers, {}) if not self._has_link(leaving, peer)]
        for peer in untested:
            self._failed(leaving, peer)  # until it passes
        if await asyncio.gather(*(self._link(leaving, peer) for peer in untested)):
            self._changed()

    def forget(self, name: str) -> None:
        """The worker has left."""
        self._unlink(name)
        for pair in [pair for pair in self._unlinked if name in (pair[0].name, pair[1].name)]:
            self._passed(pair)
        for times in self._chosen.values():
            for peer in [peer for peer in times if peer.name == name]:
                del times[peer]

    def _unlink(self, name: str) -> None:
        """Drop a worker's measured links."""
        for links in self._links.values():
            for pair in [pair for pair in links if name in pair]:
                del links[pair]
                self._snapshot = None

    def mark_unlinked(self, owner: ReplicaManager, reader: ReplicaManager) -> None:
        """Do not use a pair until it passes preflight, which begins soon."""
        if self._may_move(owner, reader) and _is_ready(owner) and _is_ready(reader):
            self._failed(owner, reader)
            self._has_unlinked.set()
            self._changed()

    def _failed(self, owner: ReplicaManager, reader: ReplicaManager) -> None:
        if (owner, reader) in self._unlinked:
            del self._unlinked[owner, reader]
        else:
            self._snapshot = None
            self._links[owner.pool.name, reader.pool.name].pop((owner.name, reader.name), None)
        self._unlinked[owner, reader] = None  # retried last

    def _passed(self, pair: Pair) -> None:
        if pair in self._unlinked:
            self._snapshot = None
            del self._unlinked[pair]

    async def relink_failed_pairs(self) -> None:
        """Retry failed pairs of ready workers, every `RELINK_S` or when one is reported, each in its own task."""
        trying: set[Pair] = set()
        async with asyncio.TaskGroup() as group:
            while True:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._has_unlinked.wait(), RELINK_S)
                self._has_unlinked.clear()
                for pair in tuple(self._unlinked):
                    if not self._may_move(*pair):
                        self._passed(pair)
                    elif pair not in trying and len(trying) < RELINKS_AT_ONCE and all(map(_is_ready, pair)):
                        trying.add(pair)
                        group.create_task(self._relink(pair, trying))

    async def _relink(self, pair: Pair, trying: set[Pair]) -> None:
        try:
            if await self._link(*pair) is None:
                self._changed()
        finally:
            trying.discard(pair)

    def _sample(self, replica: ReplicaManager, peers: list[ReplicaManager], tested: Tested) -> list[ReplicaManager]:
        """All peers in a small cluster; else, once, a few of each pool: those that were chosen least for this pool."""
        if len(peers) <= SMALL or tested:
            return peers if len(peers) <= SMALL else []
        pools: defaultdict[str, list[ReplicaManager]] = defaultdict(list)
        for peer in peers:
            pools[peer.pool.name].append(peer)
        times = self._chosen[replica.pool.name]
        chosen = [peer for pool in pools.values() for peer in heapq.nsmallest(SAMPLE, pool, key=times.__getitem__)]
        for peer in chosen:
            times[peer] += 1
        return chosen

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
        assert owner.info is not None and reader.stub is not None, "only started workers are tested"
        tested = owner.info, reader.info
        try:
            async with asyncio.timeout(self._timeout_s):
                link = await reader.stub.connect(owner.info.peer)
            if owner.is_over or reader.is_over:
                return WorkerGone("it has left")
            if owner.info is not tested[0] or reader.info is not tested[1]:
                return WorkerGone("it was restarted and will be tested again")
            self._passed((owner, reader))
            self._keep(owner, reader, link)
            return None
        except (TransferError, WorkerGone, WorkerError, TimeoutError) as error:
            reason = str(error) or "preflight timed out"
            logger.error("no KV can move from %s to %s: %s", owner.name, reader.name, reason)
            if self._may_move(owner, reader):
                self._failed(owner, reader)
            else:
                self._passed((owner, reader))
            return error

    def _keep(self, owner: ReplicaManager, reader: ReplicaManager, link: LinkReport) -> None:
        """Keep a measured link, by pools and names, while there are few of these pools."""
        links, pair = self._links[owner.pool.name, reader.pool.name], (owner.name, reader.name)
        num_links = sum(map(len, self._links.values()))
        if link.bytes_per_s > 0.0 and (pair in links or num_links < MAX_LINKS or len(links) < MAX_LINKS_OF_POOLS):
            links[pair] = replace(link, owner=owner.name, reader=reader.name)
            self._snapshot = None


def _is_ready(replica: ReplicaManager) -> bool:
    return replica.passed_preflight and replica.view.state is WorkerState.READY


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
