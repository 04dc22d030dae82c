"""Answers match their grammars, and are the same tokens wherever they are computed: a real model's weights, random."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.events import NotComputable
from cluster.spec import ClusterSpec
from tests.cluster.local import Cluster, cluster, completed, mixed_spec, split_spec, tokens_of
from tests.model.grammars import GRAMMARS, check_answer
from tests.model.tiny import EOS, write_tiny_llama
from workers.model.tokenizer import ModelTokenizer
from workers.request import FinishReason, Grammar, Request, SamplingParams

PROMPT = tuple(3 + 11 * position % 250 for position in range(40))
BLOCK = 8
FORCES = Grammar("regex", "([ab]cdefghijklmnop[ab]cdefg[ab]){3}")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


def real(spec: ClusterSpec, model: Path) -> ClusterSpec:
    pools = tuple(replace(each, engine=replace(each.engine, threads=1)) for each in spec.pools)
    return replace(spec, model=str(model), executor="torch", pools=pools)


def alone(model: Path, **engine: int) -> ClusterSpec:
    return real(mixed_spec(block_size=BLOCK, **{"kv_blocks": 200} | engine), model)


def asked(name: str, grammar: Grammar | None, **sampling: object) -> Request:
    params = {"seed": 7, "max_tokens": 300, "temperature": 1.0} | sampling
    return Request(name, PROMPT, SamplingParams(grammar=grammar, **params))  # type: ignore[arg-type]


def all_of(**sampling: object) -> list[Request]:
    return [asked(f"g{number}", grammar, **sampling) for number, grammar in enumerate(GRAMMARS)]


async def run_all(subject: Cluster, requests: list[Request]) -> list[list[int]]:
    return [tokens_of(events) for events in await asyncio.gather(*map(subject.run, requests))]


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {}, {"top_k": 5, "repetition_penalty": 1.2}], ids=str)
async def test_every_answer_matches_its_grammar_split_as_colocated(model: Path, sampling: dict[str, float]) -> None:
    """Several at once, each beside one without a grammar, whose tokens are those that it has alone."""
    tokenizer, plain = ModelTokenizer(model), asked("plain", None, max_tokens=40, ignore_eos=True, **sampling)
    async with cluster(alone(model)) as subject:
        lonely = tokens_of(await subject.run(plain))
        *together, beside = await run_all(subject, [*all_of(**sampling), plain])
        assert beside == lonely
        for grammar, tokens in zip(GRAMMARS, together, strict=True):
            assert tokens[-1] == EOS
            check_answer(grammar, tokenizer.decode(tokens))
    async with cluster(real(split_spec(block_size=BLOCK), model)) as subject:
        events = await asyncio.gather(*map(subject.run, all_of(**sampling)))
        assert [tokens_of(each) for each in events] == together
        assert {completed(each).finish for each in events} == {FinishReason.EOS}
        await subject.settle()


async def test_preempted_answers_continue_their_grammars(model: Path) -> None:
    """A pool that holds some of them recomputes the others."""
    requests = [replace(each, sampling=replace(each.sampling, min_tokens=30)) for each in all_of()]
    async with cluster(alone(model)) as subject:
        expected = await run_all(subject, requests)
    async with cluster(alone(model, kv_blocks=36)) as subject:
        assert await run_all(subject, requests) == expected
        assert sum(worker.engine.stats().preemptions for worker in subject.workers.values()) > 0


async def test_min_tokens_hold_as_far_as_the_grammar_goes_on_and_ignore_eos_adds_ends(model: Path) -> None:
    grammar, tokenizer = Grammar("regex", "a{1,9}"), ModelTokenizer(model)
    async with cluster(alone(model)) as subject:
        long, ended, padded = await run_all(
            subject,
            [
                asked("long", grammar, min_tokens=6),
                asked("ended", grammar, min_tokens=30),
                asked("padded", grammar, ignore_eos=True, max_tokens=20),
            ],
        )
    assert 6 < len(long) <= 10 and len(ended) == 10 and len(padded) == 20
    assert tokenizer.decode(ended) == "a" * 9
    assert set(padded[9:]) == {EOS} and set(tokenizer.decode(padded)) == {"a"}


async def test_a_grammar_that_gets_stuck_ends_its_request_once_and_no_other(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does whose limits are reached in the middle of an answer."""
    from workers.executor import grammar_masks

    run_out = Grammar("regex", "[ab]{20}")
    find = grammar_masks.GrammarMasks._running

    def limited(self: grammar_masks.GrammarMasks, key: str, grammar: Grammar, answer: bytes) -> object:
        running = find(self, key, grammar, answer)
        if grammar == run_out and len(answer) >= 4 * 5:
            running.matcher.consume_token(0)
        return running

    monkeypatch.setattr(grammar_masks.GrammarMasks, "_running", limited)
    async with cluster(alone(model)) as subject:
        expected = await run_all(subject, all_of())
        bad = asyncio.ensure_future(subject.run(asked("bad", run_out)))
        assert await run_all(subject, all_of()) == expected
        with pytest.raises(NotComputable, match="its grammar allows no token"):
            await bad
        await subject.settle()


async def test_forced_tokens_take_no_steps_of_their_own_and_are_the_same_tokens(model: Path) -> None:
    """With log probabilities every token is sampled, under a mask."""
    request = asked("jumps", FORCES)
    for spec in (alone(model), real(split_spec(block_size=BLOCK), model), alone(model, max_batch_tokens=16)):
        async with cluster(spec) as subject:
            found, steps = list[list[int]](), list[int]()
            for each in (replace(request.sampling, logprobs=0), request.sampling):
                before = sum(worker.engine.stats().steps for worker in subject.workers.values())
                found.append(tokens_of(await subject.run(replace(request, id=f"r{len(found)}", sampling=each))))
                steps.append(sum(worker.engine.stats().steps for worker in subject.workers.values()) - before)
            assert found[0] == found[1] and steps[0] >= len(found[0])
            assert steps[1] < 0.6 * steps[0]
            await subject.settle()


@pytest.mark.parametrize("max_tokens", range(1, 30, 4))
async def test_forced_tokens_end_at_the_limit(model: Path, max_tokens: int) -> None:
    async with cluster(alone(model)) as subject:
        whole = tokens_of(await subject.run(asked("whole", FORCES)))
        events = await subject.run(asked("cut", FORCES, max_tokens=max_tokens))
        assert tokens_of(events) == whole[:max_tokens] and completed(events).finish is FinishReason.LENGTH
        await subject.settle()


async def test_a_killed_decode_worker_costs_no_token(model: Path) -> None:
    spec = real(split_spec(1, 2, block_size=BLOCK), model)
    grammar = GRAMMARS[0]
    request = asked("r", grammar)
    async with cluster(spec) as subject:
        expected = tokens_of(await subject.run(request))
        running = await subject.begin(replace(request, id="again"), 6)
        (busy,) = [name for name, worker in subject.workers.items() if worker.engine.holds(key_of(worker, "again"))]
        subject.workers[busy]._mark_unhealthy(RuntimeError("a test"))
        events = await running
        assert tokens_of(events) == expected and completed(events).attempts == 2


def key_of(worker: object, name: str) -> str:
    return next((key for key in worker._subscribers.routes if key.startswith(name)), "")  # type: ignore[attr-defined]
