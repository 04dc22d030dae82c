"""A plan as text, as JSON, and as a cluster file that `serve` reads. Pure, except that it writes the file."""

from dataclasses import fields, is_dataclass
from math import inf
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from cluster.offline.plan.bottlenecks import changes
from cluster.offline.plan.deploy import Layout, spec_of
from cluster.offline.plan.dollars import price_line, serving_cost
from cluster.offline.plan.estimate import CAVEAT, Estimate, Outline
from cluster.offline.plan.placement import PlacementResult
from cluster.offline.plan.request import PlanRequest
from cluster.offline.plan.trial import Option
from cluster.offline.plan.verdict import FirstVerdict, PlanVerdict
from cluster.offline.scoring.figures import slo_text
from cluster.spec import ClusterSpec
from cluster.spec_file import FILE_DEFAULTS
from workers.profiles.shapes import SHAPES, WEIGHTS, canonical
from workers.profiles.sources import profile_of


def plan_lines(request: PlanRequest, found: PlacementResult, verdict: PlanVerdict | None) -> list[str]:
    """Verdict, evidence and provenance. Without a verdict no layout was simulated whole in time."""
    requests = f"{found.requests:,} requests simulated in {found.wall_s:.0f} s"
    if verdict is None:
        undecided = "Not decided in time: no simulation of a whole layout has ended, so only the estimate is known"
        return [undecided, *found.notes, requests]
    load, chosen = request.load, verdict.chosen
    how = "its own times" if load.own_times else "Poisson arrivals"
    at = "" if request.rate is None else f" at {request.rate:g} requests/s"
    lines = [
        f"{request.shape.name} for {load.source.name} ({how}){at}: {slo_text(request.slo)}",
        f"for at least {100 * request.target:g} % of requests; {request.kv_link} KV handoffs",
        "",
        verdict.words,
        f"  {chosen.layout.description}",
        *(f"  {line}" for line in _evidence(request, chosen)),
    ]
    for option in verdict.options[1:]:
        lines += [f"compared with {option.layout.description}", *(f"  {line}" for line in _evidence(request, option))]
    return [*lines, "", *found.notes, *_provenance(request, chosen), requests]


def first_lines(request: PlanRequest, first: FirstVerdict) -> list[str]:
    """The first simulated answer."""
    head = f"First verdict after {first.after_s:.0f} s ({first.requests:,} requests simulated, one seed):"
    if first.verdict is None:
        some = f"no layout that closed forms favor {'meets' if first.decided else 'has met'} the SLO"
        return [head, f"  {some if first.requests else 'no run has ended yet; this machine is slow or busy'}"]
    lines = [head, first.verdict.words]
    for option in first.verdict.options:
        lines += [f"  {option.layout.description}", *(f"    {line}" for line in _evidence(request, option))]
    return [*lines, "More layouts and all seeds are simulated now; Ctrl-C prints the best so far."]


def _evidence(request: PlanRequest, option: Option) -> list[str]:
    lines = [option.goodput.short]
    if option.headroom and option.serves is None:
        lines.append(option.headroom)
    if (cost := serving_cost(request, option.layout, request.rate or option.goodput.rate)) is not None:
        lines.append(cost.words)
    if request.rate is None and (copies := request.gpus // option.layout.gpus) > 1:
        lines.append(f"{request.gpus} GPUs hold {copies} of this layout")
    if request.unit == "W":
        lines.append(f"{option.trial.weight:g} {request.unit}, {option.value:.4g} requests/s per {request.unit}")
    if option.serves is not None:
        met = option.serves
        lines.append(
            f"at {request.rate:g} requests/s {met.both:.1%} meet both (TTFT {met.ttft:.1%}, TPOT {met.tpot:.1%})"
        )
    return lines


def _provenance(request: PlanRequest, option: Option) -> list[str]:
    """Where the step times of the chosen groups come from."""
    profiles = (
        profile_of(
            request.shape,
            request.sheets[group.hardware],
            group.tensor,
            group.pipeline,
            request.sources[group.hardware],
        )
        for group in option.layout.groups
    )
    return list(dict.fromkeys(profile.provenance for profile in profiles))


def estimate_lines(request: PlanRequest, found: Outline) -> list[str]:
    """The answer before anything is simulated."""
    lines = [
        f"{request.shape.name} for {request.load.source.name}: {slo_text(request.slo)}",
        request.goal,
        f"{CAVEAT}.",
    ]
    for each in found.estimates:
        lines += lines_of(request, each)
    lines += [f"{name}: {why}" for name, why in found.refused.items()]
    best = found.best(request)
    lines += change_lines(request, best) if best else []
    return [*lines, price_line(request.sheets, request.prices)]


def lines_of(request: PlanRequest, each: Estimate) -> list[str]:
    """One estimate: what fits, latencies, requests/s, cost, and what binds each phase."""
    cost = serving_cost(request, each.layout, min(each.rate, request.rate or inf))
    few = f"; too few: {request.rate:g} are wanted" if request.rate and 0.0 < each.rate < request.rate else ""
    return [
        each.name,
        f"  {each.fit}",
        f"  single request: {each.latency}",
        f"  {each.throughput}{few}",
        *([f"  {cost.words}"] if cost else []),
        *(f"  {one.words}" for one in each.bottlenecks),
        *([f"  {each.margins}"] if each.rate else []),
    ]


def change_lines(request: PlanRequest, best: Estimate) -> list[str]:
    """What one more GPU, another TP or a looser SLO would change for the most promising one."""
    lines = [f"Estimated effect of changes to {best.name}:"]
    for change in changes(request, best.layout):
        rate = f"{change.rate:.3g} requests/s ({change.gain:+.0%})" if abs(change.gain) >= 0.005 else "no gain"
        lines.append(f"  {change.words}: {rate if change.rate else 'the SLO cannot be met'}")
    return lines


def changes_json(request: PlanRequest, best: Estimate | None) -> Any:
    return None if best is None else {"of": best.name, "changes": to_builtins(changes(request, best.layout))}


def estimate_json(request: PlanRequest, each: Estimate) -> Any:
    return to_builtins(each) | {"cost": cost_json(request, each.layout, min(each.rate, request.rate or inf))}


def first_json(request: PlanRequest, first: FirstVerdict) -> dict[str, Any]:
    found = first.verdict
    return {
        "verdict": found.words if found else "not decided in time",
        "options": [_option_json(request, option) for option in found.options] if found else [],
        "decided": first.decided,
        "after_s": first.after_s,
        "simulated_requests": first.requests,
    }


def cost_json(request: PlanRequest, layout: Layout, rate: float) -> Any:
    return to_builtins(serving_cost(request, layout, rate))


def plan_json(request: PlanRequest, found: PlacementResult, verdict: PlanVerdict | None) -> dict[str, Any]:
    return {
        "question": {
            "model": request.model,
            "hardware": list(request.hardware),
            "gpus": request.gpus,
            "nodes": request.nodes,
            "rate": request.rate,
            "ttft_s": request.slo.ttft_s,
            "tpot_s": request.slo.tpot_s,
            "target": request.target,
            "objective": request.objective,
            "kv_link": request.kv_link,
            "workload": request.load.source.name,
            "seeds": list(request.seeds),
            "prices": {name: sheet.price_per_hour for name, sheet in request.sheets.items()},
        },
        "verdict": verdict.words if verdict else "not decided in time",
        "options": [_option_json(request, option) for option in verdict.options] if verdict else [],
        "notes": list(found.notes),
        "complete": found.complete,
        "simulated_requests": found.requests,
        "wall_s": found.wall_s,
    }


def _option_json(request: PlanRequest, option: Option) -> dict[str, Any]:
    found = option.goodput
    return {
        "kind": option.layout.kind,
        "layout": option.layout.description,
        "routing": option.layout.routing,
        "pools": to_builtins(option.layout.groups),
        "gpus": option.layout.gpus,
        "weight": option.trial.weight,
        "weight_unit": request.unit,
        "cost": cost_json(request, option.layout, request.rate or found.rate),
        "headroom": option.headroom,
        "goodput": {
            "requests_per_s": found.rate,
            "low": found.low,
            "high": found.high,
            "by_seed": list(found.by_seed),
            "per_gpu": found.per_gpu,
            "summary": found.short,
        },
        "attainment_at_rate": None if option.serves is None else to_builtins(option.serves),
    }


def spec_yaml(spec: ClusterSpec, comments: list[str]) -> str:
    """A cluster file with the comments first, then only what differs from the defaults. `load_spec` reads it back."""
    import yaml

    head = "".join(f"# {line}".rstrip() + "\n" for line in comments)
    body = yaml.safe_dump(_non_default(spec), sort_keys=False, allow_unicode=True, width=110)
    return f"{head}\n{body}"


def write_plan(path: Path, request: PlanRequest, found: PlacementResult, verdict: PlanVerdict) -> str:
    """Write the chosen layout. Returns how to start it, which the file says too. Raises OSError."""
    weights = weights_of(request.model)
    how = how_to_start(path, request.model, weights)
    spec = spec_of(request, verdict.chosen.layout).with_model(weights or request.model)
    comments = [f"Written by `diptych plan`. {how}", "", *plan_lines(request, found, verdict)]
    path.write_text(spec_yaml(spec, comments))
    return how


def weights_of(model: str) -> str | None:
    """The model as `serve` takes it: a folder, a hub id or a short name. None: Diptych does not serve it."""
    path = Path(model).expanduser()
    if path.suffix == ".json":
        return str(path.resolve().parent)
    if path.is_dir():
        return str(path.resolve())
    shape = canonical(model)
    if "/" in model and (shape in WEIGHTS or shape not in SHAPES):
        return model  # this one, of all models that have the shape
    return WEIGHTS.get(shape)


def how_to_start(path: Path, model: str, weights: str | None) -> str:
    if weights is None:
        return f"Diptych serves no {model}: `model` must name another one before `diptych serve -f {path}` can start"
    download = f", which gets {weights} from the hub" if "/" in weights and not Path(weights).is_dir() else ""
    return f"Start it on a Ray with these GPUs: RAY_ADDRESS=HOST:PORT diptych serve -f {path}{download}"


def _non_default(value: Any) -> dict[str, Any]:
    """The fields that have no default, or differ from it."""
    found: dict[str, Any] = {}
    for field in fields(value):
        here = getattr(value, field.name)
        default = field.default_factory() if callable(field.default_factory) else field.default
        if here == default and field.name not in FILE_DEFAULTS.get(type(value), {}):
            continue
        if is_dataclass(here):
            found[field.name] = _non_default(here)
        elif isinstance(here, tuple) and here and is_dataclass(here[0]):
            found[field.name] = [_non_default(each) for each in here]
        else:
            found[field.name] = to_builtins(here)
    return found
