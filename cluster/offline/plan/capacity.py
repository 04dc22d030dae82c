"""What a pool could serve were it never idle, from costs alone: where a search begins, and what bounds it. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.offline.workload.arrivals import Arrival
from cluster.spec import PoolSpec, Role
from workers.costs import CostModel

LEAST_CHUNK = 16  # prompt tokens beside decodes


@dataclass(frozen=True, slots=True)
class Capacity:
    """Requests a second of the mean request: what is likely, and what no order of steps exceeds."""

    usual: float
    most: float


def capacity(pool: PoolSpec, cost: CostModel, arrivals: Sequence[Arrival], tpot_s: float | None) -> Capacity:
    """Prompts in full steps, decodes in the largest batch that fits and keeps TPOT.

    A worker of both phases hides the shorter one behind the longer at best; usually a step holds as many decodes for
    its prompt tokens as requests have output for theirs.
    """
    engine = pool.engine
    prompt = round(sum(each.prompt_tokens for each in arrivals) / len(arrivals))
    output = sum(each.output_tokens for each in arrivals) / len(arrivals)
    context = prompt + round(output / 2)
    stages = pool.replicas * pool.parallel.pipeline
    prefill_s = decode_s = 0.0
    if pool.role is not Role.DECODE:
        together = max(1, engine.max_batch_tokens // prompt)
        prefill_s = cost.mixed_seconds(((prompt, 0),) * together, 0, 0) / together
    if pool.role is Role.PREFILL or output <= 1:
        return _same(stages / max(prefill_s, 1e-9))
    most = max(1, min(engine.max_running, engine.kv_blocks * engine.block_size // context))
    batch = _largest_batch(cost, most, context, tpot_s)
    decode_s = output * cost.decode_seconds(batch, batch * context) / batch
    bound = stages / max(prefill_s, decode_s, 1e-9)
    if pool.role is Role.DECODE:
        return _same(bound)
    usual = stages * _fused(cost, prompt, output, context, engine.max_batch_tokens, most, tpot_s)
    return Capacity(min(usual, bound), bound)


def _same(rate: float) -> Capacity:
    return Capacity(rate, rate)


def _largest_batch(cost: CostModel, most: int, context: int, tpot_s: float | None) -> int:
    if tpot_s is None:
        return most
    least, above = 1, most + 1
    while above - least > 1:
        middle = (least + above) // 2
        within = cost.decode_seconds(middle, middle * context) <= tpot_s
        least, above = (middle, above) if within else (least, middle)
    return least


def _fused(
    cost: CostModel, prompt: int, output: float, context: int, tokens: int, most: int, tpot_s: float | None
) -> float:
    """With the chunk that serves most of those whose steps keep TPOT; the smallest one when none does."""
    rate, chunk = 0.0, tokens
    while chunk >= LEAST_CHUNK:
        batch = max(1, min(most, round(chunk * output / prompt)))
        step_s = cost.mixed_seconds(((min(chunk, prompt), prompt // 2),), batch, batch * context)
        served = min(min(chunk, prompt) / prompt, batch / output) / step_s
        if tpot_s is None or step_s <= tpot_s:
            rate = max(rate, served)
        chunk //= 2
    return rate or served
