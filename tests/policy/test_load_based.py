"""Routers that use load only: each rule."""

from collections import Counter

from cluster.policy.routing.baselines import SplitMix64
from cluster.policy.routing.router import Placement, SentWork
from tests.policy.views import BLOCKS, Story, only_linked, request, view, worker

SPLIT = view(worker("p0", queued_tokens=50), worker("p1", queued_tokens=10), worker("d0"), worker("d1"))


def test_the_prefill_worker_with_the_fewest_queued_tokens_is_taken() -> None:
    assert Story("least-loaded").names(SPLIT) == ("p1", "d0")


def test_what_was_sent_since_the_last_statistics_counts() -> None:
    sent = {"p1": SentWork(prompt_tokens=100), "d0": SentWork(sequences=1)}
    assert Story("least-loaded").names(SPLIT, sent=sent) == ("p0", "d1")


def test_a_parallel_sample_goes_where_its_prompt_is_computed_already() -> None:
    story = Story("least-loaded")
    assert story.names(SPLIT, sibling_worker="p0") == ("p0", "d0")
    assert story.names(SPLIT, sibling_worker="p0", avoid={"p0"}) == ("p1", "d0")
    mixed = view(worker("m0", queued_tokens=50), worker("m1", queued_tokens=10))
    assert story.names(mixed, sibling_worker="m0") == ("m0", "m0")


def test_one_requested_token_needs_no_decode_worker() -> None:
    assert Story("least-loaded").names(SPLIT, request(max_tokens=1)) == ("p1", "p1")


def test_unlinked_pairs_are_skipped() -> None:
    linked = only_linked(SPLIT, ("p0", "d1"), ("d1", "p0"))
    assert Story("least-loaded").names(linked) == ("p0", "d1")


def test_a_worker_alone_does_both_phases_only_when_allowed() -> None:
    decodes = view(worker("d0"))
    assert Story("least-loaded").names(decodes) == ("d0", "d0")
    assert Story("least-loaded").choose(decodes, request(), may_colocate=False) is None


def test_a_prompt_that_all_workers_together_cannot_hold_has_no_placement() -> None:
    assert Story("least-loaded").choose(SPLIT, request(length=4 * 16 * BLOCKS)) is None


def test_distserve_counts_requests_and_not_tokens() -> None:
    picture = view(worker("p0", waiting=2, queued_tokens=20), worker("p1", running=1, queued_tokens=900), worker("d0"))
    assert Story("distserve").names(picture)[0] == "p1"
    assert Story("least-loaded").names(picture)[0] == "p0"


def test_round_robin_takes_turns_and_skips_workers_that_are_not_ready() -> None:
    story = Story("round-robin")
    taken = [story.send(SPLIT, request(f"r{n}")) for n in range(4)]
    assert [(each.prefill, each.decode) for each in taken] == [("p0", "d0"), ("p1", "d1")] * 2
    assert story.send(SPLIT, request("s"), avoid={"p0"}).prefill == "p1"
    assert story.send(SPLIT, request("t")).prefill == "p0"


def test_choosing_does_not_take_a_turn() -> None:
    story = Story("round-robin")
    assert {story.names(SPLIT) for _ in range(3)} == {("p0", "d0")}


def test_draws_follow_from_the_seed() -> None:
    def drawn(seed: int) -> list[Placement]:
        story = Story("random", seed=seed)
        return [story.send(MANY, request(f"r{n}")) for n in range(20)]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


MANY = view(*(worker(f"{role}{n}", queued_tokens=n, running=n) for role in "pd" for n in range(8)))


def test_random_picks_all_workers_equally_often() -> None:
    story = Story("random")
    taken = Counter(story.names(MANY)[0] for _ in range(800))
    assert len(taken) == 8 and min(taken.values()) > 60


def test_draws_are_uniform_and_stay_in_bounds() -> None:
    draws = SplitMix64(3)
    counts = Counter(draws.below(5) for _ in range(5000))
    assert set(counts) == set(range(5)) and min(counts.values()) > 900
