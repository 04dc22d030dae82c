"""The engine: sequences, blocks and leases of one worker, as plain synchronous state.

    plan = engine.schedule(now)          # what to compute, or None
    engine.commit(plan, result, now)     # the executor's result
    outputs = engine.drain()             # tokens, tickets and failures, for the subscribers

Up to `depth` plans may be in flight; they run and are committed in the order they were made.
Time is an argument. Used only from its worker's event loop; knows no device, no I/O and no peer.
"""

import logging
import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items

from msgspec import structs

from workers.config import EngineConfig
from workers.costs import CostModel, LinearCost
from workers.engine.block_store import BlockStore
from workers.engine.blocks import BlockPool, prefix_hashes
from workers.engine.borrowing import BlockMove, Moves
from workers.engine.cache_hits import DEVICE, FETCHED, HOST
from workers.engine.catching_up import catches_up, unaffected
from workers.engine.decode_steps import DecodeSteps, Sample, num_decode_steps
from workers.engine.estimate import StepEstimate
from workers.engine.host_tier import StepCopies
from workers.engine.leases import LeaseBook
from workers.engine.loads import Loads
from workers.engine.loans import LoanBook
from workers.engine.prefix_fetch import PrefixFetches
from workers.engine.scheduler import Scheduler
from workers.engine.sequence import Lease, Sequence, State
from workers.engine.slo import slot_refusal
from workers.engine.step import Chunk, RemoteKV, StepPlan, StepResult
from workers.engine.store_tiers import StoreTier
from workers.errors import InvalidRequest, Overloaded, UnknownSequence
from workers.request import MIXED_KV, FailedOut, HeadOut, Request, Reservation, TokenLogprobs, TokensOut, check_prompt
from workers.stats import NO_PULLS, BorrowStats, Pulls, TierStats, WorkerStats

logger = logging.getLogger(__name__)

REVOKE_S = 2.0  # that prompts wait for reserved blocks while nothing runs

EngineOutput = TokensOut | HeadOut | FailedOut | Lease  # a Lease: a held prompt has its blocks, so its reader may start


class BrokenStep(Exception):
    """The next step could not be built. `plan` is an empty stand-in for it until `Engine.steps_failed`."""

    def __init__(self, plan: StepPlan) -> None:
        super().__init__(plan)
        self.plan = plan


@catches_up
class Engine:
    """Owned by one Worker. The first `reserved` blocks of the pool belong to preflight.

    `cost` is the initial estimate of step times. A block has `block_bytes`. `depth` is the number of
    plans that the executor runs at once; the scheduler spreads work over that many. `host_cache_blocks` of host memory
    keep what the device evicts, up to `most_pinned` of them what is pinned; `stores` keep what they get. `has_state`:
    see `BlockPool`.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        context_length: int,
        eos_token_ids: tuple[int, ...],
        vocab_size: int,
        lease_s: float,
        reserved: int = 0,
        digest: bool = True,
        cost: CostModel | None = None,
        block_bytes: int = 0,
        prefix_tokens: int = 1,
        depth: int = 1,
        host_cache_blocks: int = 0,
        most_pinned: int = 0,
        stores: Items[BlockStore] = (),
        has_state: bool = False,
    ) -> None:
        assert depth >= 1, f"no plan fits into a depth of {depth}"
        self._pool = BlockPool(
            config.kv_blocks,
            config.block_size,
            reserved=reserved,
            prefix_caching=config.prefix_caching,
            host_blocks=host_cache_blocks,
            most_pinned=most_pinned,
            has_state=has_state,
        )
        self.capacity_tokens = self._pool.num_blocks * config.block_size
        self._longest = min(context_length, config.max_model_len or context_length)  # of a sequence that borrows
        self.max_length = min(self._longest, self.capacity_tokens)
        self._config = config
        self._staging = min(config.staging_blocks or max(1, self._pool.num_blocks // 2), self._pool.num_blocks)
        self._digests_a_step = max(1, config.max_batch_tokens // config.block_size)
        self._eos = eos_token_ids
        self._vocab_size = vocab_size
        self._estimate = StepEstimate(cost or LinearCost(), block_bytes)
        self._depth = depth
        self._leases = LeaseBook(self._pool, lease_s, digest=digest)
        self._loans = LoanBook(self._pool, lease_s)
        self._stores = [StoreTier(store, self._pool, block_bytes) for store in stores]
        self._pool.forget_in_stores = self._forget_in_stores
        prefix_blocks = math.lcm(prefix_tokens, config.block_size) // config.block_size
        self._prefix_fetches = PrefixFetches(self._pool, self._leases, prefix_blocks, self._estimate, block_bytes)
        self._loads = Loads(self._stores, self._pool, self._estimate, block_bytes, self._prefix_fetches)
        self._scheduler = Scheduler(
            config, self._pool, self._leases, self._loads, self._estimate, block_bytes=block_bytes, depth=depth
        )
        self._kv = self._scheduler.kv
        self._sequences: dict[str, Sequence] = {}
        self._outputs: list[EngineOutput] = []
        self._steps = 0
        self._step_s = 0.0
        self._non_finite = 0
        self._starved_s = math.inf  # since when prompts wait for blocks while nothing runs
        self._decodes: DecodeSteps | None = None  # they run now
        self._catch_up: Callable[[bool], object] | None = None
        self._known_stats: WorkerStats | None = None  # nothing has changed since but what decode steps change

    @property
    def pool(self) -> BlockPool:
        return self._pool

    @property
    def leases(self) -> LeaseBook:
        return self._leases

    @property
    def loans(self) -> LoanBook:
        return self._loans

    @property
    def moves(self) -> Moves:
        """Of blocks to and from lenders."""
        return self._kv.moves

    @property
    def prefix_fetches(self) -> PrefixFetches:
        return self._prefix_fetches

    # ---- taking requests ---------------------------------------------------------------------------------------

    def add(self, request: Request, now_s: float, *, hold: bool, cut_tokens: int = 0, borrows: bool = False) -> None:
        """Queue a prompt. `hold`: stop after the first token and keep the KV under a lease.

        `cut_tokens`: hold the KV of only this many tokens and sample none; the reader computes the rest (0: all).
        `borrows`: it may be longer than the pool; while memory is short, its blocks move to lenders (`take_moves`).
        Raises `InvalidRequest` or `Overloaded`.
        """
        self._refuse_known(request)
        max_length = self._longest if borrows else self.max_length
        check_prompt(request, max_length, self._vocab_size)
        if cut_tokens and not (hold and 0 < cut_tokens < request.num_tokens):
            rule = f"a held prompt may be cut behind 1 to {request.num_tokens - 1} of its tokens"
            raise InvalidRequest("cut_tokens", f"is {cut_tokens}; {rule}")
        if len(self._scheduler.queues.waiting) >= self._config.max_waiting:
            raise Overloaded(f"{len(self._scheduler.queues.waiting)} prompts wait already", retry_after_s=1.0)
        sequence = Sequence(request, now_s, hold=hold, cut_tokens=cut_tokens, max_length=max_length, borrows=borrows)
        self._sequences[request.key] = sequence
        self._scheduler.queues.add(sequence)
        if len(self._pool.host.pins):
            sequence.hashes = prefix_hashes(sequence.tokens, self._pool.block_size, salt=sequence.salt)
            self._pool.host.pins.renew(sequence.hashes, now_s)
        if borrows:
            self._kv.moves.add(sequence)
        else:
            self._loads.begin(sequence, now_s)
            if self._scheduler.num_in_flight:  # it has to wait, and else its turn decides where to begin
                self._loads.read()

    def reserve(self, request: Request, asked_s: float) -> Reservation:
        """`wanted` and `grant` in one call. Raises `InvalidRequest` or `Overloaded`."""
        return self.grant(self.wanted(request, asked_s))

    @unaffected
    def wanted(self, request: Request, asked_s: float) -> Sequence:
        """A sequence for a prompt that another worker computes; pass it to `grant` until that succeeds.

        Its blocks are hashed here, once. Blocks needed by prompts that arrived before `asked_s` are not given to it.
        Raises `InvalidRequest`.
        """
        self._refuse_known(request)
        check_prompt(request, self.max_length, self._vocab_size)
        sequence = Sequence(request, asked_s, max_length=self.max_length, state=State.RESERVED)
        if request.kv_dtype != self._config.dtype:
            sequence.kv_dtype = request.kv_dtype
        if sequence.kv_dtype != MIXED_KV:
            sequence.hashes = prefix_hashes(sequence.tokens, self._pool.block_size, salt=sequence.salt)
        return sequence

    def grant(self, sequence: Sequence) -> Reservation:
        """Reserve blocks for a wanted prompt. Raises `Overloaded`, or `InvalidRequest` if its key is in use by now."""
        request = sequence.request
        self._refuse_known(request)
        if refusal := self._refusal(sequence):
            raise Overloaded(refusal, retry_after_s=0.1)
        self._sequences[request.key] = sequence
        return Reservation(request.key, "", len(sequence.blocks), sequence.cached_tokens)

    def _refusal(self, sequence: Sequence) -> str:
        """Why there is no room for a wanted prompt; empty: it now has its blocks."""
        request, queues = sequence.request, self._scheduler.queues
        if self.waits_for_sibling(request):
            return f"the KV of a sibling of {request.key} is being transferred; it will be shared"
        reserved = [each for each in self._sequences.values() if each.state is State.RESERVED]
        total = -(-request.num_tokens // self._pool.block_size)
        staged = sum(len(each.blocks) for each in reserved)
        # One prompt of any size may always be staged: the budget limits concurrency, not length.
        if staged and staged + total > self._staging:
            return f"{staged} of {self._staging} staging blocks are reserved"
        earlier = [each for each in queues.waiting if each.arrival_s < sequence.arrival_s]
        if len(queues.running) + len(reserved) + len(earlier) >= self._config.max_running:
            return f"all {self._config.max_running} decode slots are taken or waited for"
        decoding = reserved + [each for each in queues.running if not each.hold]
        if refusal := slot_refusal(self._estimate, decoding, request, self._depth):
            return refusal
        if request.fresh:
            self._pool.forget(sequence.hashes)
        kept = sum(-(-len(each.tokens) // self._pool.block_size) for each in earlier)
        if not self._kv.reserve(sequence, self._prefix_fetches.known(sequence.hashes), kept):
            return f"{total} blocks wanted, {self._pool.num_free} free, {kept} kept for prompts that arrived earlier"
        return ""

    def _refuse_known(self, request: Request) -> None:
        if request.key in self._sequences:
            raise InvalidRequest("request.id", f"{request.key!r} is already running here")

    @unaffected
    def waits_for_sibling(self, request: Request) -> bool:
        """Whether a sibling's transfer will bring more than the last block of the KV that this request would fetch."""
        return any(
            each.state is State.RESERVED
            and not each.fetched
            and each.request.is_sibling(request)
            and request.num_tokens - each.cached_tokens > self._pool.block_size
            for each in self._sequences.values()
        )

    # ---- decoding what was prefilled elsewhere -----------------------------------------------------------------

    @unaffected
    def reserved(self, key: str) -> Sequence:
        """The reserved sequence of this key. Raises `UnknownSequence`."""
        sequence = self._sequences.get(key)
        if sequence is None or sequence.state is not State.RESERVED:
            raise UnknownSequence(f"{key} holds no reservation here; it ended or the worker restarted")
        return sequence

    def begin_fetch(self, key: str) -> None:
        """The KV of this reservation begins to arrive. Raises `UnknownSequence`."""
        self.reserved(key).is_arriving = True

    def fetched(self, key: str, now_s: float, *, num_tokens: int | None = None, starts_decoding: bool = False) -> None:
        """The KV of the first `num_tokens` tokens (None: the whole prompt) is in the reserved blocks, verified.

        `starts_decoding`: compute the rest and sample without `decode`, because no token was sampled elsewhere.
        """
        sequence = self.reserved(key)
        arrived = sequence.request.num_tokens if num_tokens is None else num_tokens
        sequence.num_computed = max(arrived, sequence.cached_tokens)
        self._kv.name_blocks(sequence)
        sequence.fetched = True
        sequence.starts_decoding = starts_decoding
        self._start_if_ready(sequence, now_s)

    def decode(self, key: str, tokens: Items[int], now_s: float) -> None:
        """Decode after these tokens, generated elsewhere, once the KV is here. Missing KV is computed first."""
        sequence = self.reserved(key)
        if sequence.decode_called_s is not None:
            raise InvalidRequest("request.id", f"{key} is already decoding")
        if len(sequence.tokens) + len(tokens) > self.max_length:
            raise InvalidRequest("tokens", f"{key} would be longer than the {self.max_length} tokens of this worker")
        sequence.tokens += tokens
        sequence.decode_called_s = now_s
        self._start_if_ready(sequence, now_s)

    def _start_if_ready(self, sequence: Sequence, now_s: float) -> None:
        if sequence.fetched and (sequence.starts_decoding or sequence.decode_called_s is not None):
            sequence.begin(now_s, self._pool.block_size if self._pool.has_state else 1)
            self._scheduler.queues.running.append(sequence)

    def offer_migration(self, key: str, most_tokens: int, now_s: float) -> Lease | None:
        """Lease the full blocks of a running sequence's first `most_tokens` tokens to the target of its migration.

        It continues here until it is aborted, whatever happens to the lease. None: there is no full block, so the
        target must compute everything. Raises `UnknownSequence`.
        """
        sequence = self._sequences.get(key)
        if sequence is None or sequence.finish_pending or sequence.hold or sequence.state is State.RESERVED:
            raise UnknownSequence(f"{key} does not decode here; it ended or has not started")
        if sequence.state is not State.RUNNING or sequence.remote:
            return None
        blocks = sequence.blocks[: min(sequence.num_computed, most_tokens) // self._pool.block_size]
        self._pool.share(blocks)
        return self._leases.offer(key, blocks, now_s) if blocks else None

    # ---- blocks on other workers -------------------------------------------------------------------------------

    def begin_move(self, move: BlockMove, now_s: float) -> Lease:
        """Lease the blocks of this move to a lender. Raises `UnknownSequence`."""
        sequence = self._sequences.get(move.key)
        if sequence is None or (sequence.num_remote, sequence.num_moving) != (move.first, move.count):
            raise UnknownSequence(f"{move.key} does not move blocks; it ended or was preempted")
        blocks = sequence.blocks[move.first : move.first + move.count]
        self._pool.share(blocks)
        return self._leases.offer(f"{move.key}:move", blocks, now_s)

    def not_moved(self, move: BlockMove, reason: str) -> None:
        """No lender took them: the sequence fails if it needs their memory."""
        self._leases.drop(f"{move.key}:move")
        if self._kv.moves.not_moved(move):
            self.fail(move.key, reason)

    def offer_loan(self, number: int, count: int, now_s: float) -> Lease:
        """Lease the first `count` blocks of a loan to its borrower, or to another lender. Raises `LeaseLost`."""
        blocks = self._loans.ready(number, count, now_s)
        self._pool.share(blocks)
        return self._leases.offer(f"loan:{number}", [*blocks], now_s)

    @unaffected
    def remote(self) -> Iterator[RemoteKV]:
        """The blocks that lenders hold."""
        return self._kv.moves.remote()

    @property
    @unaffected
    def has_work(self) -> bool:
        """Whether there is any sequence, lease or loan."""
        return bool(self._sequences or len(self._leases) or len(self._loans))

    @property
    @unaffected
    def may_expire(self) -> bool:
        """Whether there is anything for `expire`."""
        return bool(len(self._leases) or len(self._loans) or len(self._pool.host.pins))

    # ---- pins --------------------------------------------------------------------------------------------------

    def pin(self, request: Request, ttl_s: float, now_s: float) -> None:
        """Keep the prompt's full blocks in host memory, once they are computed, until `ttl_s` after their last use.

        Raises `InvalidRequest` where nothing may be pinned, `Overloaded` beside too many other pins.
        """
        pins, names = self._pool.host.pins, self._names(request)
        if not pins.most:
            raise InvalidRequest("pin", "nothing can be pinned here; give the pool cache: {host: 8GiB, pins: 1GiB}")
        if missing := pins.num_missing(names):
            room = f"{len(pins)} of at most {pins.most} blocks are pinned already"
            raise Overloaded(f"the prompt needs {missing} blocks more than may be pinned: {room}", retry_after_s=1.0)
        self._pool.pin(names, ttl_s, now_s)

    def unpin(self, request: Request | None) -> int:
        """Returns how many blocks of this prompt, or in all, were pinned."""
        host = self._pool.host
        return host.unpin([*host.pins] if request is None else self._names(request))

    def cached_tokens(self, request: Request) -> int:
        """How many of the prompt's first tokens are on the device or in host memory."""
        names, host = self._names(request), self._pool.host
        here = self._pool.num_known(names)
        kept = next((place for place, name in enumerate(names[here:]) if name not in host), len(names) - here)
        return (here + kept) * self._pool.block_size

    def _names(self, request: Request) -> list[bytes]:
        return prefix_hashes(request.prompt, self._pool.block_size, salt=request.cache_salt)

    # ---- stepping ----------------------------------------------------------------------------------------------

    def schedule(self, now_s: float, *, ahead: bool = False) -> StepPlan | None:
        """The next step, or None when there is nothing to compute. Raises `BrokenStep`.

        `ahead`: behind a step in flight, although its tokens are not known; None if it has to wait for them.
        """
        if ahead and not self._scheduler.runs_ahead:
            return None
        self._kv.moves.start(is_short=bool(self._scheduler.queues.waiting))
        self._loads.schedule(now_s)
        missing = self._kv.take_missing()  # for reservations
        step = self._scheduler.schedule(now_s, ahead=ahead)
        lacking = self._kv.take_missing()
        if missing := max(missing, lacking):
            self._loans.recall(missing, now_s)
        if self._revoke(lacking if step is None else 0, now_s):
            step = self._scheduler.schedule(now_s)
        self._loads.read()
        if step is None:
            return None if ahead else self._without_sequences()
        self._steps += 1
        if step.error is not None:
            raise BrokenStep(StepPlan(self._steps, ())) from step.error
        for sequence in step.admitted:
            if sequence.hold:
                self._outputs.append(self._leases.hold(sequence, now_s))
        chunks: list[Chunk] = []
        digests: list[tuple[int, int]] = []
        for each in step.slices:
            try:
                chunks.append(each.sequence.chunk(each.first, each.count, self._pool.block_size, self._eos, now_s))
            except Exception as error:
                self._fail_on_error(each.sequence, error)
                continue
            if len(self._leases):
                digests += self._leases.undigested(each.sequence.key, each.first + each.count)
        digests += self._leases.offered(self._steps, self._digests_a_step, step.moves)
        return StepPlan(
            self._steps,
            tuple(chunks),
            tuple(dict.fromkeys(digests)),  # once for a block that two held prompts share
            swap_out=tuple(step.moves.swap_out),
            swap_in=tuple(step.moves.swap_in),
            copies=tuple(step.moves.copies),
        )

    def _without_sequences(self) -> StepPlan | None:
        """A step for readers of offered blocks and for pins; None: there is nothing to restore, digest or save."""
        moves = StepCopies()
        self._kv.tier.save_pinned(moves)
        digests = self._leases.offered(self._steps + 1, self._digests_a_step, moves)
        if not digests and not moves.swap_in and not moves.leaving:
            return None
        self._steps += 1
        self._scheduler.launch(moves)
        saved, restored = tuple(moves.swap_out), tuple(moves.swap_in)
        return StepPlan(self._steps, (), tuple(dict.fromkeys(digests)), swap_out=saved, swap_in=restored)

    def _revoke(self, missing: int, now_s: float) -> bool:
        """End reservations if prompts have waited for their blocks for `REVOKE_S` while nothing ran. Whether any ended.

        Their own prompts have not begun elsewhere, perhaps because they wait for blocks that another worker reserved
        for the prompts that wait here. Of the fewest attempts first, so that no request loses all of its own.
        """
        missing -= self._loans.num_blocks
        if missing <= 0 or self._scheduler.queues.running or self._scheduler.num_in_flight or len(self._leases):
            self._starved_s = math.inf
            return False
        self._starved_s = min(self._starved_s, now_s)
        if now_s < self._starved_s + REVOKE_S:
            return False
        self._starved_s = now_s
        reserved = [each for each in self._sequences.values() if each.state is State.RESERVED and not each.is_arriving]
        if missing > sum(len(each.blocks) for each in reserved):
            return False
        wanted = self._pool.num_free + missing
        for each in sorted(reserved, key=lambda each: (each.request.attempt, -each.arrival_s)):
            if self._pool.num_free < wanted:
                self.fail(each.key, f"its reservation was revoked: prompts waited {REVOKE_S:g} s for its blocks")
        return True

    @property
    @unaffected
    def wakes_at_s(self) -> float:
        """When to call `schedule` again if nothing else happens, since a prompt has then waited long enough."""
        return min(self._loads.wakes_at_s, self._starved_s + REVOKE_S)

    def _forget_in_stores(self, names: Items[bytes]) -> None:
        for store in self._stores:
            store.forget(names)

    def commit(self, plan: StepPlan, result: StepResult, now_s: float) -> None:
        """Apply the result of the oldest step in flight."""
        assert plan.number == self._steps + 1 - self._scheduler.num_in_flight, f"step {plan.number} is not the oldest"
        self._learn(plan, result.seconds)
        touched = self._scheduler.land()
        self._save(self._kv.tier.take_saved())
        digests = dict(zip(plan.digest_blocks, zip(*result.digests, strict=True), strict=False))
        size = self._pool.block_size
        scored = result.prompt_logprobs or ((),) * len(plan.chunks)
        pooled = result.pooled or ((),) * len(plan.chunks)
        stuck, forced = dict(result.stuck), dict(result.forced)
        each_chunk = zip(plan.chunks, result.tokens, result.logprobs, scored, strict=True)
        for index, (chunk, token, logprobs, prompt) in enumerate(each_chunk):
            sequence = self._sequences[chunk.key]
            num_tokens = len(chunk.tokens)
            sequence.num_ordered -= num_tokens
            sequence.num_computed = chunk.first_position + num_tokens
            if sequence.finish_pending:
                continue
            try:
                missing = (chunk.draw is not None and token is None) or index in result.lost
                if missing or not all(math.isfinite(each.chosen) for each in prompt):
                    self._fail_not_computed(sequence, index in result.lost, stuck.get(index, ""))
                    continue
                if prompt:
                    sequence.prompt_logprobs += prompt
                sequence.pooled += pooled[index]
                if sequence.num_computed >= (sequence.num_named + 1) * size or sequence.request.group:
                    self._kv.name_blocks(sequence)
                if len(self._leases):
                    self._leases.advance(sequence, digests)
                if token is not None:
                    self._append(sequence, (token, *forced.get(index, ())), logprobs, now_s)
                elif sequence.cut_tokens == sequence.num_computed:
                    cached = sequence.cached_tokens, sequence.cached_from
                    self._outputs.append(HeadOut(sequence.key, sequence.timing(now_s), *cached))
                    self._end_held(sequence)
            except Exception as error:
                self._fail_on_error(sequence, error)
        self._leases.advance_offers(plan.number, digests, plan.swap_in)
        for sequence in touched:
            if sequence.finish_pending and not sequence.in_flight:
                self._end(sequence)
        self._kv.moves.settle()

    def _learn(self, plan: StepPlan, seconds: float) -> None:
        """How long a step takes. One that only copies or digests says nothing about others."""
        if plan.chunks:
            self._took(seconds)
            self._estimate.learn(plan, seconds)

    def _took(self, seconds: float) -> None:
        self._step_s = seconds if not self._step_s else 0.8 * self._step_s + 0.2 * seconds

    # ---- decode steps that run as one ----------------------------------------------------------------------------

    @unaffected
    def num_decode_steps(self, most: int, *, logs: bool) -> int:
        """How many steps, from the one in flight on and up to `most`, compute one token of the same sequences.

        It holds until another method changes the engine. Only the last of them may end a sequence, or, with `logs`,
        change the cache log.
        """
        busy = len(self._leases) or len(self._loans) or self._stores or self._pool.host.num_blocks
        sequences = () if busy else self._scheduler.only_decodes
        return num_decode_steps(sequences, self._pool, most, logs=logs) if sequences else 1

    @unaffected
    def begin_decodes(self, sample: Sample, catch_up: Callable[[bool], object]) -> None:
        """Such steps run as one: `count_decodes` and then `commit_decodes` for all but the last, then `end_decodes`.

        `catch_up` is called before the engine is read (False) or changed (True), to report what has ended by then.
        """
        self._decodes = DecodeSteps(self._scheduler.only_decodes, self._kv, self._pool, sample)
        self._catch_up = catch_up

    def _before_use(self) -> None:
        """A method that is not `unaffected` is called."""
        if self._catch_up is not None:
            self._catch_up(True)
        self._known_stats = None

    @property
    @unaffected
    def num_until_filled(self) -> int:
        """After how many more of these steps the number of used blocks may change."""
        assert self._decodes is not None, "no steps run as one"
        return self._decodes.num_until_filled

    @unaffected
    def count_decodes(self, seconds: Items[float]) -> None:
        """Steps have ended, the one in flight first: each took so long. They are not committed yet."""
        for each in seconds:
            self._took(each)
        self._steps += len(seconds)

    @unaffected
    def commit_decodes(self, seconds: Items[float]) -> None:
        """The next of these, at most `num_until_filled`."""
        decodes = self._decodes
        assert decodes is not None, "no steps run as one"
        self._estimate.learn_decodes(decodes.batch, decodes.context_tokens, seconds)
        decodes.advance(len(seconds))
        self._kv.take_missing()  # no loan could give it

    @unaffected
    def drain_decodes(self, ends_s: Items[float]) -> list[TokensOut]:
        """The tokens of these steps since the last call. `ends_s`: of all that are committed."""
        assert self._decodes is not None, "no steps run as one"
        return self._decodes.outputs(ends_s)

    @unaffected
    def end_decodes(self) -> StepPlan:
        """The plan of the step in flight, which is the last one. Everything before it was drained."""
        assert self._decodes is not None, "no steps run as one"
        sequences, self._decodes, self._catch_up = self._decodes.sequences, None, None
        size, now_s = self._pool.block_size, math.nan  # all have begun
        chunks = tuple([each.chunk(each.num_computed, 1, size, self._eos, now_s) for each in sequences])
        return StepPlan(self._steps, chunks)

    def _save(self, saved: Items[tuple[bytes, int]]) -> None:
        for store in self._stores:
            store.save(saved)

    def _append(self, sequence: Sequence, tokens: Items[int], logprobs: TokenLogprobs | None, now_s: float) -> None:
        """Up to the token that ends the answer. Only the first one is of a sequence that is held for a reader."""
        for count, token in enumerate(tokens):
            sequence.num_forced = count
            if self._append_one(sequence, token, logprobs, now_s) or sequence.hold:
                break

    def _append_one(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None, now_s: float) -> bool:
        """Whether it ends the answer."""
        sequence.tokens.append(token)
        finish = sequence.finish_reason(self._eos)
        first = sequence.decode_called_s is None and sequence.first_token_s is None
        self._outputs.append(
            TokensOut(
                key=sequence.key,
                first_position=sequence.num_output - 1,
                tokens=(token,),
                timing=sequence.timing(now_s),
                logprobs=(logprobs,) if logprobs is not None else (),
                finish=finish,
                prefilled=first,
                cached_tokens=sequence.cached_tokens,
                cached_from=sequence.cached_from if first else (),
                prompt_logprobs=tuple(sequence.prompt_logprobs) if first else (),
                pooled=tuple(sequence.pooled) if first else (),
            )
        )
        if first:
            sequence.first_token_s = now_s
        if sequence.hold:
            self._end_held(sequence)
        elif finish is not None:
            self._leases.drop(sequence.key)  # its reader has nothing left to fetch
            if sequence.in_flight:  # in a step that was made before its end was known
                sequence.finish_pending = True
            else:
                self._end(sequence)
        return finish is not None

    def _end_held(self, sequence: Sequence) -> None:
        self._leases.finish(sequence.key)
        self._end(sequence)

    # ---- endings -----------------------------------------------------------------------------------------------

    def abort(self, key: str) -> bool:
        """End a sequence and the lease of its KV, without further outputs; False when there is neither."""
        leased = self._leases.drop(key)
        sequence = self._sequences.get(key)
        if sequence is None or sequence.finish_pending:
            return leased
        if sequence.in_flight:
            sequence.finish_pending = True
        else:
            self._end(sequence)
        return True

    def fail(
        self, key: str, reason: str, *, corrupt: bool = False, final: bool = False, unlinked: bool = False
    ) -> None:
        """Abort, and report the reason to the subscriber. For the flags, see `FailedOut`."""
        if key in self._sequences:
            self._outputs.append(FailedOut(key, reason, corrupt, final, unlinked))
        self.abort(key)

    def _fail_on_error(self, sequence: Sequence, error: Exception) -> None:
        """An error in work for one sequence ends that sequence only."""
        logger.error("%s failed with an unexpected error", sequence.key, exc_info=error)
        self.fail(sequence.key, f"unexpected {type(error).__name__}: {error}")

    def steps_failed(self, plans: Items[StepPlan], reason: str) -> None:
        """The oldest step failed and all steps in flight have ended. Their requests fail; all others continue.

        What these steps should have computed and copied is discarded. Cached prefixes are dropped, because some
        may be in the target blocks of a copy that did not happen.
        """
        touched: dict[Sequence, None] = {}
        for _ in plans:
            touched.update(dict.fromkeys(self._scheduler.land()))
        self._kv.tier.take_saved()  # not saved
        self._pool.clear_cache()
        self._leases.steps_failed()
        for sequence in touched:
            if sequence.finish_pending:
                self._end(sequence)
            else:
                self.fail(sequence.key, reason)

    def _fail_not_computed(self, sequence: Sequence, is_lost: bool, stuck: str) -> None:
        """No token can be sampled. If that is the model's fault, no other sequence may use this KV."""
        if stuck:
            return self.fail(sequence.key, f"its grammar allows no token: {stuck}", final=True)
        if is_lost:
            return self.fail(sequence.key, "KV on another worker is lost: it ended, or did not answer in time")
        self._non_finite += 1
        self._pool.forget(sequence.hashes)
        where = f"behind token {sequence.num_computed}"
        why = f"the model's logits are not finite {where}; the weights, or KV in {self._config.dtype}, may be the cause"
        self.fail(sequence.key, why, final=True)

    @unaffected
    def expire(self, now_s: float) -> None:
        """Reclaim leases and loans of silent peers, and end pins; a prompt computed for a silent reader fails.

        Needed while `may_expire`. No steps run as one beside leases, loans or host memory.
        """
        self._known_stats = None
        self._pool.host.expire_pins(now_s)
        self._loans.expire(now_s)
        for lease in self._leases.expire(now_s):
            if not lease.offered:
                self.fail(lease.key, "its reader went silent and the lease expired")

    def _end(self, sequence: Sequence) -> None:
        self._scheduler.remove(sequence)
        self._loads.end(sequence)
        sequence.state = State.FINISHED
        del self._sequences[sequence.key]

    # ---- state -------------------------------------------------------------------------------------------------

    @unaffected
    def drain(self) -> list[EngineOutput]:
        """The outputs since the last call, in order."""
        outputs, self._outputs = self._outputs, []
        return outputs

    @unaffected
    def requests(self) -> Iterator[Request]:
        """Of all sequences here."""
        return (sequence.request for sequence in self._sequences.values())

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
    def stats(
        self,
        bubble_share: float = 0.0,
        pulls: Pulls = NO_PULLS,
        adapters: tuple[str, ...] = (),
        borrowed: tuple[BorrowStats, ...] = (),
    ) -> WorkerStats:
        if self._catch_up is not None:
            self._catch_up(False)
        known, given = self._known_stats, (bubble_share, pulls, adapters, borrowed)
        if known is None or self._stores or self._pool.host.num_blocks:  # which change by themselves
            known = self._stats(*given)
        elif known.steps != self._steps or given != (known.bubble_share, known.pulls, known.adapters, known.borrowed):
            known = structs.replace(
                known,
                free_blocks=self._pool.num_free,
                cached_blocks=self._pool.num_cached,
                steps=self._steps,
                step_s=self._step_s,
                cache_number=self._pool.log.number,
                bubble_share=bubble_share,
                pulls=pulls,
                adapters=adapters,
                borrowed=borrowed,
            )
        self._known_stats = known
        return known

    def _stats(
        self, bubble_share: float, pulls: Pulls, adapters: tuple[str, ...], borrowed: tuple[BorrowStats, ...]
    ) -> WorkerStats:
        queued_tokens = num_reserved = 0
        hits = self._pool.hits
        for each in self._sequences.values():
            if each.state is State.RESERVED:
                num_reserved += 1
            else:
                queued_tokens += len(each.tokens) - each.num_computed
        return WorkerStats(
            queued_tokens=queued_tokens,
            waiting=len(self._scheduler.queues.waiting),
            running=len(self._scheduler.queues.running),
            reserved=num_reserved,
            leases=len(self._leases),
            free_blocks=self._pool.num_free,
            cached_blocks=self._pool.num_cached,
            quarantined_blocks=self._pool.num_quarantined,
            total_blocks=self._pool.num_blocks,
            steps=self._steps,
            step_s=self._step_s,
            preemptions=self._scheduler.queues.preemptions,
            expired_leases=self._leases.expired,
            lent_blocks=self._loans.num_blocks,
            borrowed_blocks=sum(each.num_blocks for each in self.remote()),
            expired_loans=self._loans.expired,
            borrowed=borrowed,
            bubble_share=bubble_share,
            cache_number=self._pool.log.number,
            sought_tokens=hits.sought_tokens,
            found_tokens=sum(hits.tokens.values()),
            fetched_tokens=hits.tokens.get(FETCHED, 0),
            fetched_saved_s=hits.saved_s[FETCHED],
            device_saved_s=hits.saved_s[DEVICE],
            device_lent_tokens=self._leases.lent_tokens.get(DEVICE, 0),
            tiers=self._tiers(),
            non_finite=self._non_finite,
            pulls=pulls,
            adapters=adapters,
        )

    def _tiers(self) -> tuple[TierStats, ...]:
        if not self._pool.host.num_blocks:
            return ()
        host = structs.replace(self._kv.tier.stats(), lent_tokens=self._leases.lent_tokens[HOST])
        return host, *(store.stats() for store in self._stores)

    def check(self) -> None:
        """Prove that every block is accounted for. Raises AssertionError."""
        self._pool.check(
            [
                *(s.blocks for s in self._sequences.values()),
                *self._scheduler.leaving(),
                *(x.blocks for x in self._leases),
                *(x.blocks for x in self._loans),
                *(x.blocks for x in self._kv.moves.returning()),
                *(x.held for x in self._prefix_fetches),
            ]
        )
        self._scheduler.check()
        self._loads.check()
        queued = [*self._scheduler.queues.waiting, *self._scheduler.queues.running]
        assert all(self._sequences[s.key] is s for s in queued), "a queue holds a sequence that ended"
        assert len(queued) == sum(s.state is not State.RESERVED for s in self._sequences.values())
