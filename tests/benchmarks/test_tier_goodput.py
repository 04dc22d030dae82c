"""What each tier of a simulated worker finds of a public trace, against an independent replay."""

import pytest

from benchmarks.tier_goodput import one_after_another, one_worker
from cluster.offline.workload.load import load_workload
from tests.offline.workload.summary import prefix_reuse
from tests.shared import shared

TRACE = "traces/mooncake/conversation_trace.jsonl.gz"


@pytest.mark.parametrize(("tier", "margin"), [("device", 0.001), ("host", 0.02), ("disk", 0.02)])
def test_a_workers_tier_finds_what_one_lru_list_of_its_size_finds(tier: str, margin: float) -> None:
    """The tiers before it have 300 blocks at least, which the list does not count."""
    workload = one_after_another(load_workload(f"{shared(TRACE)}:first=120,jitter=off"))
    assert one_worker(workload, tier, 900) == pytest.approx(prefix_reuse(workload, 900), abs=margin)
