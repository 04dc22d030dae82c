"""What predictive early rejection refuses. A prompt token takes 1 ms, a decode step 10 ms for each sequence."""

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


def test_a_first_token_that_would_come_too_late_is_refused_with_the_time_to_wait() -> None:
    story = Story("least-loaded", "predictive", TIGHT)
    assert not refused(story, CALM, length=500)
    assert refused(story, CALM, length=501) == "the first token would take 0.501 s, the SLO is 0.5 s"
    story.send(CALM, request("a", length=400))
    answer = story.choose(CALM, request("b", length=200))
    assert isinstance(answer, Refusal) and answer.retry_after_s == pytest.approx(0.1)
    story.now_s += 0.2
    assert not refused(story, CALM, length=200)


def test_no_request_is_refused_without_admission_or_without_an_slo() -> None:
    for story in (Story("least-loaded", "none", TIGHT), Story("least-loaded", "predictive")):
        assert not refused(story, changed(CALM, worker("d0", running=500)), length=9000)


def test_the_slo_of_the_request_comes_before_the_gateways() -> None:
    story = Story("least-loaded", "predictive", TIGHT)
    assert not refused(story, CALM, length=900, slo=SLO(ttft_s=1.0))
    assert refused(story, CALM, length=300, slo=SLO(ttft_s=0.2))


def test_only_first_attempts_are_refused() -> None:
    story = Story("least-loaded", "predictive", TIGHT)
    assert not refused(story, CALM, length=9000, attempt=1)
    story.send(CALM, request("sibling", 400))
    assert isinstance(story.choose(CALM, request("b", 200)), Refusal)
    assert isinstance(story.choose(CALM, request("b", 200), sibling_worker="p0"), Placement), (
        "its prompt is computed already"
    )


def test_a_shared_prompt_counts_once() -> None:
    story = Story("least-loaded", "predictive", TIGHT)
    for n in range(3):
        story.send(CALM, request(f"r{n}", 400), sibling_worker="p0" if n else "")
    assert story.policy.active.worker_load("p0").ahead_s(story.now_s) == pytest.approx(0.402)


def test_decodes_of_other_gateways_count() -> None:
    story = Story("least-loaded", "predictive", TIGHT)
    assert not refused(story, changed(CALM, worker("d0", running=3, reserved=1)))
    assert "the SLO is 0.05 s" in refused(story, changed(CALM, worker("d0", running=5)))
    assert not refused(story, changed(CALM, worker("d0", running=5)), max_tokens=1), "one token needs no decode"


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


def test_the_mean_decode_time_is_not_that_of_short_requests_alone() -> None:
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


# ---- the loads of the two pools stay steady -------------------------------------------------------------------------

PREFILLERS, PREFILL_S, DECODE_S, SLOTS = 24, 8.0, 16.0, 16
EACH_S = 0.5  # one request in so many seconds: twice what can be served


class TwoPools:
    """Prompts of eight seconds and enough prefill workers, answers of sixteen seconds and sixteen slots."""

    def __init__(self) -> None:
        cost = LinearCost(0.0, PREFILL_S / 1000, 0.0, 1.0 / SLOTS, 0.0, 0.0, 0.0, 0.0)
        self.story = Story("least-loaded", "predictive", SLO(ttft_s=100.0, tpot_s=1.0), cost=cost)
        self.picture = view(*(worker(f"p{n}") for n in range(PREFILLERS)), worker("d0"))
        self.queues: dict[str, list[tuple[float, str]]] = {f"p{n}": [] for n in range(PREFILLERS)}
        self.decoding: list[tuple[float, str]] = []  # (end, name)
        self.refused = 0
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
        self.story.prefilled(request(name, 1000))
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


def test_prediction_keeps_the_decode_load_steady_and_within_the_slo() -> None:
    """Judged by the decode load of now, requests would make it swing (Mooncake, arXiv version, section 7)."""
    pools = TwoPools().run(600.0)
    assert pools.refused > 100 and pools.swing < 0.1
    assert max(decode for _, decode in pools.steady) <= SLOTS
