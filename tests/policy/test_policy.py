"""What holds for every router and any cluster."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from cluster.policy.policy import open_policy
from cluster.policy.routing.router import Enqueue, Placement, PlacementQuery, Refusal, SentWork
from cluster.spec import ADMISSION, ROUTING, SpecError
from cluster.spec_file import parse_spec
from diptych.view import ClusterView, WorkerState, WorkerView
from tests.policy.views import BLOCK, BLOCKS, SIMPLE, Story, request, spec, view, worker
from workers.request import SLO, Request

pytestmark = pytest.mark.grid

SLOW_TO_COME = SLO(ttft_s=0.2, tpot_s=0.05)


@st.composite
def workers(draw: st.DrawFn) -> WorkerView:
    role = draw(st.sampled_from("pdm"))
    total = draw(st.sampled_from([0, 10, BLOCKS]))
    used = draw(st.integers(0, total))
    found = worker(
        f"{role}{draw(st.integers(0, 3))}",
        total_blocks=total,
        free_blocks=total - used,
        queued_tokens=draw(st.sampled_from([0, 5, 300, 9000])),
        waiting=draw(st.integers(0, 3)),
        running=draw(st.integers(0, 40)),
        reserved=draw(st.integers(0, 3)),
        step_s=draw(st.sampled_from([0.0, 0.02])),
    )
    state = draw(st.sampled_from([WorkerState.READY] * 4 + list(WorkerState)))
    pool = draw(st.sampled_from([found.pool, "no-such-pool"]))
    return structs.replace(
        found, state=state, pool=pool, capacity_tokens=draw(st.sampled_from([0, 50, BLOCK * BLOCKS]))
    )


@st.composite
def pictures(draw: st.DrawFn) -> ClusterView:
    found = {each.name: each for each in draw(st.lists(workers(), max_size=6))}
    whole = view(*found.values())
    return replace(whole, unlinked=frozenset((a, b) for a in found for b in found if not draw(st.integers(0, 3))))


asked = st.builds(
    request,
    st.just("r"),
    st.sampled_from([1, 40, 200, 3000]),
    max_tokens=st.sampled_from([1, 2, 500]),
    first=st.integers(0, 1),
    slo=st.sampled_from([SLO(), SLOW_TO_COME]),
)
steps = st.lists(
    st.tuples(
        pictures(),
        asked,
        st.sets(st.sampled_from(["p0", "d0", "m0", "d1"]), max_size=2),
        st.booleans(),
        st.sampled_from(["", "p0", "m1"]),
        st.sampled_from([0.0, 0.3, 61.0]),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize("routing", ROUTING)
@settings(max_examples=25, deadline=None)
@given(steps, st.sampled_from(ADMISSION), st.sampled_from([SIMPLE, None]))
def test_a_placement_can_always_be_carried_out(routing: str, cases: list[tuple], admission: str, cost: object) -> None:
    story = Story(routing, admission, cost=cost)  # type: ignore[arg-type]
    under_way: list[Request] = []
    for number, (picture, like, avoid, alone, beside, seconds, ends) in enumerate(cases):
        wanted = replace(like, id=f"r{number}")
        query = PlacementQuery(picture, wanted, {"p0": SentWork(50, 1)}, avoid, alone, beside, story.now_s)
        placement = story.policy.choose(query)
        possible(picture, query, placement)
        if isinstance(placement, Placement):
            story.policy.began(query, placement)
            under_way.append(wanted)
        story.now_s += seconds
        for _ in range(min(ends, len(under_way))):
            story.prefilled(under_way[0])
            story.ended(under_way.pop(0))
        story.policy.active.check()
    for wanted in under_way:
        story.ended(wanted)
    story.policy.active.check()
    assert len(story.policy.active) == 0


def possible(picture: ClusterView, query: PlacementQuery, placement: Placement | Refusal | Enqueue | None) -> None:
    ready = {w.name: w for w in picture.workers if w.state is WorkerState.READY and w.name not in query.avoid}
    fit = {name for name, each in ready.items() if query.request.num_tokens < each.capacity_tokens}
    if isinstance(placement, Refusal):
        assert placement.reason and placement.retry_after_s > 0
    elif isinstance(placement, Enqueue):
        assert placement.reason and placement.start_s > 0 and placement.need_s >= 0
    elif placement is None:
        assert not (fit if query.may_colocate else [name for name in fit if name[0] == "m"]), "any worker serves alone"
    else:
        if placement.lenders:
            assert placement.colocated and not fit and placement.prefill not in placement.lenders
            assert {placement.prefill, *placement.lenders} <= ready.keys()
            assert all(picture.linked(placement.prefill, name) for name in placement.lenders)
        else:
            assert {placement.prefill, placement.decode} <= fit
        assert placement.colocated or picture.linked(placement.prefill, placement.decode)
        assert 0 <= placement.cached_tokens < query.request.num_tokens


@pytest.mark.parametrize("routing", ROUTING)
@settings(max_examples=8, deadline=None)
@given(steps)
def test_the_same_seed_and_events_give_the_same_placements(routing: str, cases: list[tuple]) -> None:
    def told_once() -> list[Placement | Refusal | Enqueue | None]:
        story, answers = Story(routing, seed=5), []
        for number, (picture, like, avoid, alone, beside, seconds, _) in enumerate(cases):
            query = PlacementQuery(picture, replace(like, id=f"r{number}"), {}, avoid, alone, beside, story.now_s)
            answers.append(story.policy.choose(query))
            if isinstance(answers[-1], Placement):
                story.policy.began(query, answers[-1])
            story.now_s += seconds
        return answers

    assert told_once() == told_once()


def test_every_name_of_the_specification_has_its_router() -> None:
    assert len({type(open_policy(spec(routing), 1)._router) for routing in ROUTING}) == len(ROUTING)


def test_an_unknown_name_is_one_error_with_the_list() -> None:
    document = {"model": "m", "pools": [{"name": "m", "role": "mixed"}]}
    with pytest.raises(SpecError, match=r"gateway: routing 'mooncak' is not one of least-loaded, random"):
        parse_spec(document | {"gateway": {"routing": "mooncak"}})
    with pytest.raises(SpecError, match=r"gateway: admission 'all' is not one of none, predictive, slo"):
        parse_spec(document | {"gateway": {"admission": "all"}})
    with pytest.raises(SpecError, match=r"gateway: slo.tpot_s is -1.0; it must be above 0 seconds"):
        parse_spec(document | {"gateway": {"slo": {"tpot_s": -1.0}}})


def test_costs_of_a_pool_come_from_its_specification() -> None:
    given = spec("least-loaded")
    known = replace(given, pools=tuple(replace(pool, cost=SIMPLE) for pool in given.pools))
    for cluster, known_s in ((known, 0.1), (given, None)):
        placement = open_policy(cluster, 1).choose(PlacementQuery(view(worker("m0")), request(length=100)))
        assert isinstance(placement, Placement) and placement.predicted_ttft_s == known_s
