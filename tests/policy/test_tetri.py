"""TetriInfer: alpha and beta, two at random, heavy and light, and workers that change sides."""

from collections import Counter

from cluster.policy.routing.baselines.tetri import IDLE_S
from diptych.view import ClusterView
from tests.policy.views import Story, changed, request, view, worker

LONG = 1000  # tokens of a heavy answer


def test_decode_goes_where_the_predicted_answer_has_room() -> None:
    picture = view(worker("p0"), worker("d0", used=970), worker("d1", used=100), worker("d2", used=960))
    taken = Counter(Story("tetri", seed=seed).names(picture, request(max_tokens=LONG))[1] for seed in range(40))
    assert set(taken) == {"d1"}


def test_with_no_room_anywhere_two_of_all_are_drawn() -> None:
    picture = view(worker("p0"), *(worker(f"d{n}", used=999) for n in range(4)))
    taken = Counter(Story("tetri", seed=seed).names(picture, request(max_tokens=LONG))[1] for seed in range(60))
    assert len(taken) == 4


def test_of_two_the_one_with_fewer_heavy_decodes_for_each_light_one_is_taken() -> None:
    picture = view(worker("p0"), worker("d0"), worker("d1"))
    story = Story("tetri")
    first = story.send(picture, request("heavy", max_tokens=LONG)).decode
    other = {"d0": "d1", "d1": "d0"}[first]
    assert story.send(picture, request("b", max_tokens=LONG)).decode == other
    light = story.send(picture, request("light", max_tokens=5)).decode
    assert story.send(picture, request("c", max_tokens=LONG)).decode == light, "1:1 there, 1:0 on the other"


BUSY_DECODE = view(worker("p0"), worker("p1"), worker("p2"), worker("d0", running=30))


def after_idling(story: Story, picture: ClusterView, seconds: float, max_tokens: int = 9) -> None:
    """Requests that p0 computes at once come every ten seconds."""
    for _ in range(int(seconds // 10)):
        wanted = request(f"r{story.now_s}", max_tokens=max_tokens)
        story.send(picture, wanted, beside="p0")
        story.prefilled(wanted)
        story.ended(wanted)
        story.now_s += 10.0


def test_a_worker_idle_for_a_minute_changes_to_the_busy_side() -> None:
    story = Story("tetri")
    after_idling(story, BUSY_DECODE, IDLE_S)
    assert {story.names(BUSY_DECODE)[1] for _ in range(20)} == {"d0"}
    after_idling(story, BUSY_DECODE, 20.0)
    assert {story.names(BUSY_DECODE)[1] for _ in range(20)} == {"p1"}, "of two, the one with fewer sequences"
    assert "p1" not in {story.names(BUSY_DECODE)[0] for _ in range(20)}


def test_nobody_flips_while_the_other_side_has_someone_idle() -> None:
    story, calm = Story("tetri"), changed(BUSY_DECODE, worker("d0"))
    after_idling(story, calm, 200.0, max_tokens=1)
    assert {story.names(BUSY_DECODE)[1] for _ in range(20)} == {"d0"}


def test_a_side_is_never_emptied() -> None:
    story, picture = Story("tetri"), view(worker("p0"), worker("d0", running=30), worker("d1", running=30))
    after_idling(story, picture, 10 * IDLE_S)
    assert story.names(picture)[0] == "p0"


def test_a_flipped_worker_stays_for_a_minute_at_least_and_may_come_back() -> None:
    story = Story("tetri")
    after_idling(story, BUSY_DECODE, IDLE_S + 20.0)
    assert story.names(BUSY_DECODE)[1] == "p1"
    calm = changed(BUSY_DECODE, worker("d0"), worker("p0", queued_tokens=9), worker("p2", queued_tokens=9))
    after_idling(story, calm, IDLE_S - 20.0, max_tokens=1)
    assert "p1" not in {story.names(calm)[0] for _ in range(20)}
    after_idling(story, calm, 40.0, max_tokens=1)
    assert story.names(calm)[0] in ("p1", "d0")
