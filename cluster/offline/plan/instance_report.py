"""What instances deliver, as text and as JSON: TTFT, TPOT and throughput in separate paragraphs. Pure."""

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import to_builtins

from cluster.offline.plan.dollars import price_line, serving_cost
from cluster.offline.plan.estimate import CAVEAT, ms_range, seconds_text
from cluster.offline.plan.instance import Instance, InstanceAnswer, LengthRanges
from cluster.offline.plan.report import change_lines, changes_json, cost_json, estimate_json, lines_of
from cluster.offline.plan.request import PlanRequest
from cluster.offline.scoring.figures import slo_text

Latency = Literal["ttft_s", "tpot_s"]
TOO_LONG = "not simulated: the KV does not hold a long request"


def instance_lines(request: PlanRequest, lengths: LengthRanges, found: Sequence[InstanceAnswer]) -> list[str]:
    lines = [
        f"{request.shape.name}, {lengths.name}",
        "",
        "1. Prefill: TTFT (time to first token)",
    ]
    for each in found:
        latency = f"{ms_range(each.ttft_s)} for a single user{_loaded(each, 'ttft_s')}"
        lines.append(f"  {each.instance.name}: {latency if each.instance.estimate.at_once else TOO_LONG}")
    lines += ["", "2. Decode: TPOT (time per output token)"]
    for each in found:
        rate = f" ({1.0 / each.tpot_s[1]:.0f} tokens/s for one reader)" if each.tpot_s[1] else ""
        latency = f"{ms_range(each.tpot_s)} for a single user{rate}{_loaded(each, 'tpot_s')}"
        lines.append(f"  {each.instance.name}: {latency if each.instance.estimate.at_once else TOO_LONG}")
    slos = f"{slo_text(request.slo)}, for {100 * request.target:g} %"
    lines += ["", f"3. Goodput, the highest rate that meets both SLOs: {slos}"]
    for each in found:
        one = each.instance
        cost = serving_cost(one.request, one.estimate.layout, _held(each))
        lines += [f"  {one.name}: {_throughput(each)}", *([f"    {cost.words}"] if cost else [])]
    return lines


def instance_estimate_lines(found: Sequence[Instance]) -> list[str]:
    """The answer before anything is simulated."""
    request, lengths = found[0].request, found[0].lengths
    lines = [f"{request.shape.name}, {lengths.name}; {slo_text(request.slo)}", f"{CAVEAT}."]
    for each in found:
        lines += lines_of(each.request, each.estimate)
    best = _best(found)
    sheets = {name: sheet for each in found for name, sheet in each.request.sheets.items()}
    return [*lines, *(change_lines(best.request, best.estimate) if best else []), price_line(sheets, request.prices)]


def _best(found: Sequence[Instance]) -> Instance | None:
    """The most promising one; None: none meets the SLO."""
    hopeful = [each for each in found if each.estimate.rate]
    return max(hopeful, key=lambda each: each.estimate.merit(each.request), default=None)


def _loaded(answer: InstanceAnswer, latency: Latency) -> str:
    shown = [(each.users, getattr(each, latency)) for each in answer.users if each.users > 1]
    return "".join(
        f"; {users} users: median {seconds_text(found.p50)}, 90 % {seconds_text(found.p90)}"
        for users, found in shown
        if found
    )


def _held(answer: InstanceAnswer) -> float:
    """Requests/s; of a search that was cut short, what every seed held."""
    found = answer.throughput
    if found is None:
        return 0.0
    return found.rate if found.complete else min(found.by_seed, default=0.0)


def _throughput(answer: InstanceAnswer) -> str:
    found = answer.throughput
    if found is None:
        return f"{answer.instance.estimate.throughput}; not simulated"
    if not (held := _held(answer)):
        return found.short
    tokens = held * answer.mean_output
    bound = "" if found.complete else "at least "
    return (
        f"{bound}{held:.4g} requests/s, {tokens:.4g} output tokens/s, {tokens / found.gpus:.4g} per GPU ({found.short})"
    )


def instance_estimates_json(instances: Sequence[Instance]) -> dict[str, Any]:
    best = _best(instances)
    return {
        "estimates": [estimate_json(each.request, each.estimate) for each in instances],
        "what_if": changes_json(best.request, best.estimate) if best else None,
    }


def instance_json(request: PlanRequest, lengths: LengthRanges, found: Sequence[InstanceAnswer]) -> dict[str, Any]:
    sheets = [sheet for each in found for sheet in each.instance.request.sheets.values()]
    return {
        "model": request.model,
        "lengths": to_builtins(lengths),
        "slo": to_builtins(request.slo),
        "target": request.target,
        "ttft": [_latency_json(each, "ttft_s") for each in found],
        "tpot": [_latency_json(each, "tpot_s") for each in found],
        "throughput": [_throughput_json(each) for each in found],
        "prices": {sheet.name: sheet.price_per_hour for sheet in sheets},
        "complete": all(each.complete for each in found),
    }


def _throughput_json(answer: InstanceAnswer) -> dict[str, Any]:
    found = answer.throughput
    rate = _held(answer)
    return {
        "instance": answer.instance.name,
        "gpus": answer.instance.group.gpus_each,
        "requests_per_s": rate,
        "output_tokens_per_s": rate * answer.mean_output,
        "cost": cost_json(answer.instance.request, answer.instance.estimate.layout, rate),
        "complete": answer.complete,
        "summary": _throughput(answer) if found is None else found.short,
    }


def _latency_json(answer: InstanceAnswer, latency: Latency) -> dict[str, Any]:
    shortest, longest = getattr(answer, latency)
    loaded = [(each.users, getattr(each, latency)) for each in answer.users]
    return {
        "instance": answer.instance.name,
        "gpus": answer.instance.group.gpus_each,
        "one_user_s": {"shortest": shortest, "longest": longest},
        "users": [{"users": users, **to_builtins(found)} for users, found in loaded if found is not None],
    }
