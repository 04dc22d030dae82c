"""The engine: sequences, blocks and leases of one worker, as plain synchronous state.

    plan = engine.schedule(now)          # what to compute, or None
    engine.commit(plan, result, now)     # the executor's result
    outputs = engine.drain()             # tokens, tickets and failures, for the subscribers

Up to `depth` plans may be in flight; they run and are committed in the order they were made.
Time is an argument. Used only from its worker's event loop; knows no device, no I/O and no peer.
"""

import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items

from workers.config import EngineConfig, TransferConfig
from workers.costs import CostModel, LinearCost
from workers.engine.block_store import BlockStore
from workers.engine.blocks import BlockPool, block_hashes
from workers.engine.borrowing import BorrowedBlocks
from workers.engine.catching_up import catches_up, unaffected
from workers.engine.decode_steps import DecodeSteps, num_decode_steps
from workers.engine.engine_stats import EngineStats
from workers.engine.estimate import StepEstimate
from workers.engine.executor import ModelFacts, RunningDecodes
from workers.engine.host_tier import StepCopies
from workers.engine.leases import LeaseManager
from workers.engine.loans import LoanManager
from workers.engine.prefetch import Prefetcher
from workers.engine.prefix_fetch import PrefixFetches
from workers.engine.reservations import Reservations
from workers.engine.scheduler import Scheduler
from workers.engine.sequence import Sequence
from workers.engine.sequence_manager import EngineOutput as EngineOutput
from workers.engine.sequence_manager import SequenceManager
from workers.engine.step import BrokenStep, RemoteKV, StepPlan, StepResult
from workers.engine.store_tiers import StoreTier
from workers.errors import InvalidRequest, Overloaded
from workers.request import Request, check_prompt
from workers.stats import NO_PULLS, BorrowStats, Pulls, WorkerStats

NO_TRANSFER_OPTIONS = TransferConfig()


@catches_up
class Engine:
    """Owned by one Worker. The first `reserved` blocks of the pool belong to preflight.

    `cost` is the initial estimate of step times. `depth` is the number of plans that the executor runs at once; the
    scheduler spreads work over that many. Host memory keeps what the device evicts, in up to `max_pinned` blocks what
    is pinned; `stores` get what is there.
    """

    def __init__(
        self,
        config: EngineConfig,
        facts: ModelFacts,
        transfer: TransferConfig = NO_TRANSFER_OPTIONS,
        *,
        reserved: int = 0,
        cost: CostModel | None = None,
        prefix_tokens: int = 1,
        depth: int = 1,
        max_pinned: int = 0,
        stores: Items[BlockStore] = (),
    ) -> None:
        assert depth >= 1, f"no plan fits into a depth of {depth}"
        self._pool = BlockPool(
            config.kv_blocks,
            config.block_size,
            block_bytes=facts.layout.block_bytes,
            reserved=reserved,
            prefix_caching=config.prefix_caching,
            host_blocks=facts.host_cache_blocks,
            max_pinned=max_pinned,
            has_state=bool(facts.layout.state_layers),
        )
        context_length = facts.context_length
        self._longest = min(context_length, config.max_model_len or context_length)  # of a sequence that borrows
        self.max_length = min(self._longest, self._pool.num_blocks * config.block_size)
        self._config = config
        self._digests_a_step = max(1, config.max_batch_tokens // config.block_size)
        self._eos = facts.eos_token_ids
        self._vocab_size = facts.vocab_size
        self._estimate = StepEstimate(cost or LinearCost(), self._pool.block_bytes)
        self._leases = LeaseManager(self._pool, transfer.lease_s, digest=transfer.digest)
        self._loans = LoanManager(self._pool, transfer.lease_s)
        self._stores = [StoreTier(store, self._pool) for store in stores]
        self._pool.forget_in_stores = lambda hashes: [store.forget(hashes) for store in self._stores]
        prefix_blocks = math.lcm(prefix_tokens, config.block_size) // config.block_size
        self._prefix_fetches = PrefixFetches(self._pool, self._leases, prefix_blocks, self._estimate)
        self._prefetcher = Prefetcher(self._stores, self._pool, self._estimate, self._prefix_fetches)
        self._scheduler = Scheduler(config, self._pool, self._leases, self._prefetcher, self._estimate, depth=depth)
        self._kv = self._scheduler.kv
        self._sequences = SequenceManager(
            self._pool, self._scheduler, self._leases, self._prefetcher, facts.eos_token_ids, config.dtype
        )
        parts = self._pool, self._scheduler, self._leases, self._loans
        self._reservations = Reservations(
            config,
            *parts,
            self._prefix_fetches,
            self._estimate,
            self._sequences,
            max_length=self.max_length,
            vocab_size=facts.vocab_size,
            depth=depth,
        )
        self._stats = EngineStats(*parts, self._stores, self._sequences, self._estimate)
        self._catch_up: Callable[[bool], object] | None = None

    @property
    def pool(self) -> BlockPool:
        return self._pool

    @property
    def leases(self) -> LeaseManager:
        return self._leases

    @property
    def loans(self) -> LoanManager:
        return self._loans

    @property
    def borrowed(self) -> BorrowedBlocks:
        """The blocks that lenders hold, and their moves."""
        return self._kv.borrowed

    @property
    def prefix_fetches(self) -> PrefixFetches:
        return self._prefix_fetches

    @property
    def sequences(self) -> SequenceManager:
        return self._sequences

    @property
    def reservations(self) -> Reservations:
        """Reservations for prompts that other workers compute."""
        return self._reservations

    # ---- taking requests ---------------------------------------------------------------------------------------

    def add(self, request: Request, now_s: float, *, hold: bool, cut_tokens: int = 0, borrows: bool = False) -> None:
        """Queue a prompt. `hold`: stop after the first token and keep the KV under a lease.

        `cut_tokens`: hold the KV of only this many tokens and sample none; the reader computes the rest (0: all).
        `borrows`: it may be longer than the pool; while memory is short, its blocks move to lenders (`BorrowedBlocks`).
        Raises `InvalidRequest` or `Overloaded`.
        """
        self._sequences.refuse_known(request)
        max_length = self._longest if borrows else self.max_length
        check_prompt(request, max_length, self._vocab_size)
        if cut_tokens and not (hold and 0 < cut_tokens < request.num_tokens):
            rule = f"a held prompt may be cut behind 1 to {request.num_tokens - 1} of its tokens"
            raise InvalidRequest("cut_tokens", f"is {cut_tokens}; {rule}")
        if len(self._scheduler.queues.waiting) >= self._config.max_waiting:
            raise Overloaded(f"{len(self._scheduler.queues.waiting)} prompts wait already", retry_after_s=1.0)
        sequence = Sequence(request, now_s, hold=hold, cut_tokens=cut_tokens, max_length=max_length, borrows=borrows)
        self._sequences.add(sequence)
        self._scheduler.queues.add(sequence)
        if len(self._pool.host.pins):
            sequence.hash_tokens(self._pool.block_size)
            self._pool.host.pins.renew(sequence.block_hashes, now_s)
        if borrows:
            self._kv.borrowed.add(sequence)
        else:
            self._prefetcher.begin(sequence, now_s)
            if self._scheduler.num_in_flight:  # it has to wait, and else its turn decides where to begin
                self._prefetcher.read()

    def pin(self, request: Request, ttl_s: float, now_s: float) -> None:
        """Keep the prompt's full blocks in host memory, once they are computed, until `ttl_s` after their last use.

        Raises `InvalidRequest` where nothing may be pinned, `Overloaded` beside too many other pins.
        """
        self._pool.pin(self._block_hashes(request), ttl_s, now_s)

    def unpin(self, request: Request | None) -> int:
        """Returns how many blocks of this prompt, or in all, were pinned."""
        host = self._pool.host
        return host.unpin([*host.pins] if request is None else self._block_hashes(request))

    def cached_tokens(self, request: Request) -> int:
        """How many of the prompt's first tokens are on the device or in host memory."""
        return self._pool.num_kept(self._block_hashes(request)) * self._pool.block_size

    def _block_hashes(self, request: Request) -> list[bytes]:
        return block_hashes(request.prompt, self._pool.block_size, salt=request.cache_salt)

    # ---- stepping ----------------------------------------------------------------------------------------------

    def schedule(self, now_s: float, *, ahead: bool = False) -> StepPlan | None:
        """The next step, or None when there is nothing to compute. Raises `BrokenStep`.

        `ahead`: behind a step in flight, although its tokens are not known; None if it has to wait for them.
        """
        if ahead and not self._scheduler.runs_ahead:
            return None
        self._kv.borrowed.start(is_short=bool(self._scheduler.queues.waiting))
        self._prefetcher.schedule(now_s)
        missing = self._kv.take_missing()  # for reservations
        step = self._scheduler.schedule(now_s, ahead=ahead)
        lacking = self._kv.take_missing()
        if missing := max(missing, lacking):
            self._loans.recall(missing, now_s)
        if self._reservations.revoke(lacking if step is None else 0, now_s):
            step = self._scheduler.schedule(now_s)
        self._prefetcher.read()
        if step is None:
            return None if ahead else self._without_sequences()
        if step.error is not None:
            raise BrokenStep(StepPlan(self._scheduler.steps, ())) from step.error
        for sequence in step.admitted:
            if sequence.hold:
                self._sequences.outputs.append(self._leases.hold(sequence, now_s))
        return step.plan(self._scheduler.steps, self._eos, self._digests_a_step, self._sequences.fail_on_error)

    def _without_sequences(self) -> StepPlan | None:
        """A step for readers of offered blocks and for pins; None: there is nothing to restore, digest or save."""
        copies = StepCopies()
        self._kv.tier.save_pinned(copies)
        digests = self._leases.offered(self._scheduler.steps + 1, self._digests_a_step, copies)
        if not digests and not copies.swap_in and not copies.leaving:
            return None
        self._scheduler.launch(copies)
        return copies.plan(self._scheduler.steps, (), digests)

    @property
    @unaffected
    def wakes_at_s(self) -> float:
        """When to call `schedule` again if nothing else happens, since a prompt has then waited long enough."""
        return min(self._prefetcher.wakes_at_s, self._reservations.wakes_at_s)

    def commit(self, plan: StepPlan, result: StepResult, now_s: float) -> None:
        """Apply the result of the oldest step in flight."""
        self._assert_oldest(plan.number)
        if plan.chunks:  # a step that only copies or digests says nothing about others
            self._stats.took((result.seconds,))
            self._estimate.learn(plan, result.seconds)
        touched = self._scheduler.commit_copies()
        digests = dict(zip(plan.digest_blocks, zip(*result.digests, strict=True), strict=False))
        self._sequences.process(plan, result, digests, now_s)
        saved = self._kv.tier.take_saved()
        for store in self._stores:  # now, since the content of some may have been found to be in doubt
            store.save(saved)
        self._leases.advance_offers(plan.number, digests, plan.swap_in)
        self._end_pending(touched)

    def _assert_oldest(self, number: int) -> None:
        oldest = self._scheduler.steps + 1 - self._scheduler.num_in_flight
        assert number == oldest, f"step {number} is not the oldest"

    def _end_pending(self, touched: Items[Sequence]) -> None:
        """The step of these sequences has ended: end those that were to end with it."""
        for sequence in touched:
            if sequence.finish_pending and not sequence.in_flight:
                self._sequences.end(sequence)
        self._kv.borrowed.settle()

    # ---- decode steps that run as one ----------------------------------------------------------------------------

    @unaffected
    def num_decode_steps(self, most: int, *, logs: bool) -> int:
        """How many steps, from the one in flight on and up to `most`, compute one token of the same sequences.

        It holds until another method changes the engine. Only the last of them may end a sequence, or, with `logs`,
        change the KV event log.
        """
        busy = len(self._leases) or len(self._loans) or self._stores or self._pool.host.num_blocks
        sequences = () if busy else self._scheduler.only_decodes
        return num_decode_steps(sequences, self._pool, most, logs=logs) if sequences else 1

    @unaffected
    def begin_decodes(self, steps: RunningDecodes, catch_up: Callable[[bool], object]) -> DecodeSteps:
        """Such steps run as one: `count_decodes`, and `DecodeSteps.commit`, all but the last, then `end_decodes` and
        `commit_decodes`.

        `catch_up` is called before the engine is read (False) or changed (True), to report what has ended by then.
        """
        self._catch_up = catch_up
        return DecodeSteps(steps, self._scheduler.only_decodes, self._kv, self._pool, self._estimate)

    def _before_use(self) -> None:
        """A method that is not `unaffected` is called."""
        if self._catch_up is not None:
            self._catch_up(True)
        self._stats.changed()

    @unaffected
    def count_decodes(self, seconds: Items[float]) -> None:
        """Steps have ended, the one in flight first: each took so long. They are not committed yet."""
        self._stats.took(seconds)
        self._scheduler.steps += len(seconds)

    @unaffected
    def end_decodes(self) -> int:
        """The number of the step in flight, which is the last one."""
        self._catch_up = None
        return self._scheduler.steps

    def commit_decodes(self, decodes: DecodeSteps, result: StepResult, now_s: float, *, deferred: bool) -> None:
        """`commit` of the last one. `deferred`: without outputs for sequences that go on."""
        self._assert_oldest(result.number)
        self._stats.took((result.seconds,))
        touched = self._scheduler.commit_copies()
        self._sequences.process_decodes(decodes.commit_last(result.seconds), now_s, deferred=deferred)
        self._kv.tier.take_saved()  # none
        self._leases.advance_offers(result.number, {}, ())
        self._end_pending(touched)

    # ---- endings -----------------------------------------------------------------------------------------------

    def steps_failed(self, plans: Items[StepPlan], reason: str) -> None:
        """The oldest step failed and all steps in flight have ended. Their requests fail; all others continue.

        What these steps should have computed and copied is discarded. Cached prefixes are dropped, because some may be
        in the target blocks of a copy that did not happen.
        """
        touched: dict[Sequence, None] = {}
        for _ in plans:
            touched.update(dict.fromkeys(self._scheduler.commit_copies()))
        self._kv.tier.take_saved()  # not saved
        self._pool.clear_cache()
        self._leases.steps_failed()
        for sequence in touched:
            if sequence.finish_pending:
                self._sequences.end(sequence)
            else:
                self._sequences.fail(sequence.key, reason)

    @unaffected
    def expire(self, now_s: float) -> None:
        """Reclaim leases and loans of silent peers, and end pins; a prompt computed for a silent reader fails.

        Needed while `may_expire`. No steps run as one beside leases, loans or host memory.
        """
        self._stats.changed()
        self._pool.host.expire_pins(now_s)
        self._loans.expire(now_s)
        for lease in self._leases.expire(now_s):
            if not lease.offered:
                self._sequences.fail(lease.key, "its reader went silent and the lease expired")

    # ---- state -------------------------------------------------------------------------------------------------

    @unaffected
    def drain(self) -> list[EngineOutput]:
        """The outputs since the last call, in order."""
        return self._sequences.take_outputs()

    @unaffected
    def requests(self) -> Iterator[Request]:
        """The requests of all sequences."""
        return (sequence.request for sequence in self._sequences)

    @unaffected
    def holds(self, key: str) -> bool:
        """Whether a sequence of this key is here (its lease may outlive it)."""
        return key in self._sequences

    @unaffected
    def is_silent(self, key: str) -> bool:
        """Whether no outputs of this key will come: there is no such sequence, or it ends with its last step."""
        sequence = self._sequences.get(key)
        return sequence is None or sequence.finish_pending

    @unaffected
    def remote(self) -> Iterator[RemoteKV]:
        """The blocks that lenders hold."""
        return self._kv.borrowed.remote()

    @property
    @unaffected
    def has_work(self) -> bool:
        """Whether there is any sequence, lease or loan."""
        return bool(len(self._sequences) or len(self._leases) or len(self._loans))

    @property
    @unaffected
    def may_expire(self) -> bool:
        """Whether there is anything for `expire`."""
        return bool(len(self._leases) or len(self._loans) or len(self._pool.host.pins))

    @unaffected
    def stats(
        self,
        bubble_share: float = 0.0,
        pulls: Pulls = NO_PULLS,
        adapters: tuple[str, ...] = (),
        borrowed: tuple[BorrowStats, ...] = (),
    ) -> WorkerStats:
        if self._catch_up is not None:
            self._catch_up(False)
        return self._stats.read(bubble_share, pulls, adapters, borrowed)

    def check(self) -> None:
        """Prove that every block is accounted for. Raises AssertionError."""
        self._pool.check(
            [
                *(s.blocks for s in self._sequences),
                *self._scheduler.leaving(),
                *(x.blocks for x in self._leases),
                *(x.blocks for x in self._loans),
                *(x.blocks for x in self._kv.borrowed.returning()),
                *(x.held for x in self._prefix_fetches),
            ]
        )
        self._scheduler.check()
        self._prefetcher.check()
        self._sequences.check()
