"""What promises mean to an engine: whether one more may decode, and whose prompt is next. Pure."""

import math
from collections.abc import Iterable
from collections.abc import Sequence as Items

from workers.config import EngineConfig
from workers.costs import CostModel
from workers.engine.sequence import Sequence
from workers.request import Request


def slot_refusal(cost: CostModel, decoding: Items[Sequence], newcomer: Request, depth: int = 1) -> str:
    """Why no slot is left for one more beside those that decode or were promised a slot; empty: one is.

    With it a step must take no longer than was promised to any of them, or to it. Promises that a step for that request
    alone would break bind nobody, an empty worker takes everybody, and any worker an answer that was lost half way on
    another. Of `depth` steps in flight each has an equal part of the decodes.
    """
    if newcomer.generated and not newcomer.leg:
        return ""
    batch = -(-(len(decoding) + 1) // depth)
    context_tokens = sum(len(each.tokens) for each in decoding) + newcomer.num_tokens
    step_s = cost.decode_seconds(batch, context_tokens // depth)
    for request in (newcomer, *(each.request for each in decoding)):
        tpot_s = request.slo.tpot_s
        if tpot_s is None or not request.slo.promised or step_s <= tpot_s:
            continue
        if cost.decode_seconds(1, request.num_tokens) <= tpot_s:
            why = f"a step for {len(decoding) + 1} would take {step_s:.3g} s"
            return f"{why}, {request.key} was promised {tpot_s:.3g} s"
    return ""


def next_prompt(candidates: Iterable[Sequence], config: EngineConfig, cost: CostModel, now_s: float) -> Sequence:
    """The first of them in `prompt_order`, by windows of arrivals: nobody is overtaken by more than one window.

    "deadline": lower priority first, then the earliest deadline of a first token; behind these, prompts that can no
    longer make it, then those without a deadline. Raises ValueError when there are none.
    """
    window = config.prompt_window
    if config.prompt_order == "deadline":
        return min(candidates, key=lambda each: (each.number // window, *_urgency(each, cost, now_s), each.number))
    sign = 1 if config.prompt_order == "sjf" else -1
    return min(candidates, key=lambda each: (each.number // window, sign * len(each.tokens), each.number))


def _urgency(sequence: Sequence, cost: CostModel, now_s: float) -> tuple[int, int, float]:
    slo = sequence.request.slo
    if slo.ttft_s is None:
        return slo.priority, 2, math.inf
    deadline_s = sequence.arrival_s - sequence.request.waited_s + slo.ttft_s
    left = len(sequence.tokens) - sequence.num_computed
    is_late = now_s + cost.prefill_seconds(left, sequence.num_computed) > deadline_s
    return slo.priority, int(is_late), deadline_s
