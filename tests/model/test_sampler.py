import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.sequence import Sequence, TokenCounts
from workers.engine.step import Draw
from workers.executor import gumbel_max as exact
from workers.executor.gumbel_max import Categorical, draw_tokens, gumbel_max, uniforms_of, uniforms_of_all, weights_of
from workers.executor.sampler import _floor, sample, score
from workers.ops.native.library import library
from workers.request import Request, SamplingParams

VOCAB = 50
native = pytest.mark.skipif(library() is None, reason="no native kernels here")


def logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def draw(
    position: int = 0,
    seed: int = 7,
    prompt: tuple[int, ...] = (),
    answer: tuple[int, ...] = (),
    banned: tuple[int, ...] = (),
    **params,
) -> Draw:
    seen, counts = TokenCounts().read([*prompt, *answer], len(prompt), with_prompt=True)
    return Draw(SamplingParams(**params), seed, position, seen, counts, banned)


def tokens_of(row: Tensor, count: int, **params) -> list[int]:
    """`count` draws from the same logits at different positions."""
    return sample(row.expand(count, -1), [draw(position, **params) for position in range(count)])[0]


def exact_token(of: Categorical) -> int:
    """By numpy, from all tokens."""
    weights = weights_of(of.scores.copy(), of.temperature)
    generator = np.random.Generator(np.random.Philox(key=np.array([of.seed, of.position], np.uint64)))
    return int((weights / -np.log1p(-generator.random(len(weights)))).argmax())


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def test_greedy_takes_the_likeliest() -> None:
    rows = logits(5)
    assert sample(rows, [draw(temperature=0)] * 5)[0] == rows.argmax(-1).tolist()


def test_a_seeded_draw_is_repeatable_and_moves_with_seed_and_position() -> None:
    flat = torch.zeros(1, 10_000)
    first = sample(flat, [draw(3, seed=1)])[0]
    assert sample(flat, [draw(3, seed=1)])[0] == first
    assert sample(flat, [draw(4, seed=1)])[0] != first
    assert sample(flat, [draw(3, seed=2)])[0] != first


def test_the_largest_seed_works() -> None:
    numbers = uniforms_of_all(2**64 - 1, 2**31, 100)
    assert numbers.shape == (100,) and (numbers > 0).all() and (numbers < 1).all()


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**64 - 1), vocab=st.integers(1, 3000))
def test_the_numbers_are_numpys_to_the_last_bit(seed: int, position: int, vocab: int) -> None:
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, position], np.uint64)))
    assert uniforms_of_all(seed, position, vocab).tolist() == generator.random(vocab).tolist()


@settings(max_examples=50, deadline=None)
@given(
    seeds=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=4),
    position=st.integers(0, 2**40),
    tokens=st.lists(st.integers(0, 2**17), min_size=1, max_size=9),
)
def test_single_uniforms_equal_those_of_the_whole_stream(seeds: list[int], position: int, tokens: list[int]) -> None:
    keys = np.array(seeds, np.uint64).repeat(len(tokens))
    alone = uniforms_of(keys, np.full_like(keys, position), np.array(tokens * len(seeds)))
    together = [uniforms_of_all(seed, position, max(tokens) + 1)[tokens] for seed in seeds]
    assert alone.tolist() == np.concatenate(together).tolist()


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), sharpness=st.sampled_from([0.0, 1.0, 5.0, 30.0]))
def test_gumbel_max_is_that_of_all_tokens(seed: int, sharpness: float) -> None:
    random = np.random.default_rng(seed)
    scores = sharpness * random.standard_normal(3000)
    weights = np.exp(scores - scores.max()).astype(np.float32)
    numbers = uniforms_of_all(seed, 1, 3000)
    assert gumbel_max(weights, numbers) == int((weights / -np.log1p(-numbers)).argmax())


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    vocab=st.integers(1, 700) | st.just(20_000),
    sharpness=st.sampled_from([0.0, 1.0, 5.0, 60.0]),
    temperature=st.sampled_from([1e-9, 0.1, 0.8, 1.0, 3.0, 100.0]),
    lost=st.sampled_from([0.0, 0.5, 0.99]),
    threads=st.sampled_from([1, 2]),
)
def test_the_kernel_samples_the_same_token_as_numpy(
    seed: int, vocab: int, sharpness: float, temperature: float, lost: float, threads: int
) -> None:
    random = np.random.default_rng(seed)
    scores = (sharpness * random.standard_normal((5, vocab))).astype(np.float32)
    scores[random.random(scores.shape) < lost] = -np.inf
    rows = [Categorical(row, temperature, seed + 2**63, position) for position, row in enumerate(scores)]
    with on_threads(threads):
        found = draw_tokens(rows)
    assert found == [exact_token(each) for each in rows]


@native
def test_the_kernel_leaves_close_results_to_numpy() -> None:
    """Two tokens far above all others, the second one's score moved to where both reach the same."""
    clear, close = [], []
    for position in range(400):
        first, second = position % 97, 100 + position % 101
        times = -np.log1p(-uniforms_of_all(5, position, 300))
        row = np.full(300, -30.0, np.float32)
        row[first], row[second] = 0.0, np.log(times[second] / times[first])
        close.append(Categorical(row, 1.0, 5, position))
        row = row.copy()
        row[second] += 1e-3 if position % 2 else -1e-3
        clear.append(Categorical(row, 1.0, 5, position))
    assert set(exact._clear_tokens(close)) == {exact._UNDECIDED}
    assert exact._clear_tokens(clear) == [exact_token(each) for each in clear]
    decided = draw_tokens(close)
    assert decided == [exact_token(each) for each in close]
    assert len({token >= 100 for token in decided}) == 2, "either may be drawn"


@native
@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 999),
    temperature=st.sampled_from([0.7, 1.0]),
    filters=st.sampled_from([{}, {"min_p": 1e-4}, {"top_p": 0.999}, {"top_k": 500}]),
    penalty=st.sampled_from([1.0, 1.3]),
)
def test_samples_are_the_same_without_the_kernel(
    seed: int, temperature: float, filters: dict[str, Any], penalty: float
) -> None:
    rows = logits(3, seed, vocab=1001)
    draws = [
        draw(position, temperature=temperature, repetition_penalty=penalty, prompt=(1, 2, 3), **filters)
        for position in range(3)
    ]
    tokens = sample(rows, draws)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "library", lambda: None)
        assert sample(rows, draws)[0] == tokens


def test_noise_in_the_logits_rarely_changes_a_sample() -> None:
    """What a recomputation in other chunks changes: the last digits, and now and then a token at the edge of top-p."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(400, 2000, generator=generator)  # flat: the nucleus holds more than a thousand tokens
    noisy = rows + 1e-5 * torch.randn(400, 2000, generator=generator)
    draws = [draw(position, temperature=0.8, top_p=0.95) for position in range(400)]
    assert sample(rows, draws)[0] == sample(noisy, draws)[0]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 999), temperature=st.sampled_from([0.0, 0.7, 1.5]), top_p=st.sampled_from([0.6, 1.0]))
def test_a_sample_does_not_depend_on_the_rest_of_the_batch(seed: int, temperature: float, top_p: float) -> None:
    rows = logits(4, seed)
    mine = draw(9, temperature=temperature, top_p=top_p)
    others = [draw(1, top_k=2), draw(2, temperature=0), draw(3, repetition_penalty=2.0, prompt=(1, 2), banned=(5,))]
    alone = sample(rows[:1], [mine])[0][0]
    assert sample(rows, [mine, *others])[0][0] == alone
    assert sample(rows.flip(0), [*others, mine])[0][3] == alone


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 999),
    top_k=st.integers(0, 60),
    top_p=st.floats(0.05, 1.0),
    min_p=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)
def test_filters_keep_exactly_their_support(seed: int, top_k: int, top_p: float, min_p: float) -> None:
    row = logits(1, seed)
    probabilities = row.softmax(-1)[0]
    order = probabilities.argsort(descending=True).tolist()[: top_k or VOCAB]
    left = float(probabilities[order].sum())
    nucleus, mass = set(), 0.0
    for token in order:
        if mass >= top_p * left - 1e-6:
            break
        nucleus.add(token)
        mass += float(probabilities[token])
    support = {token for token in nucleus if probabilities[token] >= min_p * probabilities.max() - 1e-7}
    assert set(tokens_of(row, 60, top_k=top_k, top_p=top_p, min_p=min_p)) <= support


def test_top_k_one_is_greedy() -> None:
    row = logits(1)
    assert set(tokens_of(row, 50, top_k=1)) == {int(row.argmax())}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banned_tokens_are_never_sampled(temperature: float) -> None:
    row = logits(1)
    best = tuple(row[0].topk(3).indices.tolist())
    assert not set(tokens_of(row, 200, temperature=temperature, banned=best)) & set(best)


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    row = torch.tensor([[2.0, 1.5, -0.1, -0.3]])
    assert sample(row, [draw(temperature=0, repetition_penalty=1.5, prompt=(0, 0))])[0] == [1]
    assert sample(row[:, 2:], [draw(temperature=0, repetition_penalty=4.0, prompt=(0,))])[0] == [1]


def test_frequency_and_presence_count_the_answer_and_not_the_prompt() -> None:
    row = torch.tensor([[2.0, 1.5, 1.0]])
    assert sample(row, [draw(temperature=0, frequency_penalty=0.3, prompt=(0,) * 9, answer=(0,))])[0] == [0]
    assert sample(row, [draw(temperature=0, frequency_penalty=0.3, answer=(0, 0))])[0] == [1]
    assert sample(row, [draw(temperature=0, presence_penalty=0.3, answer=(0,) * 9)])[0] == [0]
    assert sample(row, [draw(temperature=0, presence_penalty=0.6, answer=(0,))])[0] == [1]
    assert sample(row, [draw(temperature=0, presence_penalty=-0.6, answer=(1,))])[0] == [1]
    assert sample(row, [draw(temperature=0, presence_penalty=0.6, frequency_penalty=0.5, answer=(0, 1))])[0] == [2]


def test_bias_is_added_after_the_penalties() -> None:
    row = torch.tensor([[2.0, 1.5, -1.0]])
    assert sample(row, [draw(temperature=0, logit_bias=((1, 0.6),))])[0] == [1]
    assert sample(row, [draw(temperature=0, logit_bias=((1, 0.6), (0, 0.2)))])[0] == [0]
    assert sample(row, [draw(temperature=0, logit_bias=((2, 2.5),), repetition_penalty=2.0, prompt=(0, 1, 2))])[0] == [
        0
    ]
    assert tokens_of(row, 50, logit_bias=((2, 100.0),)) == [2] * 50


def test_adjusted_rows_leave_the_logits_as_they_were() -> None:
    rows = logits(2)
    before = rows.clone()
    sample(rows, [draw(top_k=3, logit_bias=((1, 5.0),)), draw(temperature=0, presence_penalty=1.0, answer=(1,))])
    assert torch.equal(rows, before)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("row", [torch.full((1, VOCAB), -torch.inf), torch.full((1, VOCAB), torch.nan)])
def test_logits_of_only_minus_infinity_still_give_a_token(row: Tensor, temperature: float) -> None:
    for filters in ({}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}):
        assert 0 <= sample(row, [draw(temperature=temperature, **filters)])[0][0] < VOCAB


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 999),
    top_k=st.sampled_from([0, 1, 50, 1023, 1024, 1025, 2999, 3000]),
    top_p=st.sampled_from([1e-9, 0.5, 0.9, 0.999, 1.0]),
    spread=st.sampled_from([0.0, 0.1, 1.0, 8.0, 100.0, 3000.0]),  # of the last two, most weights are 0
    ties=st.booleans(),
)
def test_the_floor_is_that_of_a_full_sort(seed: int, top_k: int, top_p: float, spread: float, ties: bool) -> None:
    scores = spread * np.random.default_rng(seed).standard_normal(3000)
    weights = np.exp((scores.round(1) if ties else scores) - scores.max()).astype(np.float32)
    ranked = np.sort(weights)[::-1][: top_k or 3000].astype(np.float64)
    reached = int((ranked.cumsum() >= top_p * ranked.sum() * (1 - 1e-12)).argmax())
    floor = _floor(weights, SamplingParams(top_k=top_k, top_p=top_p))
    if top_k in (0, 3000) and top_p == 1.0:
        assert floor == 0.0
    elif top_p == 1.0:
        assert floor == ranked[-1]
    else:
        assert floor == pytest.approx(ranked[reached], rel=1e-6)


@pytest.mark.parametrize("filters", [{"top_k": 50}, {"top_p": 0.95}, {"top_k": 50, "top_p": 0.95}])
def test_at_a_low_temperature_no_partition_is_among_zeros(
    filters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    partition, zeros = np.partition, []

    def counted(values: NDArray[np.float32], place: int) -> NDArray[np.float32]:
        zeros.append(np.count_nonzero(values == 0))
        return partition(values, place)

    monkeypatch.setattr(np, "partition", counted)
    rows = logits(4, vocab=20_000)
    for temperature in (1.0, 0.1, 0.05, 0.01):
        sample(rows, [draw(row, temperature=temperature, **filters) for row in range(4)])
    assert zeros and max(zeros) == 0


@settings(max_examples=50, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 300), max_size=200) | st.just(list(range(300))),
    answer=st.lists(st.integers(0, 300), max_size=200) | st.just(list(range(200))),
    cuts=st.lists(st.integers(0, 200), max_size=5),
    with_prompt=st.booleans(),
)
def test_incremental_counts_equal_counts_of_the_whole(
    prompt: list[int], answer: list[int], cuts: list[int], with_prompt: bool
) -> None:
    counts = TokenCounts()
    for cut in [*sorted(min(cut, len(answer)) for cut in cuts), len(answer)]:
        tokens = prompt + answer[:cut]
        seen, often = counts.read(tokens, len(prompt), with_prompt=with_prompt)
        expected = Counter(dict.fromkeys(prompt, 0) if with_prompt else {})
        expected.update(answer[:cut])
        found = (np.frombuffer(each, np.int32).tolist() for each in (seen, often))
        assert dict(zip(*found, strict=True)) == dict(expected)


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 100.0])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    row = logits(1)
    tokens = tokens_of(row, 20, temperature=temperature)
    assert all(0 <= token < VOCAB for token in tokens)
    if temperature < 1:
        assert set(tokens) == {int(row.argmax())}


def test_tiny_noise_rarely_changes_a_token() -> None:
    row = logits(1, vocab=5000) / 3
    noisy = row + torch.randn_like(row) * 1e-6
    same = sum(a == b for a, b in zip(tokens_of(row, 400), tokens_of(noisy, 400), strict=True))
    assert same >= 399


def test_logprobs_come_from_the_raw_logits() -> None:
    row = logits(1)
    expected = row.log_softmax(-1)[0]
    (token,), (found,) = sample(row, [draw(temperature=0.5, top_k=3, logprobs=4, banned=(int(row.argmax()),))])
    assert found is not None
    assert found.chosen == pytest.approx(float(expected[token]))
    best = expected.topk(4)
    assert [token for token, _ in found.top] == best.indices.tolist()
    assert [value for _, value in found.top] == pytest.approx(best.values.tolist())
    assert sample(row, [draw(logprobs=0)])[1][0].top == ()  # type: ignore[union-attr]
    assert sample(row, [draw()])[1] == [None]


def test_scores_of_given_tokens_are_log_probabilities() -> None:
    rows = logits(3)
    expected = rows.log_softmax(-1)
    scored = score(rows, [1, 2, 3], [0, 2, 1])
    assert [each.chosen for each in scored] == pytest.approx([float(expected[row, row + 1]) for row in range(3)])
    assert [len(each.top) for each in scored] == [0, 2, 1]
    assert scored[1].top[0] == (int(rows[1].argmax()), pytest.approx(float(expected[1].max())))


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.5}, {"top_k": 4}, {"top_p": 0.8}], ids=["plain", "cool", "top_k", "top_p"]
)
def test_samples_follow_the_distribution(params: dict[str, float]) -> None:
    row = logits(1, vocab=8) / 3
    count = 4000
    scaled = (row[0].double() / params.get("temperature", 1.0)).softmax(-1)
    order = scaled.argsort(descending=True)
    before = scaled[order].cumsum(-1) - scaled[order]
    kept = order[: int(params.get("top_k", 8))]
    kept = kept[before[: len(kept)] < params.get("top_p", 1.0)]
    expected = torch.zeros(8, dtype=torch.float64)
    expected[kept] = scaled[kept] / scaled[kept].sum() * count
    observed = np.bincount(tokens_of(row, count, **params), minlength=8)
    assert all(observed[token] == 0 for token in range(8) if expected[token] == 0)
    chi_square = sum(
        (observed[token] - float(expected[token])) ** 2 / float(expected[token]) for token in kept.tolist()
    )
    freedom = len(kept) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)  # four standard deviations; the seeds are fixed


def test_a_draw_has_the_counts_that_penalties_need() -> None:
    params = SamplingParams(seed=1, frequency_penalty=0.5, min_tokens=3, stop_token_ids=(9,))
    sequence = Sequence(Request("r", (5, 5, 6), params, generated=(7, 5)), 0.0)
    first = sequence.draw(5, (0,))
    assert (np.frombuffer(first.seen, np.int32).tolist(), first.banned, first.position) == ([7, 5], (0, 9), 5)
    sequence.tokens += [7]
    second = sequence.draw(6, (0,))
    assert np.frombuffer(second.counts, np.int32).tolist() == [2, 1] and second.banned == ()
    assert np.frombuffer(first.counts, np.int32).tolist() == [1, 1], "an earlier draw does not change"
    repeating = replace(params, repetition_penalty=1.1)
    prompt_too = Sequence(Request("r", (5, 5, 6), repeating, generated=(7, 5)), 0.0).draw(5, ())
    assert np.frombuffer(prompt_too.seen, np.int32).tolist() == [5, 6, 7]
    assert np.frombuffer(prompt_too.counts, np.int32).tolist() == [1, 0, 1]
    assert not Sequence(Request("r", (5,), SamplingParams(seed=1)), 0.0).draw(1, ()).adjusts
