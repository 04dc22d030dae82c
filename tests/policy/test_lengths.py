"""Answer lengths: survival curves with censoring, which samples a prediction uses, and that a wrong one is harmless."""

import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cluster.dispatch import dispatcher as dispatcher_module
from cluster.dispatch.dispatcher import Dispatcher
from cluster.offline.sim.clock import run
from cluster.policy.estimate.lengths import Calibration, LearnedLengths, expected_tokens, longest_answer
from cluster.policy.estimate.survival import Histogram
from cluster.policy.policy import open_policy
from tests.cluster.local import Cluster, cluster, request, split_spec, tokens_of
from tests.policy.test_routed import books_are_empty, expected, routed
from workers.request import FinishReason, Request, SamplingParams

pytestmark = pytest.mark.grid

EOS, LENGTH = FinishReason.EOS, FinishReason.LENGTH


def asked(
    template: int = 0, tail: int = 0, *, most: int = 1000, seen: int = 0, tenant: str = "", prompt: int = 100
) -> Request:
    tokens = tuple((template + n) % 30_000 for n in range(min(prompt, 64))) + (tail,) * max(0, prompt - 64)
    return Request(f"r{template}-{tail}", tokens, SamplingParams(max_tokens=most), generated=(1,) * seen, tenant=tenant)


def learned_from(lengths: list[int], memory: float = 1e12) -> Histogram:
    histogram = Histogram(memory)
    for length in lengths:
        histogram.add(length, cut=False)
    return histogram


# ---- the curve ---------------------------------------------------------------------------------------------------

SHORT = st.lists(st.integers(1, 15), min_size=1, max_size=40)
LONG = st.lists(st.integers(1, 100_000), min_size=1, max_size=40)


@settings(deadline=None)
@given(SHORT, st.integers(0, 14), st.integers(1, 20))
def test_without_censoring_the_curve_is_the_empirical_one(lengths: list[int], seen: int, more: int) -> None:
    curve, most = learned_from(lengths).curve, seen + more
    left = [min(length, most) - seen for length in lengths if length > seen]
    assert curve.num_longer(seen) == pytest.approx(len(left))
    if not left:
        return
    assert curve.mean(seen, most) == pytest.approx(sum(left) / len(left))


@settings(deadline=None)
@given(LONG, st.integers(0, 100_000), st.integers(1, 200_000))
def test_a_prediction_lies_within_what_was_seen_and_what_is_allowed(lengths: list[int], seen: int, more: int) -> None:
    curve, most = learned_from(lengths).curve, seen + more
    shares = [curve.share(length) for length in sorted({0, seen, most, *lengths})]
    assert shares == sorted(shares, reverse=True) and shares[-1] >= 0.0 and shares[0] <= 1.0
    if curve.num_longer(seen) < 0.5:
        return
    assert 0.0 <= curve.mean(seen, most) <= more + 1e-6


@settings(deadline=None)
@given(LONG)
def test_bins_are_fine_enough(lengths: list[int]) -> None:
    mean = sum(lengths) / len(lengths)
    assert learned_from(lengths).curve.mean(0, 1 << 20) == pytest.approx(mean, rel=1 / 8)


def test_censored_samples_count_as_longer() -> None:
    draws, histogram, cuts = random.Random(1), Histogram(1e12), []
    for _ in range(20_000):
        length, bound = 1 + int(draws.expovariate(1 / 300)), draws.choice([100, 400, 4000])
        histogram.add(min(length, bound), cut=length > bound)
        cuts.append(min(length, bound))
    assert histogram.curve.mean(0, 1 << 20) == pytest.approx(300, rel=0.03)
    assert sum(cuts) / len(cuts) < 210, "the mean of what was seen is that of the short ones"


def test_old_samples_fade_and_memory_is_bounded() -> None:
    histogram = Histogram(memory=100)
    for _ in range(5000):
        histogram.add(900, cut=False)
    assert histogram.num == pytest.approx(100, rel=0.02)
    for _ in range(300):
        histogram.add(50, cut=False)
    assert histogram.curve.mean(0, 10_000) == pytest.approx(50 + 850 * math.exp(-3), rel=0.05)
    for length in range(1, 50_000):
        histogram.add(length * 21, cut=bool(length % 3))
    assert len(histogram._bins) <= 16 + 8 * 17


@settings(deadline=None)
@given(st.lists(st.integers(1, 15), min_size=2, max_size=60))
def test_percentiles_cover_their_share_of_the_samples(lengths: list[int]) -> None:
    curve = learned_from(lengths).curve
    for share in (0.5, 0.9):
        covered = [curve.covered(share, length, 1000) for length in lengths]
        assert sum(covered) / len(covered) == pytest.approx(share)


# ---- the predictor -----------------------------------------------------------------------------------------------


def test_without_samples_an_answer_is_as_long_as_allowed() -> None:
    learned, wanted = LearnedLengths(), asked(most=777, seen=30)
    assert learned.mean(wanted) == 747
    assert learned.calibration() == Calibration()


def test_a_replayed_trace_is_predicted_exactly() -> None:
    learned, draws = LearnedLengths(), random.Random(2)
    for n in range(300):
        most = draws.randrange(1, 2000)
        wanted = asked(n, most=most)
        assert learned.mean(wanted) == pytest.approx(most)
        learned.ended(wanted, most, LENGTH)
    assert learned.calibration().error_tokens < 1e-6


def test_templates_come_before_tenants_before_prompt_lengths_before_all() -> None:
    learned = LearnedLengths()
    for n in range(20):
        learned.ended(asked(1, tail=n, tenant="a"), 10, EOS)
        learned.ended(asked(2, tail=n, tenant="a"), 30, EOS)
        learned.ended(asked(1000 * n, tenant="b"), 400, EOS)
        learned.ended(asked(70_000 + 100 * n, prompt=3000), 700, EOS)
    assert learned.mean(asked(1, tail=99, tenant="a")) == pytest.approx(10)
    assert learned.mean(asked(9, tenant="a")) == pytest.approx(20, rel=0.05), "another prompt of the same tenant"
    assert learned.mean(asked(9, tenant="b")) == pytest.approx(400)
    assert learned.mean(asked(9, tenant="new", prompt=2500)) == pytest.approx(700), "prompts of 2,048 to 4,095 tokens"
    assert 10 < learned.mean(asked(9, tenant="new", prompt=9)) < 700, "all that there is"
    assert learned.mean(asked(1, tail=99, tenant="a", most=4)) == 4.0


def test_the_remaining_length_depends_on_the_tokens_so_far() -> None:
    learned = LearnedLengths()
    for n in range(200):
        learned.ended(asked(), 600 if n % 4 == 0 else 12, EOS)
    assert learned.mean(asked()) == pytest.approx(159, rel=0.05)
    assert learned.mean(asked(seen=20)) == pytest.approx(580)
    assert learned.mean(asked(seen=700)) == 300.0, "no sample is that long: as long as allowed"


def test_a_repeated_prediction_uses_new_samples() -> None:
    learned, wanted = LearnedLengths(), asked()
    assert learned.mean(wanted) == learned.mean(wanted) == 1000.0
    for _ in range(20):
        learned.ended(wanted, 50, EOS)
    assert learned.mean(wanted) == pytest.approx(50)
    assert learned.mean(replace(wanted, generated=(1,) * 20)) == pytest.approx(30)


def test_a_cancelled_answer_is_censored() -> None:
    learned = LearnedLengths()
    for _ in range(50):
        learned.ended(asked(), 5, None)
        learned.ended(asked(), 100, EOS)
    learned.ended(asked(), 0, None)
    assert learned.mean(asked()) == pytest.approx(100)
    assert learned.calibration().answers <= 50, "only answers that ended are scored"


def test_the_oldest_tenants_and_templates_are_forgotten_first() -> None:
    learned = LearnedLengths()
    for _ in range(20):
        learned.ended(asked(1, tenant="kept"), 10, EOS)
    for n in range(3000):
        learned.ended(asked(n * 7, tenant=f"t{n}"), 300, EOS)
        if n % 50 == 0:
            learned.ended(asked(1, tenant="kept"), 10, EOS)
    assert len(learned._templates) == 1024 and len(learned._tenants) == 256
    assert learned.mean(asked(1, tenant="kept")) == pytest.approx(10)


ENDINGS = st.tuples(
    st.integers(0, 3), st.sampled_from(["", "a", "b"]), st.integers(0, 5000), st.sampled_from([EOS, LENGTH, None])
)


@settings(max_examples=40, deadline=None)
@given(st.lists(ENDINGS, max_size=80), st.integers(0, 3), st.integers(1, 6000), st.integers(0, 6000))
def test_a_prediction_is_always_possible(
    endings: list[tuple[int, str, int, FinishReason | None]], template: int, most: int, seen: int
) -> None:
    learned = LearnedLengths()
    for like, tenant, length, finish in endings:
        learned.ended(asked(like, tenant=tenant, most=max(1, length)), length, finish)
    wanted = asked(template, tenant="a", most=most, seen=min(seen, most - 1))
    left = longest_answer(wanted)
    assert 1.0 <= learned.mean(wanted) <= left + 1e-6
    known = learned.calibration()
    shares = (known.within_p50, known.within_p90)
    assert all(0.0 <= share <= 1.0 + 1e-9 for share in shares) and known.answers <= len(endings)


def stream(seed: int, count: int) -> Iterator[tuple[Request, int, FinishReason]]:
    """Three tenants with lognormal answers of their own; bounds of which most are never reached."""
    draws = random.Random(seed)
    for n in range(count):
        tenant, middle = draws.choice([("a", 40), ("b", 200), ("c", 900)])
        length, most = max(1, round(draws.lognormvariate(math.log(middle), 0.7))), draws.choice([256, 1024, 2048])
        wanted = asked(n * 11, tenant=tenant, most=most)
        yield wanted, min(length, most), LENGTH if length > most else EOS


def test_predictions_are_calibrated_and_better_than_max_tokens() -> None:
    learned = LearnedLengths()
    for wanted, length, finish in stream(3, 3000):
        learned.ended(wanted, length, finish)
    known = learned.calibration()
    assert known.answers == pytest.approx(3000, abs=40)
    assert known.within_p50 == pytest.approx(0.5, abs=0.05) and known.within_p90 == pytest.approx(0.9, abs=0.03)
    assert known.error_tokens < 0.4 * known.asked_error_tokens


# ---- wrong ones --------------------------------------------------------------------------------------------------

NUMBERS = st.floats() | st.integers(-(2**70), 2**70).map(float)


class Liar:
    """Predicts the given numbers, in turn."""

    def __init__(self, numbers: list[float]) -> None:
        self._numbers = numbers
        self.asked = 0

    def _number(self) -> float:
        self.asked += 1
        return self._numbers[self.asked % len(self._numbers)]

    def __call__(self, request: Request) -> int:
        return self.most(request)

    def mean(self, request: Request) -> float:
        return self._number()

    def most(self, request: Request) -> int:
        number = self._number()
        return int(number) if math.isfinite(number) else -1

    def ended(self, request: Request, num_output: int, finish: FinishReason | None) -> None:
        """It learns nothing."""

    def calibration(self) -> Calibration:
        return Calibration()


@settings(deadline=None)
@given(NUMBERS, st.integers(1, 3000), st.integers(0, 50))
@example(math.nan, 10, 0)
@example(math.inf, 10, 0)
def test_a_predictor_s_mean_is_clamped_to_what_is_possible(number: float, most: int, seen: int) -> None:
    wanted = asked(most=most, seen=min(seen, most - 1))
    assert 1 <= expected_tokens(Liar([number]), wanted) <= longest_answer(wanted)


async def serve_under_lies(routing: str) -> None:
    spec = routed(split_spec(2, 2, kv_blocks=60), routing, "predictive")
    spec = replace(spec, transfer=replace(spec.transfer, digest=False))  # digests are checked on threads
    async with cluster(spec) as subject:
        await all_served(subject)


async def all_served(subject: Cluster) -> None:
    for n in range(4):
        wanted = request(f"r{n}", 20 + 91 * n, max_tokens=1 + 9 * n)
        assert tokens_of(await subject.run(wanted)) == expected(wanted)
    await subject.settle()
    assert books_are_empty(subject.dispatcher)


@pytest.mark.parametrize("routing", ["splitwise", "slo"])
@settings(max_examples=5, deadline=None)
@given(numbers=st.lists(NUMBERS, min_size=1, max_size=4))
def test_wrong_predictions_cost_no_token_and_no_block(routing: str, numbers: list[float]) -> None:
    liar = Liar(numbers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatcher_module, "open_policy", lambda spec, seed: open_policy(spec, seed, liar))
        run(serve_under_lies(routing))
    assert liar.asked > 0


async def test_a_gateway_learns_from_its_answers() -> None:
    async with cluster(split_spec()) as subject:
        for n in range(30):
            await subject.run(request(f"r{n}", 30, max_tokens=5 + n % 3))
        known = subject.dispatcher.slo_attainment().calibration
        assert known.answers > 15 and known.error_tokens == pytest.approx(0.0, abs=0.1), "all get what they ask for"
        dispatcher: Dispatcher = subject.dispatcher
        assert dispatcher._policy.lengths.mean(replace(request("new", 30), sampling=SamplingParams(max_tokens=7))) <= 7
