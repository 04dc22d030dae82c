"""The schema: stubs are fresh, and every type survives the trip over the wire."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from generate_stubs import ROOT, generate
from hypothesis import given
from hypothesis import strategies as st

from cluster.events import Accepted, AnswerEnd, Completed, Queued
from cluster.frontend.text import TextDelta, TextEvent
from cluster.observe.ledger import PHASES, LatencyLedger
from diptych.messages import event_message, events_from
from kvtransfer.ticket import TransferReport
from workers.request import FinishReason, TokenLogprobs

COUNT = st.integers(0, 2**32 - 1)
SECONDS = st.integers(0, 10**13).map(lambda ns: ns / 1e9)
REAL = st.floats(allow_nan=False, allow_infinity=False)
PARTS = st.lists(st.tuples(st.sampled_from(PHASES), st.integers(0, 10**15)), max_size=5).map(tuple)
LOGPROBS = st.builds(TokenLogprobs, REAL, st.lists(st.tuples(COUNT, REAL), max_size=3).map(tuple))
WORD = st.text(max_size=12)
WORDS = st.lists(WORD, max_size=3).map(tuple)
TRANSFERS = st.builds(
    TransferReport, WORD, WORD, WORD, COUNT, COUNT, COUNT, COUNT, COUNT, COUNT, SECONDS, SECONDS, SECONDS
)
TOKENS = st.lists(COUNT, max_size=5).map(tuple)
SEVERAL_LOGPROBS = st.lists(LOGPROBS, max_size=3).map(tuple)
LEDGERS = st.builds(LatencyLedger, PARTS, PARTS, st.integers(0, 10**15), st.integers(0, 10**15))
ENDS = st.builds(AnswerEnd, st.sampled_from(FinishReason), COUNT, COUNT, LEDGERS, st.none() | REAL, WORDS)
EVENTS = st.one_of(
    st.builds(Queued, WORD, COUNT, SECONDS, SECONDS, WORD, COUNT),
    st.builds(Accepted, WORD, COUNT, COUNT, WORD, WORD, WORD, st.none() | SECONDS, st.none() | SECONDS, COUNT),
    st.builds(TextDelta, WORD, TOKENS, COUNT, SEVERAL_LOGPROBS, SEVERAL_LOGPROBS, COUNT),
    st.builds(
        Completed,
        st.sampled_from(FinishReason),
        COUNT,
        COUNT,
        COUNT,
        COUNT,
        LEDGERS,
        st.lists(TRANSFERS, max_size=2).map(tuple),
        st.lists(ENDS, max_size=2).map(tuple),
        WORDS,
    ),
)


@given(EVENTS)
def test_events_survive_encoding(event: TextEvent) -> None:
    message = event_message(event)
    assert events_from(type(message).FromString(message.SerializeToString())) == [event]


def test_committed_stubs_match_the_schema(tmp_path: Path) -> None:
    if find_spec("grpc_tools") is None:  # looked for, not loaded: see generate_stubs
        pytest.skip("grpcio-tools is not installed")
    made = generate(tmp_path)
    committed = sorted(ROOT.glob("diptych/v1/*_pb2*.py*"))
    assert [path.name for path in made] == [path.name for path in committed]
    for fresh, old in zip(made, committed, strict=True):
        assert fresh.read_text() == old.read_text(), f"{old.name} is stale; run python proto/generate_stubs.py"
