"""The SLO router: each rule by a view in which it decides. A prompt token costs 1 ms, a decoding sequence 10 ms."""

from dataclasses import replace

import pytest
from msgspec import structs

from cluster.policy.routing.router import Placement
from diptych.view import Adapter
from tests.policy.views import BLOCKS, Story, changed, request, view, worker
from workers.costs import LinearCost
from workers.request import SLO

TIGHT = SLO(ttft_s=1.0, tpot_s=0.05)
WEIGHTS = LinearCost(0.04, 0.001, 0.0, 0.001, 0.0, 0.0, 0.0, 0.0)  # a step is dear, a sequence in it is not


def story(slo: SLO | None = TIGHT, cost: LinearCost | None = None) -> Story:
    return Story("slo", slo=slo) if cost is None else Story("slo", slo=slo, cost=cost)


def test_a_request_is_split_by_role() -> None:
    assert story().names(view(worker("p0"), worker("d0")), request(length=800)) == ("p0", "d0")


def test_the_prompt_goes_where_its_first_token_is_expected_soonest() -> None:
    subject, picture = story(), view(worker("p0"), worker("p1"), worker("d0"))
    first = subject.send(picture, request("a", 900))
    second = subject.send(picture, request("b", 100, first=5000))
    assert (first.prefill, second.prefill) == ("p0", "p1")
    assert first.predicted_ttft_s == 0.9 and second.predicted_ttft_s == 0.1


def test_a_cached_prefix_outweighs_a_short_queue() -> None:
    subject, picture = story(), view(worker("p0"), worker("p1"), worker("d0"))
    long = request("a", 3200)
    assert subject.send(picture, long).prefill == "p0"
    subject.prefilled(long)
    subject.ended(long)
    other = request("b", 300, first=9000)
    assert subject.send(picture, other).prefill == "p0"  # both are idle
    again = subject.send(picture, request("c", 3200))
    assert again.prefill == "p0" and again.cached_tokens >= 3072


def test_decodes_go_where_the_step_will_be_shortest() -> None:
    subject, picture = story(), view(worker("p0"), worker("d0"), worker("d1"))
    placed = [
        subject.send(picture, request(name, 100, max_tokens=300, first=500 * number)).decode
        for number, name in enumerate("abcd")
    ]
    assert sorted(placed) == ["d0", "d0", "d1", "d1"]


def test_a_prompt_that_would_be_late_goes_to_a_decode_worker_that_has_time() -> None:
    subject, picture = story(), view(worker("p0"), worker("d0"))
    assert subject.send(picture, request("a", 950)).prefill == "p0"
    late = subject.send(picture, request("b", 600, first=5000))
    assert (late.prefill, late.decode) == ("d0", "d0")


def test_a_worker_whose_decodes_use_the_whole_slo_gets_no_prompt() -> None:
    subject, picture = story(cost=WEIGHTS), view(worker("p0"), worker("m0"))
    for number in range(8):  # steps of 48 of 50 ms: not even sixteen tokens fit beside them
        wanted = request(f"a{number}", 10, first=300 * number)
        subject.policy.began(subject.ask(picture, wanted), Placement("m0", "m0", "by hand"))
        subject.prefilled(wanted)
    placement = subject.choose(picture, request("b", 900, first=8000))
    assert isinstance(placement, Placement) and placement.prefill == "p0"


def test_decodes_overflow_to_a_prefill_worker_only_while_that_leaves_it_time() -> None:
    full = [worker("d0", running=6)]
    subject = story()
    assert subject.names(view(worker("p0"), *full), request("a", 400)) == ("p0", "p0")  # 10 of 50 ms
    subject = story(cost=WEIGHTS)  # 41 ms of 50, and a prompt's sixteen tokens take 16
    assert subject.names(view(worker("p0"), worker("d0", running=12)), request("a", 400)) == ("p0", "d0")


def test_a_mixed_worker_does_both_phases_if_it_meets_both_slos() -> None:
    picture = view(worker("m0"), worker("m1"))
    subject = story()
    assert subject.names(picture, request("a", 500)) == ("m0", "m0")
    subject.send(picture, request("a", 500))
    assert subject.names(picture, request("b", 500, first=4000)) == ("m1", "m1")


def test_a_short_suffix_is_computed_where_it_decodes() -> None:
    slow = LinearCost(0.0, 0.001, 0.0, 0.01, 0.0, 0.5, 0.0, 0.0)  # half a second until a transfer begins
    assert story(cost=slow).names(view(worker("p0"), worker("d0")), request("a", 30)) == ("d0", "d0")
    assert story(cost=slow).names(view(worker("p0"), worker("d0")), request("a", 900)) == ("p0", "d0")
    assert story().names(view(worker("p0"), worker("d0")), request("a", 40)) == ("d0", "d0")  # within one token's time


def test_a_prefix_is_fetched_only_if_that_is_faster_than_computing_it() -> None:
    for bytes_per_s, prefix_owner in ((1e9, "p0"), (1e6, "")):
        subject = story(SLO(ttft_s=8.0, tpot_s=0.05))
        workers = [structs.replace(worker(name), kv_token_bytes=10_000) for name in ("p0", "p1", "d0")]
        picture = view(*workers)
        between = {each.reader: each for each in picture.links if each.owner == "p0"}["p1"]
        links = tuple(replace(each, bytes_per_s=bytes_per_s) if each is between else each for each in picture.links)
        picture = replace(picture, links=links)
        first = request("a", 3200)
        assert subject.send(picture, first).prefill == "p0"
        subject.now_s += 3.2
        subject.prefilled(first)
        subject.send(picture, request("b", 3300, first=9000))  # p0 has the prompt, and now a queue
        placement = subject.choose(picture, request("c", 3200))
        assert isinstance(placement, Placement)
        if prefix_owner:
            assert (placement.prefill, placement.prefix_owner) == ("p1", "p0") and placement.cached_tokens >= 3072
        else:
            assert placement.prefix_owner == ""


def test_a_prompt_is_cut_while_others_wait_for_the_prefill_worker() -> None:
    subject, picture = story(SLO(ttft_s=4.0, tpot_s=0.05)), view(worker("p0"), worker("d0"))
    whole = subject.send(picture, request("a", 900))
    assert whole.prefill == "p0" and not whole.cut_tokens
    cut = subject.send(picture, request("b", 800, first=4000))
    assert cut.prefill == "p0" and 128 <= cut.cut_tokens <= 672
    assert cut.predicted_ttft_s is not None and cut.predicted_ttft_s <= 0.8 * 4.0
    short = subject.send(picture, request("c", 200, first=9000))
    assert not short.cut_tokens


def test_memory_for_the_answer_comes_before_a_short_step() -> None:
    subject = story()
    picture = view(worker("p0"), worker("d0", total_blocks=20, free_blocks=20), worker("d1", running=2))
    assert subject.names(picture, request("a", 310, max_tokens=9)) == ("p0", "d1")


def test_without_slos_the_load_is_still_spread() -> None:
    subject, picture = story(slo=None), view(worker("p0"), worker("p1"), worker("d0"), worker("d1"))
    first = subject.send(picture, request("a", 900))
    second = subject.send(picture, request("b", 900, first=4000))
    assert {first.prefill, second.prefill} == {"p0", "p1"} and {first.decode, second.decode} == {"d0", "d1"}


@pytest.mark.parametrize("routing", ["slo", "mooncake"])
def test_workers_that_hold_the_adapter_are_preferred_while_loading_it_takes_longer_than_their_queue(
    routing: str,
) -> None:
    adapter = Adapter("sql", "m", "/models/sql", "id", 500_000_000)  # half a second to load
    wanted = replace(request("a", 200, max_tokens=20), adapter=adapter)
    holding = worker("p1", queued_tokens=400, adapters=("id",)), worker("d1", running=2, used=20, adapters=("id",))
    picture = view(worker("p0"), worker("d0"), *holding)
    assert Story(routing, slo=TIGHT).names(picture, request("a", 200)) == ("p0", "d0")
    prefill, decode = Story(routing, slo=TIGHT).names(picture, wanted)
    assert prefill == "p1" and (routing != "slo" or decode == "d1")
    picture = changed(picture, worker("p1", queued_tokens=600, adapters=("id",)))
    assert Story(routing, slo=TIGHT).names(picture, wanted)[0] == "p0"


def test_the_load_of_other_gateways_counts() -> None:
    picture = view(worker("p0", queued_tokens=700), worker("p1"), worker("d0", running=3, used=30), worker("d1"))
    assert story().names(picture, request("a", 200)) == ("p1", "d1")
    picture = changed(picture, worker("p1", queued_tokens=900), worker("d1", running=4, used=40))
    assert story().names(picture, request("a", 200)) == ("p0", "d0")
    assert picture.workers[0].stats.total_blocks == BLOCKS
