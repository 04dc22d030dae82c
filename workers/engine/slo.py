"""SLO decisions of an engine: whether one more sequence may decode, and which prompt is next. Pure."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from heapq import heappop, heappush

from workers.config import EngineConfig
from workers.costs import CostModel
from workers.engine.sequence import Sequence
from workers.request import Request

CAREFUL = 1.3  # safety factor on predicted prompt times: computing a prompt that is then late is wasted


def slot_refusal(cost: CostModel, decoding: Items[Sequence], newcomer: Request, depth: int = 1) -> str:
    """Why no decode slot is free beside the `decoding` sequences; empty: one is free.

    With the newcomer, a step must stay within the TPOT SLO of every request. An SLO that its request would miss even
    alone does not count, so an empty worker takes any request. Every worker takes an answer that was interrupted
    elsewhere. Each of `depth` steps in flight has an equal part of the decodes.
    """
    if newcomer.generated and not newcomer.num_moves:
        return ""
    batch = -(-(len(decoding) + 1) // depth)
    context_tokens = sum(len(each.tokens) for each in decoding) + newcomer.num_tokens
    step_s = cost.decode_seconds(batch, context_tokens // depth)
    for request in (newcomer, *(each.request for each in decoding)):
        tpot_s = request.slo.tpot_s
        if tpot_s is None or not request.slo.is_enforced or step_s <= tpot_s:
            continue
        if cost.decode_seconds(1, request.num_tokens) <= tpot_s:
            why = f"a step for {len(decoding) + 1} would take {step_s:.3g} s"
            return f"{why}, the TPOT SLO of {request.key} is {tpot_s:.3g} s"
    return ""


def next_prompt(
    candidates: Iterable[Sequence], config: EngineConfig, prompt_seconds: Callable[[int, int], float], now_s: float
) -> Sequence:
    """The first in `prompt_order` among candidates less than `prompt_window` arrivals after the oldest.

    "deadline": lowest priority number first. Among equals, the largest set that can meet its TTFT deadlines together,
    earliest deadline first; then prompts that would make others late, then prompts without a deadline.
    `prompt_seconds(tokens, computed)` is the time to compute `tokens` after `computed` ones. Raises ValueError without
    candidates.
    """
    waiting = list(candidates)
    behind = min(each.number for each in waiting) + config.prompt_window
    able = [each for each in waiting if each.number < behind]
    if config.prompt_order == "deadline":
        first = min(each.request.slo.priority for each in able)
        return _most_in_time([each for each in able if each.request.slo.priority == first], prompt_seconds, now_s)
    sign = 1 if config.prompt_order == "sjf" else -1
    return min(able, key=lambda each: (sign * len(each.tokens), each.number))


def _most_in_time(candidates: Items[Sequence], prompt_seconds: Callable[[int, int], float], now_s: float) -> Sequence:
    """The first in an order with the fewest late prompts (Moore, 1968): by deadline, and whenever one would be late,
    the longest so far is postponed.
    """
    with_slo = [each for each in candidates if each.request.slo.ttft_s is not None]
    if not with_slo:
        return min(candidates, key=lambda each: each.number)
    in_time: list[tuple[float, int, Sequence]] = []  # a heap, the longest on top
    end_s = now_s
    for each in sorted(with_slo, key=lambda each: (_due_s(each), each.number)):
        seconds = CAREFUL * prompt_seconds(len(each.tokens) - each.num_computed, each.num_computed)
        heappush(in_time, (-seconds, each.number, each))
        end_s += seconds
        if end_s > _due_s(each):
            end_s += heappop(in_time)[0]
    chosen = [each for _, _, each in in_time] or with_slo
    return min(chosen, key=lambda each: (_due_s(each), each.number))


def _due_s(sequence: Sequence) -> float:
    ttft_s = sequence.request.slo.ttft_s
    assert ttft_s is not None, "only requests with a TTFT SLO have a deadline"
    return sequence.arrival_s - sequence.request.waited_s + ttft_s
