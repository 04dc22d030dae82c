"""The answers to the buyer's question, as words and as JSON: three paragraphs that are never mixed. Pure."""

from collections.abc import Sequence
from typing import Any

from cluster.offline.plan.asked import PlanRequest
from cluster.offline.plan.buyer import InstanceAnswer, LengthRanges, UnderLoad
from cluster.offline.plan.estimate import CAVEAT, Estimate, ms_range
from cluster.offline.plan.written import plain
from cluster.offline.scoring.figures import slo_text


def told(asked: PlanRequest, lengths: LengthRanges, found: Sequence[InstanceAnswer]) -> list[str]:
    """Three answers, each for every instance."""
    lines = [
        f"{asked.shape.name}, {lengths.name}",
        "",
        "1. How long the prefill takes: TTFT, the time to the first token",
    ]
    for each in found:
        lines.append(f"  {each.estimate.name}: {ms_range(each.ttft_s)} for a single user{_under(each, 'ttft_s')}")
    lines += ["", "2. How long each further token takes: TPOT"]
    for each in found:
        rate = f" ({1.0 / each.tpot_s[1]:.0f} tokens/s for one reader)" if each.tpot_s[1] else ""
        lines.append(f"  {each.estimate.name}: {ms_range(each.tpot_s)} for a single user{rate}{_under(each, 'tpot_s')}")
    lines += ["", f"3. How much load there may be while both hold: {slo_text(asked.slo)}, for {100 * asked.target:g} %"]
    for each in found:
        lines.append(f"  {each.estimate.name}: {_served(each)}")
    return lines


def estimated(asked: PlanRequest, lengths: LengthRanges, found: Sequence[Estimate]) -> list[str]:
    """What is known before anything is simulated."""
    return [
        f"{asked.shape.name}, {lengths.name}; {slo_text(asked.slo)}",
        f"{CAVEAT}.",
        *(f"  {each.told}" for each in found),
    ]


def _under(answer: InstanceAnswer, latency: str) -> str:
    return "".join(_loaded(each, latency) for each in answer.users if each.users > 1)


def _loaded(load: UnderLoad, latency: str) -> str:
    found = getattr(load, latency)
    return "" if found is None else f"; {load.users} users: median {1e3 * found.p50:.3g}, 90 % {1e3 * found.p90:.3g} ms"


def _served(answer: InstanceAnswer) -> str:
    found = answer.throughput
    if found is None:
        return f"{answer.estimate.served}; not simulated"
    if not found.rate:
        return found.summary
    tokens = found.rate * answer.mean_output
    least = "" if found.complete else "at least "
    each = f"{tokens:.4g} output tokens/s, {tokens / found.gpus:.4g} per GPU"
    return f"{least}{found.rate:.3g} requests/s, {each} ({found.summary})"


def as_json(asked: PlanRequest, lengths: LengthRanges, found: Sequence[InstanceAnswer]) -> dict[str, Any]:
    return {
        "model": asked.model,
        "lengths": plain(lengths),
        "promise": slo_text(asked.slo),
        "target": asked.target,
        "ttft": [_latency(each, "ttft_s") for each in found],
        "tpot": [_latency(each, "tpot_s") for each in found],
        "throughput": [_throughput(each) for each in found],
        "estimates": [plain(each.estimate) for each in found],
        "complete": all(each.complete for each in found),
    }


def _throughput(answer: InstanceAnswer) -> dict[str, Any]:
    found = answer.throughput
    rate = found.rate if found is not None else 0.0
    return {
        "instance": answer.estimate.name,
        "gpus": answer.group.gpus_each,
        "requests_per_s": rate,
        "output_tokens_per_s": rate * answer.mean_output,
        "complete": answer.complete,
        "told": _served(answer) if found is None else found.summary,
    }


def _latency(answer: InstanceAnswer, latency: str) -> dict[str, Any]:
    least, most = getattr(answer, latency)
    return {
        "instance": answer.estimate.name,
        "gpus": answer.group.gpus_each,
        "one_user_s": {"shortest": least, "longest": most},
        "users": [
            {"users": each.users, **plain(found)}
            for each in answer.users
            if (found := getattr(each, latency)) is not None
        ],
    }
