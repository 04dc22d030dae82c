"""The answers to the buyer's question, as words and as JSON: three paragraphs that are never mixed. Pure."""

from collections.abc import Sequence
from typing import Any

from cluster.plan.asked import Asked
from cluster.plan.buyer import Answer, Lengths, UnderLoad
from cluster.plan.written import plain
from cluster.scoring.figures import promise


def told(asked: Asked, lengths: Lengths, found: Sequence[Answer]) -> list[str]:
    """Three answers, each for every instance."""
    lines = [
        f"{asked.shape.name}, {lengths.name}",
        "",
        "1. How long the prefill takes: TTFT, the time to the first token",
    ]
    for each in found:
        lines.append(f"  {_name(each)}: {_range(each.ttft_s)} for a single user{_under(each, 'ttft_s')}")
    lines += ["", "2. How long each further token takes: TPOT"]
    for each in found:
        rate = f" ({1.0 / each.tpot_s[1]:.0f} tokens/s for one reader)" if each.tpot_s[1] else ""
        lines.append(f"  {_name(each)}: {_range(each.tpot_s)} for a single user{rate}{_under(each, 'tpot_s')}")
    lines += ["", f"3. How much load there may be while both hold: {promise(asked.slo)}, for {100 * asked.target:g} %"]
    for each in found:
        lines.append(f"  {_name(each)}: {_served(each)}")
    return lines


def _name(answer: Answer) -> str:
    group = answer.group
    count = f"{group.gpus_each} x " if group.gpus_each > 1 else ""
    cut = f" (TP{group.tensor} PP{group.pipeline})" if group.gpus_each > 1 else ""
    return f"{count}{group.hardware}{cut}"


def _range(seconds: tuple[float, float]) -> str:
    least, most = (f"{1e3 * each:.3g}" for each in seconds)
    return f"{least} ms" if least == most else f"{least} to {most} ms"


def _under(answer: Answer, latency: str) -> str:
    return "".join(_loaded(each, latency) for each in answer.users if each.users > 1)


def _loaded(load: UnderLoad, latency: str) -> str:
    found = getattr(load, latency)
    return "" if found is None else f"; {load.users} users: median {1e3 * found.p50:.3g}, 90 % {1e3 * found.p90:.3g} ms"


def _served(answer: Answer) -> str:
    found = answer.throughput
    if found.unattainable:
        return found.told
    tokens = found.rate * answer.mean_output
    return (
        f"{found.rate:.3g} requests/s, {tokens:.4g} output tokens/s, {tokens / found.gpus:.4g} per GPU ({found.told})"
    )


def as_json(asked: Asked, lengths: Lengths, found: Sequence[Answer]) -> dict[str, Any]:
    return {
        "model": asked.model,
        "lengths": plain(lengths),
        "promise": promise(asked.slo),
        "target": asked.target,
        "ttft": [_latency(each, "ttft_s") for each in found],
        "tpot": [_latency(each, "tpot_s") for each in found],
        "throughput": [
            {
                "instance": _name(each),
                "gpus": each.group.gpus_each,
                "requests_per_s": each.throughput.rate,
                "output_tokens_per_s": each.throughput.rate * each.mean_output,
                "told": each.throughput.told,
            }
            for each in found
        ],
    }


def _latency(answer: Answer, latency: str) -> dict[str, Any]:
    least, most = getattr(answer, latency)
    return {
        "instance": _name(answer),
        "gpus": answer.group.gpus_each,
        "one_user_s": {"shortest": least, "longest": most},
        "users": [
            {"users": each.users, **plain(found)}
            for each in answer.users
            if (found := getattr(each, latency)) is not None
        ],
    }
