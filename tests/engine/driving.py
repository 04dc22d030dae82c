"""Drives an Engine without any device: a step's token is a pure function of (request, position)."""

from workers.config import EngineConfig
from workers.engine.engine import Engine, Told
from workers.engine.step import StepPlan, StepResult
from workers.request import Request, SamplingParams

VOCAB = 1000
EOS = 0


def engine(**config: int | bool) -> Engine:
    sizes: dict[str, int | bool] = {"block_size": 4, "kv_blocks": 34, "max_batch_tokens": 16, "max_running": 8}
    return Engine(
        EngineConfig(**(sizes | config)),  # type: ignore[arg-type]
        context_length=128,
        eos_token_ids=(EOS,),
        vocab_size=VOCAB,
        lease_s=10.0,
        reserved=2,
    )


def request(name: str, prompt: tuple[int, ...], *, max_tokens: int = 8, **fields: object) -> Request:
    sampling = SamplingParams(temperature=0.0, seed=1, max_tokens=max_tokens)
    return Request(name, prompt, sampling, reply_to="test", **fields)  # type: ignore[arg-type]


def next_token(key: str, position: int) -> int:
    return 1 + (sum(map(ord, key)) * 31 + position * 7) % (VOCAB - 1)


def result(plan: StepPlan) -> StepResult:
    tokens = tuple(next_token(c.key, c.draw.position) if c.draw else None for c in plan.chunks)
    digests = (tuple(block * 1000 for block in plan.digest_blocks),)
    return StepResult(plan.number, tokens, tuple(None for _ in tokens), digests, 0.01)


def step(engine: Engine, now_s: float = 0.0) -> tuple[StepPlan | None, list[Told]]:
    """One schedule and commit; the plan and all that was told."""
    plan = engine.schedule(now_s)
    if plan is not None:
        engine.commit(plan, result(plan), now_s)
    engine.check()
    return plan, engine.drain()
