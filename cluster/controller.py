"""The controller: which workers there shall be, which there are, and which pairs may move KV.

It keeps every replica alive, introduces new workers to their peers (preflight), and publishes the membership as a
long poll. Requests do not pass through it: gateways go on with the last membership while it is away.
"""

import asyncio
import logging
import math
from dataclasses import replace

from cluster.members import Member, Membership
from cluster.policy.policy import open_policy
from cluster.pool import Keeper
from cluster.runtime.interface import Runtime, WorkerGone, WorkerHandle, WorkerOrder
from cluster.spec import ClusterSpec, PoolSpec, Role
from cluster.view import ModelView, WorkerState
from kvtransfer.errors import PeerRefused, TransferError
from kvtransfer.ticket import LinkReport, ShardAddress
from workers.config import WorkerConfig
from workers.errors import ModelError, WorkerError
from workers.stats import WorkerInfo

logger = logging.getLogger(__name__)

STOP_GRACE_S = 0.5
RELINK_S = 5.0


class Controller:
    """One for each cluster. Owns the keepers."""

    def __init__(
        self, spec: ClusterSpec, runtime: Runtime, secret: str, *, orphan_after_s: float | None = None
    ) -> None:
        self._spec = spec
        self._runtime = runtime
        self._secret = secret
        self._links_all = open_policy(spec, seed=0).links_all
        self._tending: asyncio.Task[None] | None = None
        self._revision = 0
        self._links: dict[tuple[str, str], LinkReport] = {}  # (owner, reader)
        self._unlinked: dict[tuple[Keeper, Keeper], None] = {}  # pairs whose preflight failed, oldest first
        self._changed = asyncio.Event()
        self._introducing = asyncio.Lock()
        self._orphan_after_s = orphan_after_s
        self._orphan_timer: asyncio.TimerHandle | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._keepers = [
            Keeper(pool, self._order(pool, index), runtime, spec.health.start_timeout_s, self._introduce, self._bump)
            for pool in spec.pools
            for index in range(pool.replicas)
        ]

    async def begin(self) -> None:
        """Start all workers, or find them again after a crash of ours; does not wait for them."""
        for keeper in self._keepers:
            keeper.begin()
        self._tending = asyncio.ensure_future(self._tend())
        await self.keep_alive()

    async def keep_alive(self) -> bool:
        """Whoever serves this cluster calls in; when it has been away for `orphan_after_s`, everything is stopped.

        False: this controller was restarted and must `begin`.
        """
        if self._tending is None:
            return False
        if self._orphan_timer is not None:
            self._orphan_timer.cancel()
        if self._orphan_after_s is not None:
            self._orphan_timer = asyncio.get_running_loop().call_later(self._orphan_after_s, self._orphaned)
        return True

    def _orphaned(self) -> None:
        logger.warning("nobody has called in for %.0f s: the cluster is stopped", self._orphan_after_s or 0.0)
        self._stopping = asyncio.ensure_future(self._stop_all())

    async def _stop_all(self) -> None:
        await self.stop()
        await self._runtime.end_all()

    async def stop(self) -> None:
        """End every worker."""
        if self._orphan_timer is not None:
            self._orphan_timer.cancel()
        if self._tending is not None:
            self._tending.cancel()
        await asyncio.gather(*(keeper.end(STOP_GRACE_S) for keeper in self._keepers))

    async def ready(self, timeout_s: float) -> ModelView | None:
        """The model's facts once every worker is ready, None when that takes longer.

        Raises what made a worker impossible (`ModelError`, `RuntimeUnavailable`).
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not all(keeper.view.state is WorkerState.READY for keeper in self._keepers):
                    for keeper in self._keepers:
                        if keeper.fatal is not None:
                            raise keeper.fatal
                    await self._changed.wait()
        except TimeoutError:
            return None
        infos = [keeper.info for keeper in self._keepers if keeper.info is not None]
        return self._model(infos[0])

    def _model(self, info: WorkerInfo) -> ModelView:
        return ModelView(self._spec.model, info.context_length, info.vocab_size)

    async def members(self, revision: int, timeout_s: float) -> Membership:
        """The membership once it is newer than `revision`, or as it is after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._revision <= revision:
                    await self._changed.wait()
        except TimeoutError:
            pass  # unchanged is an answer too
        members = tuple(Member(keeper.view, keeper.handle) for keeper in self._keepers)
        return Membership(self._revision, members, tuple(self._links.values()))

    def _bump(self) -> None:
        self._revision += 1
        self._changed.set()
        self._changed = asyncio.Event()

    def _order(self, pool: PoolSpec, index: int) -> WorkerOrder:
        forms = {(each.engine.block_size, each.engine.dtype) for each in self._spec.pools}
        config = WorkerConfig(
            name=f"{pool.name}-{index}",
            pool=pool.name,
            model=pool.model or self._spec.model,
            engine=pool.engine,
            parallel=pool.parallel,
            transfer=self._spec.transfer,
            executor=self._spec.executor,
            secret=self._secret,
            cpus=max(1, int(pool.resources.cpu)),
            prefix_tokens=math.lcm(*(block_size for block_size, _ in forms)),
            staging_bytes=self._spec.transfer.staging_bytes if len(forms) > 1 else 0,
            cost=pool.cost,
        )
        health = self._spec.health
        return WorkerOrder(config, pool.resources, health.heartbeat_s, health.dead_after_s, health.place_timeout_s)

    # ---- preflight ---------------------------------------------------------------------------------------------

    async def _introduce(self, new: Keeper) -> None:
        """Let the new worker and every ready peer of the other phase move one block before traffic does.

        Raises `ModelError` for a worker that can never work with one that is here.
        """
        async with self._introducing:  # one at a time, or two newcomers would both miss each other
            for peer in self._keepers:
                self._links.pop((new.name, peer.name), None)
                self._links.pop((peer.name, new.name), None)
            peers = [peer for peer in self._keepers if peer is not new and peer.introduced]
            for peer in peers:
                _refuse_misfit(new, peer, moving=self._may_move(new, peer) or self._may_move(peer, new))
            pairs = [(new, peer) for peer in peers] + [(peer, new) for peer in peers]
            movable = [(owner, reader) for owner, reader in pairs if self._may_move(owner, reader)]
            for error in await asyncio.gather(*(self._link(owner, reader) for owner, reader in movable)):
                # One that ran before is let in all the same: it can still do both phases alone.
                if isinstance(error, PeerRefused) and not new.view.incarnation:
                    raise ModelError(f"{new.name} cannot exchange KV: {error}") from error
            new.introduced = True

    def _may_move(self, owner: Keeper, reader: Keeper) -> bool:
        """Whether the policy may send KV that way: any way, or from who prefills to who decodes."""
        usual = owner.pool.role is not Role.DECODE and reader.pool.role is not Role.PREFILL
        return self._links_all or usual

    async def _tend(self) -> None:
        """Try again, once in a while, to link pairs whose preflight failed though both live."""
        while True:
            await asyncio.sleep(RELINK_S)
            for owner, reader in tuple(self._unlinked):
                are_ready = owner.view.state is reader.view.state is WorkerState.READY
                if are_ready and await self._link(owner, reader) is None:
                    self._bump()

    async def _link(self, owner: Keeper, reader: Keeper) -> Exception | None:
        """None, or why there is no link."""
        assert owner.info is not None and reader.handle is not None, "only started workers are introduced"
        handle: WorkerHandle = reader.handle
        try:
            async with asyncio.timeout(self._spec.transfer.read_timeout_s):
                link = await handle.connect(owner.info.peer)
            self._links[owner.name, reader.name] = replace(link, owner=owner.name, reader=reader.name)
            self._unlinked.pop((owner, reader), None)
            return None
        except (TransferError, WorkerGone, WorkerError, TimeoutError) as error:
            reason = str(error) or "preflight timed out"
            logger.error("no KV can move from %s to %s: %s", owner.name, reader.name, reason)
            self._unlinked[owner, reader] = None
            return error


def _refuse_misfit(new: Keeper, peer: Keeper, *, moving: bool) -> None:
    """Raise `ModelError` when two workers could not serve one request together. `moving`: KV may move between them."""
    assert new.info is not None and peer.info is not None
    ours, theirs = new.info, peer.info
    if ours.tokenizer != theirs.tokenizer:
        raise ModelError(
            f"{new.name} on {ours.node} has tokenizer {ours.tokenizer}, {peer.name} on {theirs.node} has "
            f"{theirs.tokenizer}: one token would mean two things; give all pools the same model folder"
        )
    kv, other = ours.peer.shards[0], theirs.peer.shards[0]
    if moving and kv.layout.fingerprint != other.layout.fingerprint:
        raise ModelError(
            f"the KV of {new.name} ({_kv_words(kv)}) is not that of {peer.name} ({_kv_words(other)}), and no request "
            "could move between them: give both pools the same model and the same engine.weights"
        )


def _kv_words(shard: ShardAddress) -> str:
    layout = shard.layout
    return f"model {layout.model}, {layout.num_layers} layers, {layout.num_kv_heads} KV heads of {layout.head_dim}"
