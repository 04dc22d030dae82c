"""Splitwise's order of overflow, step by step. Machines hold 16,000 tokens; a queue is long above 8,192."""

from cluster.policy.routing.router import Placement
from tests.policy.views import Story, changed, only_linked, request, view, worker

PAIRS = view(worker("p0", queued_tokens=30), worker("p1"), worker("d0"), worker("d1", used=100))
FULL = 995  # blocks


def test_the_home_pools_come_first_by_pending_tokens_and_by_memory() -> None:
    assert Story("splitwise").names(PAIRS) == ("p1", "d0")


def test_memory_counts_what_answers_under_way_will_take() -> None:
    story = Story("splitwise")
    assert story.send(PAIRS, request("a", max_tokens=4000)).decode == "d0"
    assert story.names(PAIRS) == ("p1", "d1")


def test_an_empty_queue_takes_a_prompt_of_any_length() -> None:
    assert Story("splitwise").names(PAIRS, request(length=9000)) == ("p1", "d0")


def test_long_prompt_queues_overflow_to_the_token_machine_with_the_fewest_pending_tokens() -> None:
    picture = view(worker("p0", queued_tokens=8100), worker("d0", queued_tokens=5), worker("d1", used=100))
    assert Story("splitwise").names(picture, request(length=92)) == ("p0", "d0")
    assert Story("splitwise").names(picture, request(length=93)) == ("d1", "d0")


def test_full_token_machines_overflow_to_the_prompt_machine_with_the_least_memory() -> None:
    picture = view(worker("p0", used=50), worker("p1", queued_tokens=5), worker("d0", used=FULL))
    assert Story("splitwise").names(picture) == ("p0", "p1")


def test_the_mixed_pool_comes_before_the_opposite_one() -> None:
    long = view(worker("p0", queued_tokens=8100), worker("d0"), worker("m0", queued_tokens=50))
    assert Story("splitwise").names(long) == ("m0", "d0")
    full = view(worker("p0"), worker("d0", used=FULL), worker("m0", used=300))
    assert Story("splitwise").names(full) == ("p0", "m0")


def test_a_machine_is_mixed_while_it_has_work_of_the_other_phase() -> None:
    story, wanted = Story("splitwise"), request("a", length=100)
    picture = view(worker("p0", queued_tokens=8100), worker("d0"), worker("d1"), worker("d2", queued_tokens=50))
    assert story.send(picture, wanted).prefill == "d0"  # d0 is mixed now
    assert story.names(picture) == ("d0", "d1"), "the mixed pool takes the prompt, the token pool the answer"
    busy = changed(picture, worker("d0", queued_tokens=8100))
    assert story.names(busy) == ("d1", "d1"), "the mixed pool is long too: the next token machine"
    story.prefilled(wanted)
    story.ended(wanted)
    assert story.names(picture) == ("d0", "d0"), "home again: no machine is mixed, and it has the most memory"


def test_when_all_machines_are_full_one_does_both_phases() -> None:
    full = view(worker("p0", queued_tokens=8100, used=FULL), worker("m0", queued_tokens=8190, used=FULL))
    placement = Story("splitwise").choose(full, request())
    assert isinstance(placement, Placement) and placement.colocated and placement.prefill == "p0"


def test_an_unlinked_pair_is_not_used() -> None:
    picture = view(worker("p0", queued_tokens=8100), worker("d0", used=9), worker("d1", queued_tokens=9))
    assert Story("splitwise").names(picture) == ("d0", "d1")
    story = Story("splitwise")
    assert story.names(only_linked(picture, ("p0", "d1"))) == ("p0", "d1")


def test_its_workers_are_all_linked() -> None:
    assert Story("splitwise").policy.links_all and not Story("least-loaded").policy.links_all
