"""A gang in one process for tests: each rank is a thread, and they meet over a store in memory."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from tests.model.paging import next_tokens, ragged
from workers.config import ParallelConfig
from workers.executor.kv_pool import KVPool
from workers.model.decoder import Decoder
from workers.ops.collective import StageLink, TensorGroup, open_groups

T = TypeVar("T")
Act = Callable[[int, TensorGroup | None, StageLink | None], T]
TIMEOUT_S = 30.0


def on_all_ranks(parallel: ParallelConfig, act: Act[T], timeout_s: float = TIMEOUT_S) -> list[T]:
    """The results of `act` on each rank; closes its groups. Raises the first failed rank's error."""
    store = HashStore()

    def rank(number: int) -> T:
        group, link = open_groups(store, parallel, number, torch.device("cpu"), "127.0.0.1", timeout_s)
        try:
            return act(number, group, link)
        finally:
            for each in (group, link):
                if each is not None:
                    each.close()

    with ThreadPoolExecutor(parallel.world_size) as threads:
        answers = [threads.submit(rank, number) for number in range(parallel.world_size)]
        return [answer.result() for answer in answers]


@torch.inference_mode()
def run_stage(
    model: Decoder,
    link: StageLink | None,
    pool: KVPool,
    prompts: list[list[int]],
    tables: list[list[int]],
    steps: list[list[tuple[int, int]]],
) -> list[Tensor | None]:
    """As `paging.run_chunks` on one rank of a gang: each step's logits [tokens, vocab], on the rank that has them."""
    done = [0] * len(prompts)
    answers: list[Tensor | None] = []
    for step in steps:
        tokens, positions = next_tokens(prompts, done, step)
        batch = ragged(
            [tables[prompt] for prompt, _ in step],
            [length for _, length in step],
            [done[prompt] for prompt, _ in step],
            pool.region.layout.block_size,
        )
        shape = (len(tokens), model.config.hidden_size)
        if model.embedding is not None:
            x = model.embed(torch.tensor(tokens))
        else:
            assert link is not None
            x = link.receive(shape, model.dtype, model.device)
        x = model.run(x, torch.tensor(positions), torch.arange(len(tokens)), batch, pool.blocks)
        if model.head is not None:
            answers.append(model.logits(x))
        else:
            assert link is not None
            link.send(x)
    if link is not None:
        link.flush()
    return answers
