"""Loaded public traces have figures that were computed independently."""

import pytest

from cluster.offline.workload.arrivals import Workload
from cluster.offline.workload.load import load_workload
from tests.offline.workload.summary import LengthSummary, prefix_reuse, summary
from tests.shared import shared

# file -> requests, seconds, requests/s, gap CV, busiest minute, prompts, answers
FIGURES = {
    "azure2023/AzureLLMInferenceTrace_code.csv.gz": (
        *(8_819, 3_435.9, 2.567, 13.15, 632),
        *(LengthSummary(2047.8, 1469, 5188, 7436, 7437), LengthSummary(27.9, 13, 55, 251, 1899)),
    ),
    "azure2023/AzureLLMInferenceTrace_conv.csv.gz": (
        *(19_366, 3_501.7, 5.530, 1.09, 507),
        *(LengthSummary(1154.7, 1020, 2734, 4142, 14050), LengthSummary(211.1, 129, 424, 601, 1000)),
    ),
    "mooncake/conversation_trace.jsonl.gz": (
        *(12_031, 3_537.0, 3.401, 3.03, None),
        *(LengthSummary(12035.1, 6909, 27367, 85400, 126195), LengthSummary(342.6, 350, 597, 1119, 2000)),
    ),
}
REUSE = {1_000: 4.5, 5_860: 13.8, 10_000: 21.5, 30_000: 33.2, 50_000: 36.2, 100_000: 37.1, None: 37.4}  # blocks -> %


@pytest.fixture(name="conversations", scope="module")
def _conversations() -> Workload:
    return load_workload(f"{shared('traces/mooncake/conversation_trace.jsonl.gz')}:jitter=off")


@pytest.mark.parametrize("path", FIGURES)
def test_a_trace_has_its_published_figures(path: str) -> None:
    requests, seconds, rate, cv, busiest, prompt, output = FIGURES[path]
    found = summary(load_workload(f"{shared(f'traces/{path}')}:jitter=off"))
    assert found.requests == requests
    assert found.duration_s == pytest.approx(seconds, abs=0.06)
    assert found.requests / found.duration_s == pytest.approx(rate, abs=0.0006)
    assert found.gap_cv == pytest.approx(cv, abs=0.006)
    assert busiest is None or found.busiest_minute == busiest
    for here, there in ((found.prompt, prompt), (found.output, output)):
        assert here.mean == pytest.approx(there.mean, abs=0.06)
        assert [round(each) for each in (here.p50, here.p90, here.p99, here.most)] == [
            *(there.p50, there.p90, there.p99, there.most)
        ]


@pytest.mark.parametrize(("capacity", "percent"), REUSE.items())
def test_mooncake_conversations_reuse_their_published_shares(
    conversations: Workload, capacity: int | None, percent: float
) -> None:
    assert 100 * prefix_reuse(conversations, capacity) == pytest.approx(percent, abs=0.06)


def test_mooncake_jitter_takes_the_bursts_out_and_keeps_the_order(conversations: Workload) -> None:
    spread = load_workload(str(shared("traces/mooncake/conversation_trace.jsonl.gz")))
    assert "spread evenly inside ticks of 3 s" in spread.notes[0]
    assert [each.prefix for each in spread.arrivals] == [each.prefix for each in conversations.arrivals]
    assert summary(spread).gap_cv == pytest.approx(1.0, abs=0.05)
    pairs = zip(spread.arrivals, conversations.arrivals, strict=True)
    assert all(raw.at_s <= moved.at_s <= raw.at_s + 3.0 for moved, raw in pairs)
