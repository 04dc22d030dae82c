"""Placement is a pure function of the view: these are its rules, one by one."""

from dataclasses import replace

from cluster.policy.placement import Sent, place
from cluster.spec import Role
from cluster.view import ClusterView, WorkerState, WorkerView
from kvtransfer.ticket import LinkReport
from workers.request import Request, SamplingParams
from workers.stats import WorkerStats

REQUEST = Request("r", (1, 2, 3), SamplingParams(seed=1, max_tokens=9))


def view(*queued: tuple[str, Role, int]) -> ClusterView:
    """Ready workers with that many prompt tokens queued; every pair is linked."""
    workers = tuple(
        WorkerView(
            name, role.value, role, WorkerState.READY, capacity_tokens=1000, stats=WorkerStats(queued_tokens=tokens)
        )
        for name, role, tokens in queued
    )
    links = tuple(LinkReport(a.name, b.name, "memory", "", 0.0, 1.0) for a in workers for b in workers if a is not b)
    return ClusterView(1, "c", None, workers, links)


SPLIT = view(("p0", Role.PREFILL, 50), ("p1", Role.PREFILL, 10), ("d0", Role.DECODE, 0), ("d1", Role.DECODE, 0))


def chosen(picture: ClusterView, request: Request = REQUEST, **options: object) -> tuple[str, str] | None:
    found = place(picture, request, {}, **options)  # type: ignore[arg-type]
    return (found.prefill, found.decode) if found else None


def test_the_prefill_worker_with_the_fewest_queued_tokens_is_taken() -> None:
    assert chosen(SPLIT) == ("p1", "d0")


def test_what_was_sent_since_the_last_statistics_counts() -> None:
    found = place(SPLIT, REQUEST, {"p1": Sent(prompt_tokens=100), "d0": Sent(sequences=1)})
    assert found is not None and (found.prefill, found.decode) == ("p0", "d1")


def test_a_sibling_goes_where_its_prompt_is_computed_already() -> None:
    assert chosen(SPLIT, beside="p0") == ("p0", "d0")
    assert chosen(SPLIT, beside="p0", avoid={"p0"}) == ("p1", "d0")
    mixed = view(("m0", Role.MIXED, 50), ("m1", Role.MIXED, 10))
    assert chosen(mixed, beside="m0") == ("m0", "m0")


def test_one_wanted_token_needs_no_decode_worker() -> None:
    one = replace(REQUEST, sampling=SamplingParams(seed=1, max_tokens=1))
    assert chosen(SPLIT, one) == ("p1", "p1")


def test_unlinked_pairs_are_passed_over() -> None:
    linked = replace(SPLIT, links=tuple(link for link in SPLIT.links if (link.owner, link.reader) == ("p0", "d1")))
    assert chosen(linked) == ("p0", "d1")


def test_a_worker_alone_does_both_phases_only_when_allowed() -> None:
    decodes = view(("d0", Role.DECODE, 0))
    assert chosen(decodes) == ("d0", "d0")
    assert chosen(decodes, alone=False) is None


def test_a_prompt_that_nobody_can_hold_has_no_place() -> None:
    assert chosen(SPLIT, replace(REQUEST, prompt=(1,) * 1000)) is None
