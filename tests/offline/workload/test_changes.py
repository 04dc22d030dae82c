"""Changes of a workload keep order and lengths and add a note."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.offline.workload import changes
from cluster.offline.workload.arrivals import Arrival, Workload, WorkloadError
from cluster.offline.workload.changes import WorkloadPhase
from tests.offline.workload.summary import prefix_reuse, summary

TOKENS = st.integers(1, 2000)


@st.composite
def workloads(draw: st.DrawFn, name: str = "drawn") -> Workload:
    """Times on whole seconds, so that many are equal; prefixes of blocks of 512."""
    arrivals, at_s = [], 0
    for prompt, output in draw(st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=30)):
        blocks = draw(st.integers(0, -(-prompt // 512)))
        arrivals.append(Arrival(float(at_s), prompt, output, tuple(draw(st.integers(0, 5)) for _ in range(blocks))))
        at_s += draw(st.sampled_from([0, 0, 0, 1, 4]))
    return Workload(name, tuple(arrivals))


def bodies(workload: Workload) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(each.prompt_tokens, each.output_tokens, each.prefix) for each in workload.arrivals]


def times(workload: Workload) -> list[float]:
    return [each.at_s for each in workload.arrivals]


@given(workloads(), st.floats(1e-3, 1e3))
def test_another_rate_keeps_order_and_lengths(workload: Workload, rate: float) -> None:
    if not workload.rate:
        with pytest.raises(WorkloadError, match="all at once"):
            changes.at_rate(workload, rate)
        return
    found = changes.at_rate(workload, rate)
    assert found.rate == pytest.approx(rate)
    assert bodies(found) == bodies(workload)
    assert len(found.notes) == len(workload.notes) + 1
    assert times(changes.at_rate(found, workload.rate)) == pytest.approx(times(workload), abs=1e-9)


@given(workloads(), st.floats(0.01, 10.0), st.integers(0, 3))
def test_jitter_keeps_order_and_stays_inside_the_tick(workload: Workload, tick: float, seed: int) -> None:
    found = changes.jittered(workload, tick, seed)
    assert bodies(found) == bodies(workload)
    later = {at_s: min([other for other in times(workload) if other > at_s], default=1e9) for at_s in times(workload)}
    for moved, raw in zip(times(found), times(workload), strict=True):
        assert raw <= moved <= min(raw + tick, later[raw])
    assert found == changes.jittered(workload, tick, seed)


@given(workloads(), st.integers(2, 1500))
def test_clipped_requests_fit(workload: Workload, context: int) -> None:
    cut = changes.clipped(workload, context)
    for new, old in zip(cut.arrivals, workload.arrivals, strict=True):
        assert new.prompt_tokens + new.output_tokens <= context
        assert new.prefix == old.prefix[: len(new.prefix)]
        fits = old.prompt_tokens + old.output_tokens <= context
        assert (new == old) is fits


@given(workloads(), st.integers(0, 3))
def test_redrawn_arrivals_keep_requests_and_a_seed_repeats_them(workload: Workload, seed: int) -> None:
    found = changes.redrawn(workload, 2.0, seed)
    assert bodies(found) == bodies(workload)
    assert found == changes.redrawn(workload, 2.0, seed)


@given(workloads(), st.integers(1, 50))
def test_a_sample_has_lengths_of_its_source(workload: Workload, count: int) -> None:
    found = changes.resampled(workload, count, 1.0, seed=0)
    assert len(found.arrivals) == count
    assert set(bodies(found)) <= {(prompt, output, ()) for prompt, output, _ in bodies(workload)}


@given(workloads(), st.floats(0, 20), st.floats(0, 20))
def test_a_window_and_its_surroundings_are_the_whole(workload: Workload, one: float, other: float) -> None:
    begin_s, end_s = sorted((one, other))
    inside = [each for each in workload.arrivals if begin_s <= each.at_s < end_s]
    if not inside:
        with pytest.raises(WorkloadError, match="no requests from"):
            changes.window(workload, begin_s, end_s)
        return
    found = changes.window(workload, begin_s, end_s)
    assert [at_s + begin_s for at_s in times(found)] == pytest.approx([each.at_s for each in inside])


@given(workloads("one"), workloads("other"), workloads("one"))
def test_phases_share_prefixes_within_a_source_only(first: Workload, second: Workload, third: Workload) -> None:
    whole = changes.concatenated([WorkloadPhase(first, 1000.0), WorkloadPhase(second, 500.0), WorkloadPhase(third)])
    a, b = len(first.arrivals), len(first.arrivals) + len(second.arrivals)
    parts = (whole.arrivals[:a], whole.arrivals[a:b], whole.arrivals[b:])
    assert [each[0].at_s for each in parts] == [0.0, 1000.0, 1500.0]
    ids = [{block for each in part for block in each.prefix} for part in parts]
    assert not (ids[0] | ids[2]) & ids[1]
    assert [each.prefix for each in parts[2]] == [each.prefix for each in third.arrivals]


def test_phases_that_cannot_follow_one_another() -> None:
    small = Workload("small", (Arrival(5.0, 20, 1, (1, 2)),), block_tokens=16)
    large = Workload("large", (Arrival(0.0, 20, 1, (1,)),))
    with pytest.raises(WorkloadError, match=r"prefix blocks of \[16, 512\] tokens"):
        changes.concatenated([WorkloadPhase(small), WorkloadPhase(large)])
    with pytest.raises(WorkloadError, match="its last request arrives at 5 s, after 4 s"):
        changes.concatenated([WorkloadPhase(small, 4.0), WorkloadPhase(small)])


def test_ticks_are_found_where_requests_share_them() -> None:
    assert changes.tick_s([0.0] * 10 + [3.0] * 12 + [5.999] * 9 + [9.0] * 10) == pytest.approx(3.0)
    assert changes.tick_s([0.0, 0.0, 1.0, 2.0, 3.0, 4.0]) == 0.0
    assert changes.tick_s([0.0] * 10) == 0.0


@pytest.mark.parametrize(
    ("arrival", "problem"),
    [
        (Arrival(-1.0, 1, 1), "it arrives at -1.0 s"),
        (Arrival(float("nan"), 1, 1), "it arrives at nan s"),
        (Arrival(0.0, 0, 1), "1 to 10,000,000 tokens, got 0 and 1"),
        (Arrival(0.0, 1, 10_000_001), "got 1 and 10000001"),
        (Arrival(0.0, 512, 1, (1, 2)), "2 blocks of 512 tokens are more than the prompt of 512 has"),
    ],
)
def test_invalid_requests_are_refused(arrival: Arrival, problem: str) -> None:
    with pytest.raises(WorkloadError, match=f"wrong, request 0: .*{problem}"):
        Workload("wrong", (arrival,))


def test_a_summary_by_hand() -> None:
    arrivals = (
        Arrival(0.0, 1024, 10, (1, 2)),
        Arrival(10.0, 600, 20, (1, 3)),  # block 1 again
        Arrival(70.0, 1024, 30, (1, 2)),  # both, unless 2 had to make room for 3
        Arrival(70.0, 100, 40),
    )
    workload = Workload("by hand", arrivals, notes=("a note",))
    found = summary(workload, (2, None))
    assert (found.requests, found.duration_s, found.rate, found.busiest_minute) == (4, 70.0, 3 / 70, 2)
    assert found.gap_cv == pytest.approx((3 * (10**2 + 60**2) / 70**2 - 1) ** 0.5)
    assert (found.prompt.mean, found.prompt.p50, found.prompt.most) == (687.0, 812.0, 1024)
    assert found.output.p90 == pytest.approx(37.0)
    assert found.reuse == ((2, 1024 / 2748), (None, (512 + 1024) / 2748))
    assert prefix_reuse(workload, 0) == 0.0


def test_a_summary_of_one_request() -> None:
    found = summary(Workload("one", (Arrival(3.0, 5, 7),)))
    assert (found.duration_s, found.rate, found.gap_cv, found.busiest_minute, found.reuse) == (0.0, 0.0, 0.0, 1, ())
