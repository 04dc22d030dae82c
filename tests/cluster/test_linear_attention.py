"""Workers whose blocks hold the state of linear attention: what they refuse, and that digests cover the state."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvtransfer.errors import PeerRefused
from kvtransfer.open import SharedMemory
from kvtransfer.transport import PullOrder, Read
from tests.cluster.pairs import Legs, colocated, parallel_worker
from tests.model.families import write_family
from workers.config import EngineConfig, ParallelConfig
from workers.errors import InvalidRequest
from workers.request import Request, SamplingParams

ENGINE = EngineConfig(block_size=8, kv_blocks=64, max_batch_tokens=24, max_running=8)
GREEDY = SamplingParams(temperature=0.0, seed=1, max_tokens=9, ignore_eos=True)


async def test_blocks_of_another_size_and_borrowed_memory_are_refused(tmp_path: Path) -> None:
    model = str(write_family(tmp_path / "m", "qwen 3.5"))
    sizes = (8, 8, 12)
    made = [
        await parallel_worker(f"w{at}", model, ParallelConfig(), replace(ENGINE, block_size=size), SharedMemory())
        for at, size in enumerate(sizes)
    ]
    try:
        first, second, other = made
        with pytest.raises(PeerRefused, match=r"ours 12 in float32.*need the same engine\.block_size"):
            await other.connect((await first.info()).peer)
        request = Request("r", tuple(range(3, 40)), GREEDY, reply_to="t")
        with pytest.raises(InvalidRequest, match="linear attention cannot borrow other workers' memory"):
            await first.generate(request, ((await second.info()).peer,))
    finally:
        for worker in made:
            await worker.close()


@pytest.mark.parametrize("length", [3, 16, 21])
async def test_state_that_changes_on_its_way_is_found(tmp_path: Path, length: int) -> None:
    """One bit of a state in the prompt's last block, behind its last token: the digest does not match."""
    model, shared = str(write_family(tmp_path / "m", "qwen 3.5")), SharedMemory()
    owner, reader = [await parallel_worker(name, model, ParallelConfig(), ENGINE, shared) for name in ("a", "b")]
    try:
        prompt = tuple(range(3, 3 + length))
        wanted = await colocated(owner, [Request("c", prompt, GREEDY)])
        assert [each.tokens for each in await Legs(owner, reader).run([Request("r", prompt, GREEDY)])] == wanted
        read = reader._executor.pull

        def damaged(order: PullOrder) -> Read:
            region = owner._executor._pool.region  # type: ignore[attr-defined]
            layout, block = region.layout, order.source_blocks[-1]
            end = block * layout.block_bytes + (layout.state_layers[0] + 1) * layout.cell_bytes
            region.bytes()[end - 1] ^= 1
            return read(order)

        reader._executor.pull = damaged
        with pytest.raises(AssertionError, match="arrived with digest"):
            await Legs(owner, reader).run([Request("again", (*prompt[1:], 300), GREEDY)])
    finally:
        await owner.close()
        await reader.close()
