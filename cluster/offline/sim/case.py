"""A cluster to simulate, as values. Imports no simulator, so closed forms that use it start at once."""

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.spec import ClusterSpec
from workers.costs import CostModel
from workers.profiles.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class PoolModel:
    """The simulated workers of one pool. `kv_token_bytes`: of one token, on all ranks of a worker together.

    `call_s`: network seconds of a call to a worker. `idle_ratio`: of a step of prompts on an idle worker, to one among
    others. `shape` is for calls to lenders (None: SmolLM2-135M's) and, with `peak_flops` of a worker, for the MFU.
    """

    cost: CostModel
    kv_token_bytes: int = 46_080
    context_length: int = 1 << 20
    vocab_size: int = 32_000
    call_s: float = 0.0
    shape: ModelShape | None = None
    peak_flops: float = 0.0
    idle_ratio: float = 1.0

    def __post_init__(self) -> None:
        if self.kv_token_bytes < 4 or self.kv_token_bytes % 4:
            raise ValueError(f"kv_token_bytes is {self.kv_token_bytes}; it must be a positive multiple of 4")


@dataclass(frozen=True, slots=True)
class Case:
    """A cluster to simulate. `models` by pool name."""

    name: str
    spec: ClusterSpec
    models: Mapping[str, PoolModel]

    @property
    def gpus(self) -> int:
        return sum(pool.num_ranks for pool in self.spec.pools)
