"""Pinned prefixes stay in host memory, whatever else comes: until they expire, and within their budget."""

import pytest

from tests.engine.driving import Device, engine, planned, request, run_to_end, scheduled, step
from tests.engine.test_host_cache import CHEAP, DEAR, answer, prompt
from workers.costs import CostModel
from workers.engine.engine import Engine
from workers.engine.pins import Pins
from workers.errors import InvalidRequest, Overloaded

TTL_S = 60.0
SYSTEM = request("system", prompt(100), max_tokens=1)  # ten blocks


def small(max_pinned: int = 12, cost: CostModel = CHEAP) -> tuple[Engine, Device]:
    """Sixteen blocks on the device, 24 in host memory, twelve of which may be pinned."""
    device = Device()
    subject = engine(kv_blocks=18, host_cache_blocks=24, max_pinned=max_pinned, block_bytes=1000, cost=cost)
    return subject, device


def flood(subject: Engine, device: Device, first: int = 1000, now_s: float = 0.0) -> None:
    """Four times as many blocks as host memory has."""
    for number in range(10):
        at = first + 200 * number
        tokens = tuple(token % 999 + 1 for token in range(at, at + 40))
        subject.add(device.know(request(f"flood{at}", tokens, max_tokens=1)), now_s, hold=False)
        run_to_end(subject, now_s, device)


def pinned_blocks(subject: Engine) -> int:
    return subject.stats().tiers[0].pinned_blocks


@pytest.mark.parametrize("warm_first", [True, False])
def test_a_pinned_prefix_survives_any_flood(warm_first: bool) -> None:
    subject, device = small()
    if not warm_first:
        subject.pin(SYSTEM, TTL_S, 0.0)
    answer(subject, device, SYSTEM)
    if warm_first:
        subject.pin(SYSTEM, TTL_S, 0.0)
        plan, _ = planned(subject, 0.0, device)
        assert not plan.chunks and len(plan.swap_out) == 4, "an idle worker saves it, a step's worth at a time"
        run_to_end(subject, 0.0, device)
    assert pinned_blocks(subject) == 10 and step(subject, 0.0, device) == (None, [])
    flood(subject, device)
    assert pinned_blocks(subject) == 10 and subject.cached_tokens(SYSTEM) == 40
    computed, cached, _ = answer(subject, device, request("again", (*prompt(100), 5, 6), max_tokens=1))
    assert (computed, cached) == (2, 40)


def test_without_a_pin_the_same_prefix_is_evicted() -> None:
    subject, device = small()
    answer(subject, device, SYSTEM)
    flood(subject, device)
    assert subject.cached_tokens(SYSTEM) == 0


def test_a_pin_is_saved_also_where_copying_is_slower_than_computing() -> None:
    subject, device = small(cost=DEAR)
    subject.pin(SYSTEM, TTL_S, 0.0)
    answer(subject, device, SYSTEM)
    run_to_end(subject, 0.0, device)
    assert pinned_blocks(subject) == 10 and len(subject.pool.host) == 10


def test_pins_never_take_more_than_their_budget() -> None:
    subject, device = small()
    subject.pin(SYSTEM, TTL_S, 0.0)
    subject.pin(SYSTEM, TTL_S, 1.0)
    with pytest.raises(Overloaded, match="needs 8 blocks more than may be pinned: 10 of at most 12"):
        subject.pin(request("other", prompt(300)), TTL_S, 0.0)
    subject.pin(request("short", prompt(300, 8)), TTL_S, 0.0)
    with pytest.raises(InvalidRequest, match=r"pins: 1GiB"):
        small(max_pinned=0)[0].pin(SYSTEM, TTL_S, 0.0)
    answer(subject, device, request("rest", prompt(300, 8), max_tokens=1))
    answer(subject, device, SYSTEM)
    flood(subject, device)
    assert len(subject.pool.host) == 24 and pinned_blocks(subject) == 12, "the other half is for others"


def test_a_pin_ends_after_its_last_use() -> None:
    subject, device = small()
    subject.pin(SYSTEM, TTL_S, 0.0)
    answer(subject, device, SYSTEM)
    subject.add(device.know(request("hit", (*prompt(100), 7), max_tokens=1)), 50.0, hold=False)
    run_to_end(subject, 50.0, device)
    subject.expire(109.0)
    flood(subject, device)
    assert subject.cached_tokens(SYSTEM) == 40, "the hit renewed it"
    subject.expire(110.0)
    assert pinned_blocks(subject) == 0 and subject.cached_tokens(SYSTEM) == 40, "evicted when its turn comes"
    flood(subject, device, first=5000)
    assert subject.cached_tokens(SYSTEM) == 0


def test_an_unpinned_prefix_is_evicted_like_others() -> None:
    subject, device = small()
    subject.pin(SYSTEM, TTL_S, 0.0)
    answer(subject, device, SYSTEM)
    assert subject.unpin(request("other", prompt(300))) == 0
    assert (subject.unpin(SYSTEM), subject.unpin(SYSTEM), subject.unpin(None)) == (10, 0, 0)
    flood(subject, device)
    assert subject.cached_tokens(SYSTEM) == 0


def test_a_failed_step_loses_the_content_and_not_the_pin() -> None:
    subject, device = small()
    subject.pin(SYSTEM, TTL_S, 0.0)
    answer(subject, device, SYSTEM)
    subject.add(device.know(request("fails", prompt(300), max_tokens=1)), 0.0, hold=False)
    subject.steps_failed([scheduled(subject)], "the device failed")
    subject.drain()
    assert pinned_blocks(subject) == 0 and subject.cached_tokens(SYSTEM) == 0
    answer(subject, device, request("again", (*prompt(100), 7), max_tokens=1))
    run_to_end(subject, 0.0, device)
    assert pinned_blocks(subject) == 10
    flood(subject, device)
    assert subject.cached_tokens(SYSTEM) == 40


def test_tenants_pin_their_own_prefix() -> None:
    subject, device = small(max_pinned=20)
    mine, other = (request(name, prompt(100), max_tokens=1, tenant=name) for name in ("mine", "other"))
    subject.pin(mine, TTL_S, 0.0)
    answer(subject, device, mine)
    assert (subject.cached_tokens(mine), subject.cached_tokens(other)) == (40, 0)
    assert subject.unpin(other) == 0


def test_a_renewal_never_shortens_a_pin() -> None:
    pins = Pins(2)
    pins.add([b"a", b"b"], 10.0, 0.0)
    pins.renew([b"x", b"a"], 5.0)
    pins.renew([b"a", b"x", b"b"], 5.0)
    assert pins.expire(10.0) == [b"b"], "only the head of a prompt counts"
    pins.renew([b"a"], 1.0)
    assert pins.expire(14.9) == [] and pins.expire(15.0) == [b"a"] and not len(pins)
