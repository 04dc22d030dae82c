"""The routers that use the prefix index."""

from dataclasses import replace

import pytest
from msgspec import structs

from cluster.policy.active_requests import ActiveRequests
from cluster.policy.estimate.latency import LatencyPredictor
from cluster.policy.policy import open_policy
from cluster.policy.routing.prefix_index import Match, prefix_hashes
from cluster.policy.routing.router import Placement
from diptych.view import ClusterView
from tests.policy.views import SIMPLE, Story, changed, request, spec, view, worker
from workers.config import ByteSize, CacheConfig
from workers.kv_events import HashChanges, KVEvents
from workers.request import SLO

TWO = view(worker("p0"), worker("p1"), worker("d0"))


def test_mooncake_goes_where_the_prefix_is() -> None:
    story, wanted = Story("mooncake-local"), request("a", length=1000, first=5)
    assert story.send(TWO, wanted).prefill == "p0"
    story.prefilled(wanted)
    story.ended(wanted)
    longer = request("b", length=1200, first=5)
    placement = story.send(TWO, longer)
    assert (placement.prefill, placement.cached_tokens) == ("p0", 7 * 128)
    assert placement.predicted_ttft_s is not None and abs(placement.predicted_ttft_s - 0.304) < 1e-9


def test_reported_prefixes_count_and_evicted_ones_do_not() -> None:
    story, wanted = Story("mooncake-local"), request("a", length=1000, first=5)
    assert story.policy.uses_prefix_index
    hashes = tuple(prefix_hashes(wanted.prompt))
    story.policy.index.take("p1", "1", KVEvents(0, 7, 7, 128, whole=True, device=HashChanges(hashes)))
    found = story.choose(TWO, wanted)
    assert isinstance(found, Placement) and (found.prefill, found.cached_tokens) == ("p1", 7 * 128)
    story.policy.index.take("p1", "1", KVEvents(7, 9, 9, 128, device=HashChanges(removed=hashes[2:])))
    story.now_s += 1.0
    found = story.choose(TWO, wanted)
    assert isinstance(found, Placement) and (found.prefill, found.cached_tokens) == ("p1", 2 * 128)


def test_a_restarted_worker_counts_as_empty() -> None:
    story, wanted = Story("mooncake-local"), request("a", length=1000, first=5)
    story.policy.index.take(
        "p1", "0", KVEvents(0, 7, 7, 128, whole=True, device=HashChanges(tuple(prefix_hashes(wanted.prompt))))
    )
    found = story.choose(TWO, wanted)
    assert isinstance(found, Placement) and (found.prefill, found.cached_tokens) == ("p0", 0)


def test_an_answer_that_the_client_has_is_looked_up_too() -> None:
    story, wanted = Story("mooncake-local"), request("a", length=200)
    again = replace(wanted, generated=tuple(range(200, 300)))
    hashes = prefix_hashes((*again.prompt, *again.generated))
    story.policy.index.take("p1", "1", KVEvents(0, 2, 2, 128, whole=True, device=HashChanges(tuple(hashes))))
    found = story.choose(TWO, again)
    assert isinstance(found, Placement) and (found.prefill, found.cached_tokens) == ("p1", 256)


def test_mooncake_leaves_the_prefix_where_the_queue_costs_more() -> None:
    story = Story("mooncake-local")
    story.send(TWO, request("a", length=1000, first=5))  # a second of work on p0
    assert story.names(TWO, request("b", length=1000, first=5)) == ("p1", "d0"), "1.0 s ahead + 0.104 s > 1.0 s"
    story.now_s += 0.2
    assert story.names(TWO, request("b", length=1000, first=5)) == ("p0", "d0"), "0.8 s ahead + 0.104 s < 1.0 s"


def test_the_queue_of_other_gateways_counts_too() -> None:
    story = Story("mooncake-local")
    assert story.names(changed(TWO, worker("p0", queued_tokens=50)))[0] == "p1"


def test_corrupt_kv_is_not_looked_up_again() -> None:
    story, wanted = Story("mooncake-local"), request("a", length=1000)
    story.send(TWO, wanted)
    story.ended(wanted)
    again = story.choose(TWO, replace(wanted, fresh=True))
    assert isinstance(again, Placement) and again.cached_tokens == 0


def test_the_whole_prompt_is_never_cached() -> None:
    story, wanted = Story("mooncake-local"), request("a", length=256)
    story.send(TWO, wanted)
    story.ended(wanted)
    found = story.choose(TWO, request("b", length=256))
    assert isinstance(found, Placement) and found.cached_tokens == 255


def test_mooncake_decodes_where_a_step_is_shortest() -> None:
    picture = view(worker("p0"), worker("d0", running=5), worker("d1", running=3, reserved=1))
    assert Story("mooncake-local").names(picture)[1] == "d1"


def after_one_prompt(routing: str) -> Story:
    """p0 computed a prompt of 1,000 tokens, of which the index counts 896."""
    story, wanted = Story(routing), request("a", length=1000)
    story.send(TWO, wanted)
    story.prefilled(wanted)
    story.ended(wanted)
    return story


def waits(name: str, tokens: int) -> ClusterView:
    return changed(TWO, worker(name, queued_tokens=tokens))


def test_mooncake_fetches_a_prefix_to_where_the_queue_is_shorter() -> None:
    for routing, found in (("mooncake", ("p1", 896, "p0")), ("mooncake-local", ("p0", 896, ""))):
        placement = after_one_prompt(routing).choose(waits("p0", 500), request("b", length=1000))
        assert isinstance(placement, Placement)
        assert (placement.prefill, placement.cached_tokens, placement.prefix_owner) == found


@pytest.mark.parametrize("routing", ["mooncake", "slo"])
def test_of_equal_owners_the_one_with_the_fewest_readers_lends(routing: str) -> None:
    story, wanted = Story(routing, slo=SLO(ttft_s=4.0)), request("a", length=1000)
    for owner in ("p0", "p1"):
        hashes = tuple(prefix_hashes(wanted.prompt))
        story.policy.index.take(owner, "1", KVEvents(0, 7, 7, 128, whole=True, device=HashChanges(hashes)))
    for readers, lender in (((3, 1), "p1"), ((1, 3), "p0")):
        owners = (worker(f"p{place}", queued_tokens=9000, leases=leases) for place, leases in enumerate(readers))
        placement = story.choose(view(*owners, worker("p2"), worker("d0")), wanted)
        assert isinstance(placement, Placement)
        assert (placement.prefill, placement.prefix_owner) == ("p2", lender)


def test_mooncake_does_not_fetch_a_prefix_that_is_cached_or_hardly_longer() -> None:
    story, wanted = after_one_prompt("mooncake"), request("b", length=1000)
    at_home = story.choose(TWO, wanted)
    assert isinstance(at_home, Placement) and (at_home.prefill, at_home.prefix_owner) == ("p0", "")
    shorter = request("c", length=700)  # 640 tokens of it lie on p1 then: 896 are not half as much again
    story.send(waits("p0", 9000), shorter, avoid={"p0"})
    story.ended(shorter)
    placement = story.choose(waits("p0", 9000), wanted)
    assert isinstance(placement, Placement)
    assert (placement.prefill, placement.cached_tokens, placement.prefix_owner) == ("p1", 640, "")


@pytest.mark.parametrize(("used", "lent"), [(0, 768), (1000 - 16, 256 + 128)])
def test_mooncake_fetches_from_host_memory_what_half_of_the_free_blocks_take_and_nothing_from_a_disk(
    used: int, lent: int
) -> None:
    cost = replace(SIMPLE, swap_byte_s=1e-9)
    story, wanted = Story("mooncake", cost=cost), request("a", length=1000)
    hashes = tuple(prefix_hashes(wanted.prompt))
    tiers = {"device": HashChanges(hashes[:2]), "host": HashChanges(hashes[2:6]), "disk": HashChanges(hashes[6:])}
    story.policy.index.take("p0", "1", KVEvents(0, 7, 7, 128, whole=True, **tiers))
    at_home = story.choose(TWO, wanted)
    assert isinstance(at_home, Placement) and (at_home.prefill, at_home.cached_tokens) == ("p0", 768), "no host cache"
    busy = story.choose(changed(TWO, worker("p0", queued_tokens=9000, used=used)), wanted)
    assert isinstance(busy, Placement)
    assert (busy.prefill, busy.cached_tokens, busy.prefix_owner) == ("p1", lent, "p0")


@pytest.mark.parametrize(
    ("copy_s", "read_s", "cached"),
    [(1e-6, 1e-5, 892), (1e-6, 1e-3, 704), (1e-6, 2e-3, 640), (2e-3, 1e-5, 256), (0.9e-3, 0.2e-3, 832)],
)
@pytest.mark.parametrize("tier", ["disk", "remote"])
def test_a_worker_restores_what_is_faster_than_computing_it_and_computes_while_it_reads(
    tier: str, copy_s: float, read_s: float, cached: int
) -> None:
    """A token takes a millisecond to compute; 256 are on the device, 256 in host memory, 384 on the disk or a server.

    Of these, as many are read as the others take to be computed.
    """
    made = spec("mooncake-local", cost=replace(SIMPLE, swap_byte_s=copy_s))
    pools = tuple(replace(each, cache=CacheConfig(ByteSize(2 * 384))) for each in made.pools)
    latency = LatencyPredictor(replace(made, pools=pools), ActiveRequests())
    subject = structs.replace(worker("p0"), kv_token_bytes=1, **{f"{tier}_byte_s": read_s})
    match = Match(896, 256, **{f"{tier}_tokens": 384})
    tokens, seconds = latency.found(subject, match, 1000)
    assert tokens == cached
    assert seconds == pytest.approx(copy_s * (tokens - 256))
    assert latency.found(subject, Match(300), 200) == (199, 0.0)


def test_a_prompt_in_two_stores_is_read_from_one_after_the_other() -> None:
    made = spec("mooncake-local", cost=replace(SIMPLE, swap_byte_s=1e-6))
    pools = tuple(replace(each, cache=CacheConfig(ByteSize(2 * 384))) for each in made.pools)
    latency = LatencyPredictor(replace(made, pools=pools), ActiveRequests())
    subject = structs.replace(worker("p0"), kv_token_bytes=1, disk_byte_s=1e-3, remote_byte_s=1e-3)
    in_one, in_two = Match(640, disk_tokens=384), Match(640, disk_tokens=192, remote_tokens=192)
    assert latency.found(subject, in_two, 1000) == latency.found(subject, in_one, 1000)


def test_a_worker_is_chosen_that_can_read_what_another_one_stored() -> None:
    """p0 has told that the prompt is on a server. It is busy; p1 uses the same server, p2 another one."""
    made = spec("mooncake-local", cost=SIMPLE)
    pools = tuple(replace(each, cache=CacheConfig(ByteSize(4096))) for each in made.pools)
    story, wanted = Story("mooncake-local", cost=SIMPLE), request("a", length=1000)
    story.policy = open_policy(replace(made, pools=pools), seed=0)
    index, events = story.policy.index, KVEvents(0, 7, 7, 128, whole=True)
    index.take("p0", "1", structs.replace(events, remote=HashChanges(tuple(prefix_hashes(wanted.prompt)))), server="s")
    index.take("p1", "1", events, server="s")
    index.take("p2", "1", events, server="t")
    reader = {"kv_token_bytes": 1, "remote_byte_s": 1e-5}
    workers = (worker("p0", queued_tokens=9000), worker("p1", queued_tokens=300), worker("p2"), worker("d0"))
    placement = story.choose(view(*(structs.replace(each, **reader) for each in workers)), wanted)
    assert isinstance(placement, Placement) and (placement.prefill, placement.cached_tokens) == ("p1", 887)


def test_mooncake_does_not_fetch_over_a_slow_link_or_from_an_avoided_worker() -> None:
    slow = Story("mooncake", cost=replace(SIMPLE, transfer_byte_s=1.0))
    wanted = request("a", length=1000)
    heavy = view(*(structs.replace(each, kv_token_bytes=1) for each in TWO.workers))
    slow.send(heavy, wanted)
    slow.prefilled(wanted)
    slow.ended(wanted)
    busy = changed(heavy, structs.replace(worker("p0", queued_tokens=500), kv_token_bytes=1))
    placement = slow.choose(busy, request("b", length=1000))
    assert isinstance(placement, Placement) and (placement.prefill, placement.prefix_owner) == ("p0", "")
    away = after_one_prompt("mooncake").choose(TWO, request("b", length=1000), avoid={"p0"})
    assert isinstance(away, Placement) and (away.prefill, away.cached_tokens, away.prefix_owner) == ("p1", 0, "")


def test_routers_without_costs_follow_what_engines_have_learned() -> None:
    story = Story("mooncake-local", cost=None, max_batch_tokens=512)
    assert story.names(TWO)[0] == "p0"
    slow = request("a", length=100)
    story.send(TWO, slow)
    story.now_s += 60.0  # a minute for 100 tokens, which the default cost model cannot explain
    story.prefilled(slow)
    story.ended(slow)
    assert story.names(TWO, request("b", length=150))[0] == "p0", "the engine says what a step takes, not the gateway"
    stepping = view(worker("p0", prompt_ratio=3.0), worker("p1"), worker("d0", decode_ratio=9.0), worker("d1"))
    assert story.names(stepping, request("b", length=150)) == ("p1", "d1")
