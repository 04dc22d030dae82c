"""The host cache against one LRU list, on the first requests of a public trace."""

import pytest

from benchmarks.host_cache import host_cache_hits, lru_hits
from cluster.offline.workload.load import load_workload
from tests.offline.workload.summary import prefix_reuse
from tests.shared import shared


@pytest.mark.parametrize("num_blocks", [1000, 5860])
def test_the_host_cache_has_at_least_the_hits_of_one_lru_list(num_blocks: int) -> None:
    workload = load_workload(f"{shared('traces/mooncake/conversation_trace.jsonl.gz')}:first=3000,jitter=off", seed=0)
    lru = lru_hits(workload, num_blocks)
    assert lru == pytest.approx(prefix_reuse(workload, num_blocks), abs=0.001)
    assert host_cache_hits(workload, num_blocks) >= lru
