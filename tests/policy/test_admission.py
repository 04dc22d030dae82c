"""Who is turned away, and when. A prompt token takes a millisecond, a decode step ten for each sequence."""

from statistics import fmean, pstdev

import pytest

from cluster.policy.routing.router import Placement, Refusal
from diptych.view import ClusterView
from tests.policy.views import Story, changed, request, view, worker
from workers.costs import LinearCost
from workers.request import SLO

TIGHT = SLO(ttft_s=0.5, tpot_s=0.05)
CALM = view(worker("p0"), worker("d0"))


def refused(story: Story, picture: ClusterView, length: int = 100, **asked: object) -> str:
    """The reason, or nothing."""
    answer = story.choose(picture, request("asked", length, **asked))  # type: ignore[arg-type]
    return answer.reason if isinstance(answer, Refusal) else ""


@pytest.mark.parametrize("admission", ["late", "early", "predictive"])
def test_a_first_token_that_would_come_too_late_is_refused_with_the_time_to_wait(admission: str) -> None:
    story = Story("least-loaded", admission, TIGHT)
    assert not refused(story, CALM, length=500)
    assert refused(story, CALM, length=501) == "the first token would take 0.501 s, the SLO is 0.5 s"
    story.send(CALM, request("a", length=400))
    answer = story.choose(CALM, request("b", length=200))
    assert isinstance(answer, Refusal) and answer.retry_after_s == pytest.approx(0.1)
    story.now_s += 0.2
    assert not refused(story, CALM, length=200)


def test_nobody_is_refused_without_admission_or_without_a_promise() -> None:
    for story in (Story("least-loaded", "none", TIGHT), Story("least-loaded", "early")):
        assert not refused(story, changed(CALM, worker("d0", running=500)), length=9000)


def test_the_requests_own_promise_comes_before_the_gateways() -> None:
    story = Story("least-loaded", "early", TIGHT)
    assert not refused(story, CALM, length=900, slo=SLO(ttft_s=1.0))
    assert refused(story, CALM, length=300, slo=SLO(ttft_s=0.2))


def test_only_first_attempts_are_refused() -> None:
    story = Story("least-loaded", "early", TIGHT)
    assert not refused(story, CALM, length=9000, attempt=1)
    story.send(CALM, request("sibling", 400))
    assert isinstance(story.choose(CALM, request("b", 200)), Refusal)
    assert isinstance(story.choose(CALM, request("b", 200), beside="p0"), Placement), "its prompt is computed already"


def test_a_siblings_prompt_counts_once() -> None:
    story = Story("least-loaded", "early", TIGHT)
    for n in range(3):
        story.send(CALM, request(f"r{n}", 400), beside="p0" if n else "")
    assert story.policy.active.ahead_s("p0", story.now_s) == pytest.approx(0.402)


def test_early_looks_at_what_decodes_now() -> None:
    story = Story("least-loaded", "early", TIGHT)
    assert not refused(story, changed(CALM, worker("d0", running=4, reserved=90)))
    assert "the SLO is 0.05 s" in refused(story, changed(CALM, worker("d0", running=5)))
    assert not refused(story, changed(CALM, worker("d0", running=5)), max_tokens=1), "one token needs no decode"


def test_late_looks_at_the_decode_side_when_the_prompt_is_done() -> None:
    story = Story("least-loaded", "late", TIGHT)
    full = changed(CALM, worker("d0", running=5))
    assert not refused(story, full)
    assert isinstance(story.policy.judge(story.ask(full, request()), "d0"), Refusal)
    assert story.policy.judge(story.ask(CALM, request()), "d0") is None
    assert story.policy.judge(story.ask(full, request(attempt=1)), "d0") is None
    assert story.policy.judge(story.ask(view(worker("p0")), request()), "d0") is None, "the worker has gone"
    early = Story("least-loaded", "early", TIGHT)
    assert early.policy.judge(early.ask(full, request()), "d0") is None


def test_predictive_counts_the_prefills_that_end_before_and_drops_the_decodes_that_end() -> None:
    story = Story("least-loaded", "predictive", SLO(tpot_s=0.05))
    ended = request("before", length=10)
    story.send(CALM, ended)
    story.prefilled(ended)
    story.now_s += 2.0
    story.ended(ended)  # so every request decodes for two seconds
    for n in range(4):
        story.send(CALM, request(f"r{n}", length=100))
    assert not refused(story, CALM)
    story.send(CALM, request("r4", length=100))
    assert refused(story, CALM), "five prefills end before this one does"
    story.now_s += 0.5
    for n in range(5):
        story.prefilled(request(f"r{n}"))
    decoding = changed(CALM, worker("d0", running=5))
    assert refused(story, decoding)
    assert not refused(story, decoding, length=2000), "they will have ended when so long a prompt is done"


def test_how_long_requests_decode_is_not_that_of_the_short_ones_alone() -> None:
    story, active = Story("least-loaded"), Story("least-loaded").policy.active
    assert active.decode_seconds(0.0) == float("inf")
    for n in range(4):
        story.send(CALM, request(f"r{n}"))
        story.prefilled(request(f"r{n}"))
    story.now_s += 1.0
    story.ended(request("r0"))
    assert story.policy.active.decode_seconds(story.now_s) == pytest.approx(4.0), "four seconds decoded, one end"
    story.now_s += 9.0
    for n in range(1, 4):
        story.ended(request(f"r{n}"))
    assert story.policy.active.decode_seconds(story.now_s) == pytest.approx((1 + 3 * 10) / 4)


def test_predictions_come_with_the_placement_where_costs_are_known() -> None:
    placement = Story("least-loaded").choose(changed(CALM, worker("d0", running=2)), request())
    assert isinstance(placement, Placement)
    assert placement.predicted_ttft_s == pytest.approx(0.1) and placement.predicted_tpot_s == pytest.approx(0.03)
    guessed = Story("least-loaded", cost=None).choose(CALM, request())
    assert isinstance(guessed, Placement) and guessed.predicted_ttft_s is None


# ---- the two pools swing against each other -------------------------------------------------------------------------

PREFILLERS, PREFILL_S, DECODE_S, SLOTS = 24, 8.0, 16.0, 16
EACH_S = 0.5  # one request in so many seconds: twice what can be served


class TwoPools:
    """Prompts of eight seconds and enough who compute them, answers of sixteen, and sixteen slots for these."""

    def __init__(self, admission: str) -> None:
        cost = LinearCost(0.0, PREFILL_S / 1000, 0.0, 1.0 / SLOTS, 0.0, 0.0, 0.0, 0.0)
        self.story = Story("least-loaded", admission, SLO(ttft_s=100.0, tpot_s=1.0), cost=cost)
        self.picture = view(*(worker(f"p{n}") for n in range(PREFILLERS)), worker("d0"))
        self.queues: dict[str, list[tuple[float, str]]] = {f"p{n}": [] for n in range(PREFILLERS)}
        self.decoding: list[tuple[float, str]] = []  # (end, name)
        self.refused = self.wasted = 0
        self.loads: list[tuple[int, int]] = []  # (prompts, decodes) under way, once a step

    def run(self, seconds: float) -> "TwoPools":
        begin_s = self.story.now_s
        while self.story.now_s < begin_s + seconds:
            self._end_what_is_due()
            self._arrive()
            self.loads.append((sum(map(len, self.queues.values())), len(self.decoding)))
            self.story.now_s += EACH_S
        return self

    def _end_what_is_due(self) -> None:
        now_s = self.story.now_s
        for due in [each for each in self.decoding if each[0] <= now_s]:
            self.decoding.remove(due)
            self.story.ended(request(due[1]))
        for queue in self.queues.values():
            while queue and queue[0][0] <= now_s:
                self._prefilled(queue.pop(0)[1])

    def _prefilled(self, name: str) -> None:
        wanted = request(name, 1000)
        self.story.prefilled(wanted)
        if self.story.policy.judge(self.story.ask(self._seen(), wanted), "d0"):
            self.story.ended(wanted)
            self.wasted += 1
        else:
            self.decoding.append((self.story.now_s + DECODE_S, name))

    def _arrive(self) -> None:
        name = f"r{self.story.now_s}"
        ask = self.story.ask(self._seen(), request(name, 1000))
        answer = self.story.policy.choose(ask)
        if not isinstance(answer, Placement):
            self.refused += 1
            return
        self.story.policy.began(ask, answer)
        queue = self.queues[answer.prefill]
        queue.append(((queue[-1][0] if queue else self.story.now_s) + PREFILL_S, name))

    def _seen(self) -> ClusterView:
        waiting = sum(map(len, self.queues.values()))
        queued = [worker(name, queued_tokens=1000 * len(queue)) for name, queue in self.queues.items()]
        return changed(self.picture, *queued, worker("d0", running=len(self.decoding), reserved=waiting))

    @property
    def steady(self) -> list[tuple[int, int]]:
        return self.loads[len(self.loads) // 3 :]

    @property
    def swing(self) -> float:
        """How far the decode load strays from its mean, as a share of the mean."""
        decodes = [decode for _, decode in self.steady]
        return pstdev(decodes) / fmean(decodes)

    @property
    def phase(self) -> float:
        """The correlation of the two pools' loads: -1 when one is full while the other is empty."""
        prompts, decodes = zip(*self.steady, strict=True)
        return correlation(prompts, decodes)


def correlation(xs: tuple[int, ...], ys: tuple[int, ...]) -> float:
    mean_x, mean_y = fmean(xs), fmean(ys)
    covariance = fmean((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return covariance / (pstdev(xs) * pstdev(ys)) if pstdev(xs) and pstdev(ys) else 0.0


def test_early_rejection_makes_the_pools_swing_in_anti_phase_and_prediction_damps_it() -> None:
    early, predictive = TwoPools("early").run(600.0), TwoPools("predictive").run(600.0)
    assert early.swing > 0.3 and early.phase < -0.3
    assert predictive.swing < 0.5 * early.swing
    assert max(decode for _, decode in early.steady) > 1.5 * SLOTS
    assert max(decode for _, decode in predictive.steady) <= SLOTS, "the promise is kept"


def test_late_rejection_wastes_prefills_and_early_does_not() -> None:
    wasted = {name: TwoPools(name).run(600.0).wasted for name in ("late", "early", "predictive")}
    assert wasted["late"] > 100 and wasted["early"] == wasted["predictive"] == 0
