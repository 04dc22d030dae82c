"""What a gateway remembers survives the wire, in pages that a message can carry."""

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.observe.history import MAX_TEXT_CHARS
from cluster.observe.ledger import PHASES, LatencyLedger
from diptych.history import ClusterEvent, Load, Recent, RequestTrace, Traffic, Window
from diptych.status import PAGE_TRACES, ClusterStatus, trace_pages, window_from
from diptych.v1 import admin_pb2
from diptych.view import ClusterView
from diptych.wire import MAX_MESSAGE_BYTES

COUNT, WORD, NS = st.integers(0, 2**31), st.text(max_size=9), st.integers(0, 2**60)
PARTS = st.lists(st.tuples(st.sampled_from(PHASES), NS), max_size=3).map(tuple)
LEDGERS = st.builds(LatencyLedger, PARTS, PARTS, NS, NS)
MOVES = st.lists(st.tuples(NS, WORD), max_size=2).map(tuple)
WORDS, COUNTS = (WORD,) * 4, (COUNT,) * 4
TRAILS = st.builds(RequestTrace, *WORDS, NS, LEDGERS, WORD, NS, *COUNTS, WORD, WORD, MOVES, COUNT, NS)
HAPPENINGS = st.builds(ClusterEvent, NS, WORD, WORD, WORD, WORD)
LOADS = st.builds(Load, NS, WORD, *COUNTS)
WINDOWS = st.builds(Window, *(st.lists(each, max_size=3).map(tuple) for each in (TRAILS, HAPPENINGS, LOADS)), NS)
TRAFFIC = st.builds(Traffic, *(COUNT,) * 6, st.integers(0, 2**40).map(lambda ns: ns / 1e9), WORD, NS)
AGED = st.tuples(st.integers(0, 10**6).map(float), st.builds(ClusterEvent, st.just(0), WORD, WORD, WORD, WORD))
RECENTS = st.builds(
    Recent,
    st.integers(0, 10**6).map(float),
    st.lists(st.tuples(WORD, TRAFFIC), max_size=3).map(tuple),
    st.lists(AGED, max_size=3).map(tuple),
)


@settings(deadline=None, max_examples=30)
@given(WINDOWS)
def test_windows_survive_encoding(window: Window) -> None:
    sent = [page.SerializeToString() for page in trace_pages(window, "gateway-0")]
    assert window_from(map(admin_pb2.TracePage.FromString, sent)) == window


@settings(deadline=None, max_examples=30)
@given(RECENTS)
def test_recent_events_survive_encoding(recent: Recent) -> None:
    status = ClusterStatus(ClusterView(1, "llm", None, ()), "gateway-0", 1, 8, recent=recent)
    message = admin_pb2.GetClusterResponse.FromString(status.message().SerializeToString())
    assert ClusterStatus.read(message) == status


def test_pages_are_small_and_in_order() -> None:
    long = "x" * MAX_TEXT_CHARS
    ledger = LatencyLedger(tuple((phase, 10**12) for phase in PHASES), (), 0, 0)
    traces = tuple(
        RequestTrace(str(n), long, "failed", long, n, ledger, "decode", 0, 1, 1, 1, 1, long, long) for n in range(1000)
    )
    window = Window(traces, tuple(ClusterEvent(n, "flip", "", long) for n in range(10)), (), 100)
    made = list(trace_pages(window.shifted(5), "gateway-0"))
    assert len(made) == -(-1000 // PAGE_TRACES) and all(page.gateway == "gateway-0" for page in made)
    assert max(page.ByteSize() for page in made) < MAX_MESSAGE_BYTES / 64
    assert [trace.arrived_ns for trace in window_from(made).traces] == [n + 5 for n in range(1000)]
    assert window_from(made).whole_ns == 105
    (empty,) = trace_pages(Window().shifted(5), "gateway-0")
    assert window_from([empty]).whole_ns == 0
