"""Embeddings of prompts: how a model pools, and the vector made of the parts that workers send. Knows no request."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cluster.spec import ClusterSpec
from workers.errors import InvalidRequest, ModelError


@dataclass(frozen=True, slots=True)
class PromptEmbedding:
    """A vector of length 1. `num_tokens`: of its prompt."""

    vector: NDArray[np.float32]
    num_tokens: int

    @classmethod
    def of(cls, parts: Sequence[bytes], num_summed: int, num_tokens: int) -> "PromptEmbedding":
        """`parts`: of a sum of `num_summed` hidden states."""
        mean = np.sum([np.frombuffer(part, np.float32) for part in parts], axis=0) / num_summed
        return cls(_normalized(mean), num_tokens)

    def cut(self, dimensions: int | None) -> "PromptEmbedding":
        """The first `dimensions` of it, of length 1 again. Raises `InvalidRequest`."""
        if dimensions is None:
            return self
        if not 1 <= dimensions <= len(self.vector):
            raise InvalidRequest("dimensions", f"is {dimensions}; this model's embeddings have {len(self.vector)}")
        return PromptEmbedding(_normalized(self.vector[:dimensions]), self.num_tokens)


def _normalized(vector: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
    return (vector / max(float(np.linalg.norm(vector)), 1e-12)).astype(np.float32)


async def pooling_of(spec: ClusterSpec) -> Literal["last", "mean"]:
    """Of the specification of one model. Raises `InvalidRequest` if it makes no embeddings."""
    found = spec.gateway.pooling
    if found == "auto":
        found = await asyncio.to_thread(_folder_pooling, spec.model)
    if found not in ("last", "mean") or spec.executor != "torch":
        why = "its folder does not say that it is an embedding model"
        raise InvalidRequest("model", f"makes no embeddings: {why}; serve it with gateway.pooling: mean, or last")
    return "last" if found == "last" else "mean"


async def makes_embeddings(spec: ClusterSpec) -> bool:
    """False where this gateway's host does not have the model."""
    with suppress(InvalidRequest, ModelError):
        return bool(await pooling_of(spec))
    return False


@lru_cache(maxsize=8)
def _folder_pooling(model: str) -> str:
    from workers.model.store import read_pooling, resolve

    return read_pooling(resolve(model).path)
