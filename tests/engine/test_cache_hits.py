"""The seconds that cached tokens save, and where an engine and a request say they came from."""

import pytest

from tests.engine.driving import bring, request
from tests.engine.test_host_cache import answer, prompt, small
from workers.costs import LinearCost
from workers.engine.cache_hits import CacheHits
from workers.request import TokensOut

COST = LinearCost(step_s=0.5, prefill_token_s=0.001, prefill_pair_s=0.0, transfer_byte_s=1e-6, swap_byte_s=2e-6)


def saved(*found: tuple[str, int], disk_byte_s: float = 3e-6) -> dict[str, float]:
    hits = CacheHits()
    hits.read_byte_s["disk"] = disk_byte_s
    hits.save(1000, found, COST, token_bytes=100.0)
    return dict(hits.saved_s)


def test_cached_tokens_save_what_computing_takes_less_what_loading_takes() -> None:
    tokens = ("device", 100), ("fetched", 200), ("host", 300), ("disk", 150)
    assert saved(*tokens) == pytest.approx({"device": 0.1, "fetched": 0.18, "host": 0.24, "disk": 0.075})
    assert saved(("disk", 150), disk_byte_s=1.0) == {"disk": 0.0}, "never less than nothing"


def test_later_tokens_of_a_prompt_save_more_since_they_attend_to_more() -> None:
    hits = CacheHits()
    hits.save(1000, (("device", 400), ("host", 400)), LinearCost(prefill_pair_s=1e-6, swap_byte_s=0.0), 100.0)
    assert 0 < hits.saved_s["device"] < hits.saved_s["host"]


def test_fetched_blocks_count_as_fetched_for_their_first_prompt_alone() -> None:
    subject, device = small()
    fetch = subject.prefix_fetches.begin(prompt(100, 32))
    device.fill(fetch.blocks, prompt(100, 32))
    bring(subject.prefix_fetches, fetch)
    subject.prefix_fetches.end(fetch)
    sources = []
    for name in ("first", "second"):
        _, cached, emitted = answer(subject, device, request(name, prompt(100, 36), max_tokens=2))
        outs = [each for each in emitted if isinstance(each, TokensOut)]
        assert cached == 32 and outs[1].cached_from == ()
        sources.append(outs[0].cached_from)
    assert sources == [(("fetched", 32),), (("device", 32),)]
    stats = subject.stats()
    assert [(each.name, each.hit_tokens, each.saved_s > 0) for each in stats.sources] == [
        ("device", 32, True),
        ("fetched", 32, True),
        ("host", 0, False),
    ]
    subject.check()
