"""A conversation's next turn fetches the KV of the last answer from its decode worker: a real model, digests on."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from cluster.observe.ledger import now_ns
from cluster.policy.routing.prefix_index import prefix_hashes
from cluster.policy.routing.router import Placement, PlacementQuery
from cluster.spec import ClusterSpec
from kvtransfer.ticket import TransferTicket
from tests.cluster.local import Cluster, cluster, completed, mixed_spec, split_spec, tokens_of
from tests.engine.waiting import wait_for_fetches
from tests.model.tiny import write_tiny_llama
from workers.config import ByteSize, CacheConfig
from workers.costs import LinearCost
from workers.engine.blocks import block_hashes
from workers.engine.step import StepPlan, StepResult
from workers.request import Request, SamplingParams
from workers.worker import Worker

BLOCK = 8
SLOW_PROMPTS = LinearCost(0.001, 0.1, 0.0, 0.001, 0.0, 0.0, 0.0)  # so that the router fetches what it can
PROMPT = tuple(3 + 11 * position % 300 for position in range(150))
QUESTION = tuple(5 + 7 * position % 300 for position in range(30))
ANSWER = 120  # tokens
TOTAL = len(PROMPT) + ANSWER  # of the first turn


@pytest.fixture(autouse=True)
def waits_for_what_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_fetches(monkeypatch)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def colocated(model: Path) -> list[int]:
    """The tokens of both turns from one worker."""

    async def run() -> list[int]:
        async with cluster(real(mixed_spec(block_size=BLOCK, kv_blocks=200), model)) as subject:
            return (await two_turns(subject, nothing))[0]

    return asyncio.run(run())


def real(spec: ClusterSpec, model: Path) -> ClusterSpec:
    pools = tuple(replace(each, engine=replace(each.engine, threads=1), cost=SLOW_PROMPTS) for each in spec.pools)
    gateway = replace(spec.gateway, routing="slo")
    return replace(spec, model=str(model), executor="torch", pools=pools, gateway=gateway)


def split(model: Path, decodes: int = 1) -> ClusterSpec:
    return real(split_spec(2, decodes, block_size=BLOCK, kv_blocks=200), model)


def turn(name: str, prompt: tuple[int, ...], max_tokens: int) -> Request:
    return Request(name, prompt, SamplingParams(temperature=1.5, seed=7, max_tokens=max_tokens, ignore_eos=True))


async def nothing() -> None:
    """Between the turns."""


async def two_turns(
    subject: Cluster, then: Callable[[], Awaitable[None]], answer: int = ANSWER
) -> tuple[list[int], int]:
    """The tokens of both turns, and how many of them the second one found. `then` is called between the turns."""
    events = await subject.run(turn("first", PROMPT, answer))
    history = (*PROMPT, *tokens_of(events))
    hashes, index = prefix_hashes(history), subject.dispatcher._policy.index
    async with asyncio.timeout(10.0):
        while all(each.tokens < 128 * len(hashes) for each in index.matches(hashes).values()):
            await asyncio.sleep(0.01)
    await then()
    again = await subject.run(turn("second", (*history, *QUESTION), 20))
    return [*tokens_of(events), *tokens_of(again)], completed(again).cached_tokens


async def keep_away_from(subject: Cluster, name: str) -> None:
    """The router does not use this worker from now on."""
    choose = subject.dispatcher._policy.choose
    subject.dispatcher._policy.choose = lambda query: choose(replace(query, avoid={*query.avoid, name}))


@pytest.mark.parametrize("other", ["prefill-0", "prefill-1"])
async def test_a_turn_finds_the_last_answer_wherever_it_is_prefilled(
    model: Path, colocated: list[int], other: str
) -> None:
    """One prefill worker has the first turn's prompt, the other one nothing."""
    async with cluster(split(model)) as subject:
        tokens, cached_tokens = await two_turns(subject, lambda: keep_away_from(subject, other))
        assert tokens == colocated
        assert cached_tokens >= TOTAL - BLOCK
        (trace,) = [each for each in subject.dispatcher.window(0, now_ns()).traces if each.request_id == "second"]
        sources = dict(trace.cached_from)
        assert sum(sources.values()) == cached_tokens and sources["fetched"] >= ANSWER - BLOCK
        assert ("device" in sources) == (other == "prefill-1"), "the prompt of the first turn"
        assert subject.workers["decode-0"]._stats().device_lent_tokens >= ANSWER - BLOCK
        assert subject.workers["prefill-0" if other == "prefill-1" else "prefill-1"]._stats().pulls.arrived == 1
        await subject.settle()


@pytest.mark.parametrize("other", ["prefill-0", "prefill-1"])
async def test_a_turn_finds_an_answer_that_ends_before_the_next_name(model: Path, other: str) -> None:
    """The worker that computed the prompt is known to have 128 tokens of it, as the decode worker is."""
    short = 40
    assert len(PROMPT) // 128 == (len(PROMPT) + short) // 128
    async with cluster(split(model)) as subject:
        _, cached_tokens = await two_turns(subject, lambda: keep_away_from(subject, other), short)
        assert cached_tokens >= len(PROMPT) + short - BLOCK
        await subject.settle()


def with_host_memory(model: Path, decodes: int = 1) -> ClusterSpec:
    """A decode worker holds three conversations on its device, and the others in host memory."""
    spec = split(model, decodes)
    prefill, decode = spec.pools
    engine = replace(decode.engine, kv_blocks=130)
    cache = CacheConfig(host=ByteSize(64 << 20))
    return replace(spec, pools=(prefill, replace(decode, engine=engine, cache=cache)))


async def leaves_the_device(subject: Cluster) -> None:
    """Other conversations evict the first one from the decode worker's device."""
    for number in range(8):
        prompt = tuple(1 + (number + 13 * position) % 300 for position in range(280))
        await subject.run(turn(f"other-{number}", prompt, 20))


async def test_a_turn_finds_the_last_answer_in_the_host_memory_of_its_decode_worker(
    model: Path, colocated: list[int]
) -> None:
    async with cluster(with_host_memory(model)) as subject:
        owner = subject.workers["decode-0"].engine
        moved: list[int] = []

        async def between() -> None:
            await leaves_the_device(subject)
            await keep_away_from(subject, "prefill-0")
            moved.append(owner.pool.num_known(block_hashes(PROMPT, BLOCK)))

        tokens, cached_tokens = await two_turns(subject, between)
        assert tokens == colocated and moved == [0]
        assert cached_tokens >= TOTAL - BLOCK
        assert subject.workers["prefill-1"]._stats().pulls.arrived == 1
        await subject.settle()
        assert not owner.pool.host._held


def dies(owner: Worker) -> None:
    """While its reader waits for digests."""

    async def execute(plan: StepPlan) -> StepResult:
        await owner._leases.close()
        owner._mark_unhealthy(RuntimeError("the device is lost"))
        raise RuntimeError("the device is lost")

    owner._executor.execute = execute


def fails_a_step(owner: Worker) -> None:
    execute = owner._executor.execute

    async def fails(plan: StepPlan) -> StepResult:
        owner._executor.execute = execute
        raise RuntimeError("the first step fails")

    owner._executor.execute = fails


def damages_a_block(owner: Worker) -> None:
    execute = owner._executor.execute

    async def lies(plan: StepPlan) -> StepResult:
        result = await execute(plan)
        damaged = tuple(tuple(bytes([cells[0] ^ 1]) + cells[1:] for cells in rank) for rank in result.digests)
        return structs.replace(result, digests=damaged)

    owner._executor.execute = lies


def expires(owner: Worker) -> None:
    hold = owner.hold_prefix

    async def late(request: Request) -> TransferTicket | None:
        ticket = await hold(request)
        assert ticket is not None
        owner.engine.expire(math.inf)
        return ticket

    owner.hold_prefix = late


@pytest.mark.grid(keep=3)
@pytest.mark.parametrize("is_on_host", [False, True])
@pytest.mark.parametrize("breaks", [dies, fails_a_step, damages_a_block, expires])
async def test_a_turn_is_computed_if_the_decode_worker_cannot_lend_it(
    model: Path, colocated: list[int], breaks: Callable[[Worker], None], is_on_host: bool
) -> None:
    """The second turn decodes on another worker."""
    async with cluster(with_host_memory(model, 2) if is_on_host else split(model, 2)) as subject:
        first, policy = "", subject.dispatcher._policy
        choose = policy.choose

        def chosen(query: PlacementQuery) -> Placement:
            nonlocal first
            placement = choose(query)
            assert isinstance(placement, Placement)
            first = first or placement.decode
            if query.request.id != "second":
                return structs.replace(placement, decode=first)
            (second,) = {"decode-0", "decode-1"} - {first}
            return structs.replace(placement, prefill="prefill-1", decode=second, prefix_owner=first)

        async def between() -> None:
            if is_on_host:
                await leaves_the_device(subject)
            owner = subject.workers[first]
            assert bool(owner.engine.pool.num_known(block_hashes(PROMPT, BLOCK))) is not is_on_host
            breaks(owner)

        policy.choose = chosen
        tokens, cached_tokens = await two_turns(subject, between)
        assert tokens == colocated and cached_tokens == 0
        assert subject.workers["prefill-1"]._stats().pulls.failed == 1
        await subject.settle(20.0)  # a dead owner holds what its last step moves until it is replaced
        assert not any(worker.engine.pool.host._held for worker in subject.workers.values())
