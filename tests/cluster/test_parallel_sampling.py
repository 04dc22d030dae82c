"""Several answers to one request through the whole stack: gateway, dispatcher, workers, and a real model."""

import asyncio
from collections.abc import Collection, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.events import Completed
from cluster.frontend.context import GatewayContext
from cluster.frontend.gateway import Gateway, GenerateOptions, RequestCancelled
from cluster.frontend.parallel_sampling import answer_seed
from cluster.frontend.text import GatewayEvent, TextDelta, TokenPrompt
from cluster.spec import ClusterSpec
from tests.cluster.local import Cluster, cluster, mixed_spec, split_spec
from tests.frontend.grpc.fake import gateway_without_servers
from tests.frontend.tokenizers import ByteDetokenizer, ByteTokenizer
from tests.model.tiny import write_tiny_llama
from workers.costs import LinearCost
from workers.executor.simulated import simulated_token
from workers.request import FinishReason, SamplingParams

PROMPT = tuple(range(20, 60))
DRAWN = SamplingParams(temperature=3.0, top_p=0.98, frequency_penalty=0.4, seed=41, max_tokens=20, ignore_eos=True)


class Numbers(ByteDetokenizer):
    """Any token has a text."""

    def push(self, tokens: Sequence[int]) -> str:
        return "".join(f"{token} " for token in tokens)


class NumberTokenizer(ByteTokenizer):
    def detokenizer(self, *, skip_special_tokens: bool = True, keep: Collection[int] = ()) -> Numbers:
        return Numbers()


def gateway_of(subject: Cluster, spec: ClusterSpec) -> Gateway:
    model = subject.dispatcher.view.model
    assert model is not None
    return gateway_without_servers(GatewayContext("gateway", spec, model, subject.dispatcher), NumberTokenizer())


async def run(
    gateway: Gateway, sampling: SamplingParams, name: str, prompt: tuple[int, ...] = PROMPT
) -> list[GatewayEvent]:
    async with aclosing(gateway.generate(TokenPrompt(prompt), sampling, GenerateOptions(request_id=name))) as events:
        return [event async for event in events]


def outputs(events: list[GatewayEvent]) -> list[TextDelta]:
    return TextDelta.join_each(event for event in events if isinstance(event, TextDelta))


def end_of(events: list[GatewayEvent]) -> Completed:
    assert isinstance(events[-1], Completed)
    return events[-1]


@pytest.mark.parametrize("spec", [split_spec(), split_spec(2, 2), mixed_spec()], ids=["split", "2x2", "mixed"])
async def test_parallel_answers_get_their_own_tokens_and_leave_nothing_behind(spec: ClusterSpec) -> None:
    async with cluster(spec) as subject:
        events = await run(gateway_of(subject, spec), replace(DRAWN, n=5), "r")
        for index, output in enumerate(outputs(events)):
            expected = [simulated_token(f"r#{index}/0", len(PROMPT) + n, 1000, (0,)) for n in range(20)]
            assert list(output.tokens) == expected
        end = end_of(events)
        assert (end.prompt_tokens, end.completion_tokens, len(end.answers)) == (len(PROMPT), 100, 5)
        for each in end.answers:
            each.ledger.check()
        await subject.settle()


@pytest.mark.parametrize("spec", [split_spec(), mixed_spec()], ids=["split", "mixed"])
async def test_prompt_logprobs_are_complete_for_cached_and_chunked_prompts(spec: ClusterSpec) -> None:
    prompt = tuple(range(1, 200))
    async with cluster(spec) as subject:
        gateway = gateway_of(subject, spec)
        await run(gateway, DRAWN, "before", prompt)
        (output,) = outputs(await run(gateway, replace(DRAWN, prompt_logprobs=0), "r", prompt))
        assert len(output.prompt_logprobs) == len(prompt) - 1
        await subject.settle()


async def test_cancelling_ends_all_answers_and_frees_their_blocks() -> None:
    spec = split_spec()
    async with cluster(spec) as subject:
        gateway = gateway_of(subject, spec)
        async with aclosing(
            gateway.generate(TokenPrompt(PROMPT), replace(DRAWN, n=6, max_tokens=500), GenerateOptions(request_id="r"))
        ) as events:
            seen = set()
            with pytest.raises(RequestCancelled):
                async for event in events:
                    seen |= {event.index} if isinstance(event, TextDelta) else set()
                    if len(seen) == 6:
                        gateway.cancel("r")
        assert gateway.active == 0
        await subject.settle()


@pytest.mark.parametrize(("victim", "after_s"), [("prefill-0", 0.08), ("decode-1", 0.3)])
async def test_parallel_answers_survive_the_death_of_a_worker(victim: str, after_s: float) -> None:
    spec = split_spec(2, 2)
    async with cluster(spec, LinearCost(0.02, 0.002, 0.0, 0.001, 0.0, 0.0, 0.0)) as subject:
        running = asyncio.ensure_future(run(gateway_of(subject, spec), replace(DRAWN, n=6, prompt_logprobs=0), "r"))
        await asyncio.sleep(after_s)
        await subject.workers[victim].close()
        events = await running
        for index, output in enumerate(outputs(events)):
            expected = [simulated_token(f"r#{index}/0", len(PROMPT) + n, 1000, (0,)) for n in range(20)]
            assert list(output.tokens) == expected
        assert len(outputs(events)[0].prompt_logprobs) == len(PROMPT) - 1
        assert end_of(events).attempts > 1
        await subject.settle()


async def test_more_answers_than_slots_wait() -> None:
    spec = split_spec(max_running=4)
    async with cluster(spec) as subject:
        gateway = gateway_of(subject, spec)
        both = await asyncio.gather(*(run(gateway, replace(DRAWN, n=4), name) for name in ("a", "b")))
        assert [len(outputs(events)) for events in both] == [4, 4]
        await subject.settle()


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", tie_embeddings=False)


@pytest.mark.parametrize("split", [True, False], ids=["split", "mixed"])
async def test_seeded_answers_equal_requests_with_the_derived_seeds(tiny_path: Path, split: bool) -> None:
    spec = real(split_spec() if split else mixed_spec(), tiny_path)
    async with cluster(spec) as subject:
        gateway = gateway_of(subject, spec)
        together = await run(gateway, replace(DRAWN, n=3, logprobs=1, prompt_logprobs=2), "all")
        assert len({output.tokens for output in outputs(together)}) == 3
        for index, output in enumerate(outputs(together)):
            seed = answer_seed(41, index)
            (alone,) = outputs(await run(gateway, replace(DRAWN, seed=seed, logprobs=1), f"alone{index}"))
            assert output.tokens == alone.tokens
            assert [each.chosen for each in output.logprobs] == pytest.approx(
                [each.chosen for each in alone.logprobs], abs=1e-4
            )
        scored = outputs(together)[0].prompt_logprobs
        assert len(scored) == len(PROMPT) - 1 and all(len(each.top) == 2 for each in scored)
        await subject.settle()


async def test_greedy_answers_are_all_the_same(tiny_path: Path) -> None:
    spec = real(split_spec(), tiny_path)
    async with cluster(spec) as subject:
        sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, n=3)
        events = await run(gateway_of(subject, spec), sampling, "r")
        assert len({output.tokens for output in outputs(events)}) == 1 and len(outputs(events)) == 3
        await subject.settle()


async def test_best_of_returns_the_most_likely_answer(tiny_path: Path) -> None:
    spec = real(mixed_spec(), tiny_path)
    async with cluster(spec) as subject:
        gateway = gateway_of(subject, spec)
        made = outputs(await run(gateway, replace(DRAWN, n=5, logprobs=0), "made"))
        means = {output.tokens: sum(each.chosen for each in output.logprobs) / 20 for output in made}
        events = await run(gateway, replace(DRAWN, n=2, best_of=5), "best")
        best = sorted(means, key=lambda tokens: -means[tokens])[:2]
        assert [output.tokens for output in outputs(events)] == best
        assert [each.mean_logprob for each in end_of(events).answers] == pytest.approx(
            [means[tokens] for tokens in best], abs=1e-4
        )
        assert [each.finish for each in end_of(events).answers] == [FinishReason.LENGTH] * 2
        await subject.settle()


def real(spec: ClusterSpec, path: Path) -> ClusterSpec:
    """The same cluster with a real model, on one thread for each worker."""
    pools = tuple(replace(pool, engine=replace(pool.engine, threads=1)) for pool in spec.pools)
    return replace(spec, model=str(path), executor="torch", pools=pools)
