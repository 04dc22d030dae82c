"""How many KV blocks a rank allocates when `engine.kv_blocks` is not set: bytes in, blocks out. Pure.

    GPU    gpu_memory_utilization of its memory, less weights, the largest step and CUDA graphs, and at most that share
           of the free memory
    CPU    the same share of the host's memory, divided among the cluster's ranks, and at most HOST_SHARE of the free
           memory, divided likewise; no more than `max_running` requests of the longest length use

Each rank of a gang proposes a number; all take the smallest.
"""

from dataclasses import dataclass

from workers.config import CacheConfig, EngineConfig
from workers.errors import ModelError

HOST_CACHE_SHARE = 1 / 8  # of the host's free memory, for a GPU without `cache.host`: hosts have up to eight
SPARE = 0.1  # of free memory, left by any pool for activations, the interpreter and the rest of the machine
HOST_SHARE = 0.4  # of the host's free memory; the rest is for activations, staging, page cache and other programs
GIB = 2**30


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a rank's device after its weights are loaded. `step_bytes`: peak of a step's activations; `graph_bytes`:
    what CUDA graphs will take.
    """

    total_bytes: int
    free_bytes: int
    weight_bytes: int
    step_bytes: int = 0
    graph_bytes: int = 0

    def kv_bytes(self, utilization: float, part: float, *, is_host: bool) -> int:
        """What KV blocks may take. `part`: this rank's share of the device, above 0 and at most 1."""
        of_all = utilization * part * self.total_bytes - self.weight_bytes
        of_free = (HOST_SHARE * part if is_host else utilization) * self.free_bytes
        return max(0, int(min(of_all, of_free)) - self.step_bytes - self.graph_bytes)


def spare_share(utilization: float, *, is_host: bool) -> float:
    """The share of a device's free memory that a pool must leave; a GPU's utilization says how much may be used."""
    return SPARE if is_host else min(SPARE, 1 - utilization)


def host_cache_blocks(cache: CacheConfig, block_bytes: int) -> int:
    """Blocks of the host cache as configured. `block_bytes`: of a block on all ranks. Raises `ModelError` if not even
    one fits.
    """
    host = cache.host or 0
    for name, num_bytes in (("host", host), ("pins", cache.pins)):
        if 0 < num_bytes < block_bytes:
            raise ModelError(
                f"cache.{name} is {num_bytes} bytes, but a block of KV takes {block_bytes}; raise it, or leave it out"
            )
    return host // block_bytes


def default_host_cache_blocks(free_bytes: int, block_bytes: int, kv_blocks: int) -> int:
    """Blocks of a GPU's host cache without `cache.host`. `free_bytes`: of the host; `block_bytes`: of one rank."""
    return min(kv_blocks, int(HOST_CACHE_SHARE * free_bytes) // block_bytes)


def blocks_in_use(engine: EngineConfig, context_length: int) -> int:
    """Blocks of `max_running` requests of the longest length; more would only enlarge the prefix cache."""
    return engine.max_running * blocks_of_one(engine, context_length)


def blocks_of_one(engine: EngineConfig, context_length: int) -> int:
    """Blocks of one request of the longest length."""
    return -(-longest_context(engine, context_length) // engine.block_size)


def longest_context(engine: EngineConfig, context_length: int) -> int:
    """Tokens of the longest sequence that the configuration and the model allow."""
    return min(context_length, engine.max_model_len or context_length)


def check_blocks(blocks: int, engine: EngineConfig, context_length: int, block_bytes: int, device: str) -> None:
    """`blocks`: without those of preflight. Raises `ModelError` if `max_model_len`, or a single block, does not fit.

    Without `max_model_len` a smaller pool shortens the longest request, as a small `kv_blocks` does.
    """
    least = blocks_of_one(engine, context_length) if engine.max_model_len else 1
    if blocks >= least:
        return
    what = f"one request of engine.max_model_len {engine.max_model_len}" if engine.max_model_len else "a KV block"
    raise ModelError(
        f"{what} needs {least * block_bytes / GIB:.3g} GiB of KV on {device}, but after weights and activations there "
        f"is room for {max(0, blocks) * block_bytes / GIB:.3g} GiB; lower engine.max_model_len, raise "
        "engine.gpu_memory_utilization (GPU), take engine.dtype bfloat16, int8 or fp8, or set engine.kv_blocks yourself"
    )
