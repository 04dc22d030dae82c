"""A plan as words, as JSON, and as a cluster file that `serve` takes. Pure but for one file."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from cluster.offline.plan.asked import PlanRequest
from cluster.offline.plan.deploy import spec_of
from cluster.offline.plan.estimate import CAVEAT, Estimate
from cluster.offline.plan.placement import Option, Searched
from cluster.offline.plan.verdict import PlanVerdict
from cluster.offline.scoring.figures import slo_text
from cluster.spec import FILE_DEFAULTS, ClusterSpec
from workers.profiles.profile_errors import ProfileError
from workers.profiles.shapes import SHAPES, WEIGHTS, canonical
from workers.profiles.sources import profile_of


def described(asked: PlanRequest, searched: Searched, verdict: PlanVerdict) -> list[str]:
    """Everything that is known, line by line."""
    load, chosen = asked.load, verdict.chosen
    how = "its own times" if load.own_times else "Poisson arrivals"
    at = "" if asked.rate is None else f" at {asked.rate:g} requests/s"
    lines = [
        f"{asked.shape.name} for {load.source.name} ({how}){at}: {slo_text(asked.slo)}",
        f"for at least {100 * asked.target:g} % of requests; {asked.network} network between nodes",
        "",
        verdict.words,
        f"  {chosen.layout.told}",
        *(f"  {line}" for line in _evidence(asked, chosen)),
    ]
    for option in verdict.options[1:]:
        lines += [f"instead of {option.layout.told}", *(f"  {line}" for line in _evidence(asked, option))]
    lines += ["", *searched.notes, *_provenance(asked, chosen)]
    lines.append(f"{searched.requests:,} requests simulated in {searched.wall_s:.0f} s")
    return lines


def _evidence(asked: PlanRequest, option: Option) -> list[str]:
    lines = [option.goodput.summary]
    if asked.unit != "GPU":
        lines.append(f"{option.trial.weight:g} {asked.unit}, {option.value:.4g} requests/s for each {asked.unit}")
    if option.serves is not None:
        kept = option.serves
        lines.append(
            f"at {asked.rate:g} requests/s {kept.both:.1%} keep both (TTFT {kept.ttft:.1%}, TPOT {kept.tpot:.1%})"
        )
    return lines


def _provenance(asked: PlanRequest, option: Option) -> list[str]:
    """Where the chosen groups' step times come from."""
    lines = []
    for group in option.layout.groups:
        sheet = asked.sheets[group.hardware]
        try:
            found = profile_of(asked.shape, sheet, group.tensor, group.pipeline, asked.sources[group.hardware])
        except ProfileError:
            continue
        lines.append(found.provenance)
    return list(dict.fromkeys(lines))


def undecided(asked: PlanRequest, searched: Searched) -> list[str]:
    """When the time was up before any layout had been simulated whole."""
    return [
        "Not decided in time: no layout was simulated whole; what was tried:",
        *(f"  {each}" for each in searched.notes),
        f"{searched.requests:,} requests simulated in {searched.wall_s:.0f} s",
    ]


def outlined(asked: PlanRequest, found: Sequence[Estimate]) -> list[str]:
    """What is known before anything is simulated."""
    lines = [f"{asked.shape.name} for {asked.load.source.name}: {slo_text(asked.slo)}", f"{CAVEAT}."]
    return lines + ([f"  {each.told}" for each in found] or ["  no layout would keep the promise, even without load"])


def as_json(asked: PlanRequest, searched: Searched, verdict: PlanVerdict | None) -> dict[str, Any]:
    return {
        "question": {
            "model": asked.model,
            "hardware": list(asked.hardware),
            "gpus": asked.gpus,
            "nodes": asked.nodes,
            "rate": asked.rate,
            "ttft_s": asked.slo.ttft_s,
            "tpot_s": asked.slo.tpot_s,
            "target": asked.target,
            "objective": asked.objective,
            "network": asked.network,
            "workload": asked.load.source.name,
            "seeds": list(asked.seeds),
        },
        "verdict": verdict.words if verdict else "not decided in time",
        "options": [option_json(asked, option) for option in verdict.options] if verdict else [],
        "notes": list(searched.notes),
        "complete": searched.complete,
        "simulated_requests": searched.requests,
        "wall_s": searched.wall_s,
    }


def option_json(asked: PlanRequest, option: Option) -> dict[str, Any]:
    found = option.goodput
    return {
        "kind": option.layout.kind,
        "layout": option.layout.told,
        "routing": option.layout.routing,
        "pools": [plain(group) for group in option.layout.groups],
        "gpus": option.layout.gpus,
        "weight": option.trial.weight,
        "weight_unit": asked.unit,
        "goodput": {
            "requests_per_s": found.rate,
            "low": found.low,
            "high": found.high,
            "by_seed": list(found.by_seed),
            "per_gpu": found.per_gpu,
            "told": found.summary,
        },
        "attainment_at_rate": None if option.serves is None else plain(option.serves),
    }


def plain(value: Any) -> Any:
    """Of dataclasses, enums and tuples: what JSON and YAML know."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return {key: plain(each) for key, each in value.items()} if isinstance(value, dict) else value


def spec_yaml(spec: ClusterSpec, comments: list[str]) -> str:
    """A cluster file with only what differs from the defaults, and the evidence above it. `load_spec` reads it back."""
    import yaml

    head = "".join(f"# {line}".rstrip() + "\n" for line in comments)
    body = yaml.safe_dump(_differing(spec), sort_keys=False, allow_unicode=True, width=110)
    return f"{head}\n{body}"


def write_plan(path: Path, asked: PlanRequest, searched: Searched, verdict: PlanVerdict) -> str:
    """The chosen layout; answers how it is started, which stands in the file too. Raises OSError."""
    weights = weights_of(asked.model)
    spec = spec_of(asked, verdict.chosen.layout)
    how = started(path, asked.model, weights)
    comments = [f"Written by `diptych plan`. {how}", "", *described(asked, searched, verdict)]
    path.write_text(spec_yaml(spec.with_model(weights or asked.model), comments))
    return how


def weights_of(model: str) -> str | None:
    """What `serve` takes for the model of a plan: a folder, a hub id or a short name. None: it has no such model."""
    path = Path(model).expanduser()
    if path.suffix == ".json":
        return str(path.resolve().parent)
    if path.is_dir():
        return str(path.resolve())
    shape = canonical(model)
    if "/" in model and (shape in WEIGHTS or shape not in SHAPES):
        return model  # of all that have this shape, this one
    return WEIGHTS.get(shape)


def started(path: Path, model: str, weights: str | None) -> str:
    if weights is None:
        return f"Diptych serves no {model}: `model` must name another one before `diptych serve -f {path}` can start"
    fetched = f", which gets {weights} from the hub" if "/" in weights and not Path(weights).is_dir() else ""
    return f"Start it on a Ray with these GPUs: RAY_ADDRESS=HOST:PORT diptych serve -f {path}{fetched}"


def _differing(value: Any) -> dict[str, Any]:
    """Fields that have no default, or another value than it."""
    said: dict[str, Any] = {}
    for field in fields(value):
        here = getattr(value, field.name)
        default = field.default_factory() if callable(field.default_factory) else field.default
        if here == default and field.name not in FILE_DEFAULTS.get(type(value), {}):
            continue
        if is_dataclass(here):
            said[field.name] = _differing(here)
        elif isinstance(here, tuple) and here and is_dataclass(here[0]):
            said[field.name] = [_differing(each) for each in here]
        else:
            said[field.name] = plain(here)
    return said
