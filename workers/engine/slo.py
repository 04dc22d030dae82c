"""SLO decisions of an engine: whether one more sequence may decode, and which prompt is next. Pure."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items

from workers.config import EngineConfig
from workers.engine.estimate import StepEstimate
from workers.engine.sequence import Sequence
from workers.request import Request


def slot_refusal(estimate: StepEstimate, decoding: Items[Sequence], newcomer: Request, depth: int = 1) -> str:
    """Why no decode slot is free beside the `decoding` sequences; empty: one is free.

    With the newcomer, a step must stay within the TPOT SLO of every request. An SLO that its request would miss even
    alone does not count, so an empty worker takes any request. Every worker takes an answer that was interrupted
    elsewhere. Each of `depth` steps in flight has an equal part of the decodes.
    """
    if newcomer.generated and not newcomer.num_moves:
        return ""
    requests = [newcomer, *[each.request for each in decoding]]
    bounds = [(each, each.slo.tpot_s) for each in requests if each.slo.is_enforced and each.slo.tpot_s is not None]
    if not bounds:
        return ""
    batch, cost = -(-len(requests) // depth), estimate.cost
    context_tokens = sum(len(each.tokens) for each in decoding) + newcomer.num_tokens
    step_s = cost.decode_seconds(batch, context_tokens // depth)
    for request, tpot_s in bounds:
        if step_s <= tpot_s:
            continue
        if cost.decode_seconds(1, request.num_tokens) <= tpot_s:
            why = f"a step for {len(decoding) + 1} would take {step_s:.3g} s"
            return f"{why}, the TPOT SLO of {request.key} is {tpot_s:.3g} s"
    return ""


def next_prompt(
    candidates: Iterable[Sequence], config: EngineConfig, prompt_seconds: Callable[[int, int], float], now_s: float
) -> Sequence:
    """The first by deadline among candidates less than `prompt_window` arrivals after the oldest.

    Lowest priority number first. Among equals the earliest TTFT deadline of those that can still be met
    (Jackson, 1955), then prompts that are late in any case, then prompts without a deadline. It makes no prompt late to
    save others: admission control bounds how many wait. `prompt_seconds(tokens, computed)` is the time to compute
    `tokens` after `computed` ones. Raises ValueError without candidates.
    """
    waiting = list(candidates)
    behind = min(each.number for each in waiting) + config.prompt_window
    able = [each for each in waiting if each.number < behind]

    def order(each: Sequence) -> tuple[int, int, float, int]:
        slo = each.request.slo
        if slo.ttft_s is None:
            return slo.priority, 2, 0.0, each.number
        due_s = each.arrival_s - each.request.waited_s + slo.ttft_s
        seconds = prompt_seconds(len(each.tokens) - each.num_computed, each.num_computed)
        return slo.priority, int(now_s + seconds > due_s), due_s, each.number

    return min(able, key=order)
