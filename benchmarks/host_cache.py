"""Hit rates of the host cache on Mooncake's conversation trace, beside one LRU list of the same size.

    python -m benchmarks.host_cache

One cache for all requests, one after another; hits are the tokens of a prompt's cached prefix. Takes half a minute.
"""

from collections import OrderedDict
from collections.abc import Iterable

from benchmarks.elastic.scenarios import MOONCAKE, shared
from cluster.offline.workload.arrivals import Arrival, Workload
from cluster.offline.workload.load import load_workload
from workers.engine.host_cache import HostCache
from workers.engine.kv_event_log import KVEventLog

SIZES = (1000, 3000, 5860, 10_000, 30_000, 50_000, 100_000)  # blocks of 512 tokens


def host_cache_hits(workload: Workload, num_blocks: int) -> float:
    """The share of all prompt tokens that a `HostCache` of this many blocks has."""
    cache = HostCache(num_blocks, KVEventLog(128))

    def found(hashes: list[bytes]) -> int:
        hits = len(cache.match(hashes))
        for block_hash in reversed(hashes[hits:]):
            if block_hash not in cache:
                cache.save(block_hash, None, ())
        return hits

    return _share(workload, (found([b"%d" % each for each in arrival.prefix]) for arrival in workload.arrivals))


def lru_hits(workload: Workload, num_blocks: int) -> float:
    """The same of one list, whose least recently used block is evicted."""
    known: OrderedDict[int, None] = OrderedDict()

    def found(hashes: tuple[int, ...]) -> int:
        hits = next((index for index, block_hash in enumerate(hashes) if block_hash not in known), len(hashes))
        for block_hash in reversed(hashes):
            known.pop(block_hash, None)
            known[block_hash] = None
        while len(known) > num_blocks:
            known.popitem(last=False)
        return hits

    return _share(workload, (found(arrival.prefix) for arrival in workload.arrivals))


def _share(workload: Workload, hits: Iterable[int]) -> float:
    def tokens(arrival: Arrival, blocks: int) -> int:
        return min(blocks * workload.block_tokens, arrival.prompt_tokens)

    found = sum(tokens(*each) for each in zip(workload.arrivals, hits, strict=True))
    return found / sum(each.prompt_tokens for each in workload.arrivals)


def main() -> None:
    workload = load_workload(f"{shared(MOONCAKE)}:jitter=off", seed=0)
    print("blocks of 512 tokens   one LRU list   host cache")
    for size in SIZES:
        print(f"{size:>20,}   {lru_hits(workload, size):>12.1%}   {host_cache_hits(workload, size):>10.1%}", flush=True)


if __name__ == "__main__":
    main()
