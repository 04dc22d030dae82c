"""A pool's `cache`: sizes, and one clear error for each wrong combination."""

from typing import Any

import pytest

from cluster.offline.sim.cluster import PoolModel, virtual
from cluster.spec import ClusterSpec, SpecError
from cluster.spec_file import parse_spec
from workers.config import ByteSize, CacheConfig, DiskCacheConfig, RemoteCacheConfig
from workers.costs import LinearCost
from workers.errors import ModelError
from workers.executor.kv_sizing import default_host_cache_blocks, host_cache_blocks

REMOTE = {"url": "redis://cache:6379/0"}
DISK = {"path": "/var/kv", "size": "100GiB"}


def parsed(cache: object, **pool: Any) -> ClusterSpec:
    return parse_spec({"model": "m", "pools": [{"name": "both", "role": "mixed", "cache": cache, **pool}]})


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("8GiB", 8 << 30), ("8Gi", 8 << 30), ("500MB", 500_000_000), ("1.5k", 1500), ("2 TiB", 2 << 40), (4096, 4096)],
)
def test_a_size_is_a_number_of_bytes_or_has_a_unit(text: object, num_bytes: int) -> None:
    assert parsed({"host": text}).pools[0].cache.host == num_bytes


def test_a_pool_has_host_memory_and_a_disk() -> None:
    cache = parsed({"host": "8GiB", "disk": DISK}).pools[0].cache
    assert cache == CacheConfig(ByteSize(8 << 30), DiskCacheConfig("/var/kv", ByteSize(100 << 30)))
    assert parsed({"host": 1, "remote": REMOTE}).pools[0].cache.remote == RemoteCacheConfig("redis://cache:6379/0")


@pytest.mark.parametrize(
    ("cache", "pool", "message"),
    [
        ({"host": "8 gigs"}, {}, r"pools\[0\]\.cache\.host: '8 gigs' is no size; write 8GiB"),
        ({"host": True}, {}, r"pools\[0\]\.cache\.host: True is no size"),
        ({"host": -1}, {}, r"pools\[0\]\.cache\.host: -1 is no size"),
        ({"disk": DISK}, {}, r"pools\[0\]\.cache: disk needs host: .* write host: 8GiB"),
        ({"host": 1, "disk": {"path": "/kv"}}, {}, r"pools\[0\]\.cache\.disk: size is missing"),
        ({"host": 1, "disk": DISK | {"size": 0}}, {}, r"pools\[0\]\.cache\.disk: disk\.size is 0; give"),
        ({"host": 1, "disk": DISK | {"speed": 0}}, {}, r"disk: disk\.speed is 0; write the bytes"),
        ({"host": 1, "disk": DISK | {"path": "kv"}}, {}, r"pools\[0\]\.cache\.disk: disk\.path 'kv' .* begin with /"),
        ({"remote": REMOTE}, {}, r"pools\[0\]\.cache: remote needs host: .* write host: 8GiB"),
        (
            {"host": 1, "remote": {"url": "http://h"}},
            {},
            r"cache\.remote: remote\.url 'http://h' is no server; write redis:",
        ),
        ({"host": 1, "remote": {"url": "redis://:p@h"}}, {}, r"remote\.url has a password, .* put it into a file"),
        ({"host": 1, "remote": REMOTE | {"ca_file": "/ca"}}, {}, r"remote\.ca_file is for TLS; write rediss://"),
        ({"host": 1, "remote": REMOTE | {"speed": 0}}, {}, r"remote\.speed and remote\.size are above 0"),
        ({"ram": 1}, {}, r"pools\[0\]\.cache\.ram: unknown key; known keys here: host, disk, remote, pins"),
        ({"host": "8GiB", "pins": "5GiB"}, {}, r"pools\[0\]\.cache: pins \(.*\) must be at most half of host"),
        ({"host": 1}, {"engine": {"prefix_caching": False}}, r"cache keeps .* engine\.prefix_caching is off"),
    ],
)
def test_wrong_settings_are_one_error_that_says_what_to_write(
    cache: object, pool: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        parsed(cache, **pool)


def test_a_simulation_has_the_same_tiers() -> None:
    spec, models = (
        parsed({"host": "8GiB", "disk": DISK | {"speed": "3GB"}}),
        {"both": PoolModel(LinearCost())},
    )
    cache = virtual(spec, models).pools[0].cache
    assert cache.host == 8 << 30 and cache.disk is not None and cache.disk.speed == 3_000_000_000


def test_a_gpus_host_cache_is_an_eighth_of_the_free_memory_or_its_pool() -> None:
    assert default_host_cache_blocks(free_bytes=80_999, block_bytes=1000, kv_blocks=50) == 10
    assert default_host_cache_blocks(free_bytes=800_000, block_bytes=1000, kv_blocks=50) == 50
    assert default_host_cache_blocks(free_bytes=7_999, block_bytes=1000, kv_blocks=50) == 0


def test_host_memory_is_counted_in_whole_blocks_and_holds_at_least_one() -> None:
    assert host_cache_blocks(CacheConfig(), 1000) == 0
    assert host_cache_blocks(CacheConfig(ByteSize(2999)), 1000) == 2
    with pytest.raises(ModelError, match=r"cache\.host is 999 bytes, but a block of KV takes 1000; raise it"):
        host_cache_blocks(CacheConfig(ByteSize(999)), 1000)
