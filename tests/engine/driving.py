"""Drives an Engine without any device: a step's token is a pure function of (request, position).

The memory of `Device` is a dictionary; it proves at each step that every token attends to what belongs there, whatever
was shared, copied, saved and brought back. `Pipeline` keeps several plans in flight, each computed at any time between
its schedule and its commit.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvtransfer.layout import KVLayout
from workers.config import EngineConfig
from workers.costs import CostModel
from workers.engine.block_store import BlockStore
from workers.engine.engine import Engine, EngineOutput
from workers.engine.estimate import plan_seconds
from workers.engine.executor import ModelFacts
from workers.engine.prefix_fetch import PrefixFetch, PrefixFetches
from workers.engine.step import ELSEWHERE, PENDING, Chunk, StepPlan, StepResult
from workers.request import Request, SamplingParams, TokenLogprobs, TokensOut

VOCAB = 1000
EOS = 0
STATE = -1  # the slot of a block's state


@dataclass(frozen=True)
class SizedLayout(KVLayout):
    """Of blocks of any number of bytes."""

    num_bytes: int = 0

    @property
    def block_bytes(self) -> int:
        return self.num_bytes


def model_facts(
    *,
    context_length: int = 4096,
    vocab_size: int = VOCAB,
    block_bytes: int = 0,
    host_cache_blocks: int = 0,
    has_state: bool = False,
) -> ModelFacts:
    layout = SizedLayout("model", 1, 1, 2, 4, state_layers=(0,) * has_state, num_bytes=block_bytes)
    return ModelFacts(vocab_size, context_length, (EOS,), layout, host_cache_blocks=host_cache_blocks)


def engine(
    *,
    cost: CostModel | None = None,
    depth: int = 1,
    prefix_tokens: int = 1,
    max_pinned: int = 0,
    stores: Sequence[BlockStore] = (),
    context_length: int = 128,
    block_bytes: int = 0,
    host_cache_blocks: int = 0,
    has_state: bool = False,
    **config: object,
) -> Engine:
    sizes: dict[str, object] = {"block_size": 4, "kv_blocks": 34, "max_batch_tokens": 16, "max_running": 8}
    return Engine(
        EngineConfig(**(sizes | config)),  # type: ignore[arg-type]
        model_facts(
            context_length=context_length,
            block_bytes=block_bytes,
            host_cache_blocks=host_cache_blocks,
            has_state=has_state,
        ),
        reserved=2,
        cost=cost,
        depth=depth,
        prefix_tokens=prefix_tokens,
        max_pinned=max_pinned,
        stores=stores,
    )


def request(name: str, prompt: tuple[int, ...], *, max_tokens: int = 8, **fields: object) -> Request:
    sampling = SamplingParams(temperature=0.0, seed=1, max_tokens=max_tokens)
    return Request(name, prompt, sampling, **({"reply_to": "test"} | fields))  # type: ignore[arg-type]


def next_token(key: str, position: int) -> int:
    return 1 + (sum(map(ord, key)) * 31 + position * 7) % (VOCAB - 1)


def digest_of(block: int, slots: int) -> bytes:
    return b"%d of %d" % (slots, block)


def result(plan: StepPlan, seconds: float = 0.01) -> StepResult:
    tokens = tuple(next_token(c.key, c.draw.position) if c.draw else None for c in plan.chunks)
    digests = (tuple(digest_of(*each) for each in plan.digest_blocks),)
    scores = tuple(tuple(TokenLogprobs(-float(token)) for token in chunk.targets) for chunk in plan.chunks)
    return StepResult(plan.number, tokens, tuple(None for _ in tokens), digests, seconds, scores)


def step(
    engine: Engine, now_s: float = 0.0, device: "Device | None" = None
) -> tuple[StepPlan | None, list[EngineOutput]]:
    """One schedule and commit; returns the plan and the outputs. The step takes as long as the engine expects."""
    plan = engine.schedule(now_s)
    if plan is not None:
        engine.check()
        if device is not None:
            device.execute(plan)
        engine.commit(plan, result(plan, plan_seconds(engine._estimate.cost, plan)), now_s)
        if device is not None:
            device.check_leases(engine)
    engine.check()
    return plan, engine.drain()


def planned(engine: Engine, now_s: float = 0.0, device: "Device | None" = None) -> tuple[StepPlan, list[EngineOutput]]:
    """A step that has something to compute."""
    plan, emitted = step(engine, now_s, device)
    assert plan is not None
    return plan, emitted


def scheduled(engine: Engine, now_s: float = 0.0) -> StepPlan:
    plan = engine.schedule(now_s)
    assert plan is not None
    return plan


def answers(emitted: list[EngineOutput]) -> list[TokensOut]:
    return [each for each in emitted if isinstance(each, TokensOut)]


def run_to_end(engine: Engine, now_s: float = 0.0, device: "Device | None" = None) -> list[EngineOutput]:
    emitted: list[EngineOutput] = []
    while True:
        plan, more = step(engine, now_s, device)
        emitted += more
        if plan is None:
            return emitted


def bring(fetches: PrefixFetches, fetch: PrefixFetch, now_s: float = 0.0) -> None:
    """All that is still to be read of a prefix arrives."""
    while (taken := fetches.take(fetch, fetch.num_tokens, now_s)) is not None:
        fetches.completed(fetch, taken[0], now_s)


def tokens_of(emitted: list[EngineOutput], key: str) -> list[int]:
    return [token for each in emitted if isinstance(each, TokensOut) and each.key == key for token in each.tokens]


class Pipeline:
    """At most `depth` plans in flight: made, computed and committed in one order, each verb at its own time.

    `ahead`: one more, of the tokens that the last one samples.
    """

    def __init__(self, engine: Engine, depth: int, device: "Device | None" = None, *, ahead: bool = False) -> None:
        self.plans: deque[StepPlan] = deque()
        self._engine = engine
        self._depth = depth
        self._device = device
        self._ahead = ahead
        self._num_computed = 0  # leading plans in flight that are computed

    def begin(self, now_s: float = 0.0) -> StepPlan | None:
        """The next plan; None when there is nothing to compute, or no room."""
        ahead = len(self.plans) >= self._depth
        if len(self.plans) >= self._depth + self._ahead:
            return None
        plan = self._engine.schedule(now_s, ahead=ahead)
        if plan is not None:
            self.plans.append(plan)
        self._engine.check()
        return plan

    def fill(self, now_s: float = 0.0) -> list[StepPlan]:
        """All plans that can begin now, as the engine loop begins them."""
        return list(iter(lambda: self.begin(now_s), None))

    def compute(self) -> None:
        """The oldest plan that is not computed yet."""
        if self._num_computed < len(self.plans):
            if self._device is not None:
                self._device.execute(self.plans[self._num_computed])
            self._num_computed += 1

    def end(self, now_s: float = 0.0) -> StepPlan | None:
        """Commit the oldest plan; None when none is in flight."""
        if not self.plans:
            return None
        if not self._num_computed:
            self.compute()
        plan = self.plans.popleft()
        self._num_computed -= 1
        self._engine.commit(plan, result(plan), now_s)
        if self._device is not None:
            self._device.check_leases(self._engine)
        self._engine.check()
        return plan

    def fail(self) -> None:
        """All plans in flight fail."""
        plans = [*self.plans]
        self.plans.clear()
        self._num_computed = 0
        self._engine.steps_failed(plans, "a test")
        self._engine.check()

    def run(self, now_s: float = 0.0) -> list[StepPlan]:
        """Run until nothing is left to compute. Returns the plans that ended."""
        ended: list[StepPlan] = []
        while True:
            self.fill(now_s)
            plan = self.end(now_s)
            if plan is None:
                return ended
            ended.append(plan)


class Device:
    """Block memory that records which token is in which slot; with `has_state` also of which tokens a block's state is.

    A chunk goes on from the state in the block of the token before it, and leaves one in each block that it writes.
    """

    def __init__(self, block_size: int = 4, *, has_state: bool = False) -> None:
        self._size = block_size
        self._has_state = has_state
        self._slots: dict[tuple[int, int], int] = {}  # (block, slot) -> token
        self._host: dict[tuple[int, int], int] = {}
        self._tokens: dict[str, list[int]] = {}  # key -> what stands at each position
        self.readers_have: dict[str, int] = {}  # lease -> first blocks, which its reader does not read
        self.lenders: dict[str, tuple[Engine, Device]] = {}
        self.now_s = 0.0  # at the lenders

    def know(self, request: Request) -> Request:
        """Check the request's tokens from now on, wherever it attends to them."""
        self._tokens[request.key] = [*request.prompt, *request.generated]
        return request

    def tokens(self, key: str) -> list[int]:
        """The request's tokens so far."""
        return self._tokens[key]

    def execute(self, plan: StepPlan) -> None:
        for block, host in plan.swap_out:
            self._move(self._slots, block, self._host, host)
        for host, block in plan.swap_in:
            self._move(self._host, host, self._slots, block)
        for source, target in plan.copies:
            self._move(self._slots, source, self._slots, target)
        written: dict[tuple[int, int], str] = {}
        for chunk in plan.chunks:
            self._write(chunk, written)
        for chunk in plan.chunks:
            self._attend(chunk)

    def check_leases(self, engine: Engine) -> None:
        """The blocks up to each lease's watermark hold the prompt."""
        for lease in engine.leases:
            if lease.key.endswith(":move"):
                continue
            tokens = self.tokens(lease.key.removesuffix(":prefix"))
            tokens = tokens[: lease.num_tokens][: len(lease.digests) * self._size]
            skip = self.readers_have.get(lease.key, 0) * self._size
            for count in self._state_counts(skip, len(tokens)):
                self._check_state(lease.blocks, tokens, count, lease.key)
            for position, token in enumerate(tokens[skip:], skip):
                found = self._slots.get((lease.blocks[position // self._size], position % self._size))
                assert found == token, f"the reader of {lease.key} finds {found} instead of {token} at {position}"

    def fill(self, blocks: tuple[int, ...], tokens: tuple[int, ...]) -> None:
        """Write the tokens that a transfer brings."""
        for position, token in enumerate(tokens):
            self._slots[blocks[position // self._size], position % self._size] = token
        self._leave_states(blocks, tokens, 0)

    def _state_counts(self, first: int, end: int) -> list[int]:
        """After how many tokens there is a state, of those from `first` to `end`."""
        if not self._has_state or first >= end:
            return []
        return [*range((first // self._size + 1) * self._size, end, self._size), end]

    def _leave_states(self, blocks: tuple[int, ...], tokens: Sequence[int], first: int) -> None:
        for count in self._state_counts(first, len(tokens)):
            self._slots[blocks[(count - 1) // self._size], STATE] = hash(tuple(tokens[:count]))

    def _check_state(self, blocks: tuple[int, ...], tokens: Sequence[int], count: int, key: str) -> None:
        found = self._slots.get((blocks[(count - 1) // self._size], STATE))
        assert found == hash(tuple(tokens[:count])), f"{key}: the state is not that after {count} tokens"

    def copy(self, source: "Device", blocks: Sequence[int], targets: Sequence[int]) -> None:
        """Write what another device has in these blocks, as a transfer does."""
        for block, target in zip(blocks, targets, strict=True):
            self._move(source._slots, block, self._slots, target)

    def _move(
        self, source: dict[tuple[int, int], int], block: int, target: dict[tuple[int, int], int], other: int
    ) -> None:
        for slot in (STATE, *range(self._size)):
            if (block, slot) in source:
                target[other, slot] = source[block, slot]

    def _write(self, chunk: Chunk, written: dict[tuple[int, int], str]) -> None:
        tokens = self._tokens[chunk.key]
        if self._has_state and chunk.first_position:
            self._check_state(chunk.blocks, tokens, chunk.first_position, chunk.key)
        for position, known in enumerate(chunk.tokens, chunk.first_position):
            token = next_token(chunk.key, position) if known == PENDING else known
            place = chunk.blocks[position // self._size], position % self._size
            assert place not in written, f"{chunk.key} and {written[place]} write {place} in one step"
            written[place] = chunk.key
            self._slots[place] = token
            if position == len(tokens):
                tokens.append(token)
            assert tokens[position] == token, f"{chunk.key} computes another token at {position} than before"
        self._leave_states(chunk.blocks, tokens[: chunk.context], chunk.first_position)

    def _attend(self, chunk: Chunk) -> None:
        remote = [
            (device, block)
            for span in chunk.remote
            for lender, device in [self.lenders[span.lender]]
            for block in lender.loans.ready(span.loan, span.num_blocks, self.now_s)
        ]
        assert [each == ELSEWHERE for each in chunk.blocks] == [
            place < len(remote) for place in range(len(chunk.blocks))
        ]
        for position, token in enumerate(self._tokens[chunk.key][: chunk.context]):
            index = position // self._size
            device, block = remote[index] if index < len(remote) else (self, chunk.blocks[index])
            found = device._slots.get((block, position % self._size))
            assert found == token, f"{chunk.key}: position {position} holds {found} instead of {token}"
