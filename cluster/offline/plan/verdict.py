"""Which option is chosen, and why. Pure.

Colocated is the simpler system. It is chosen unless splitting is surely better: fewer GPUs (dollars, watts) for the
requested rate, or more goodput per GPU by more than chance.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import fmean

from cluster.offline.plan.race import Race
from cluster.offline.plan.request import PlanRequest
from cluster.offline.plan.trial import Option, rate_text
from cluster.offline.scoring.goodput import half_width


@dataclass(frozen=True, slots=True)
class PlanVerdict:
    """`options`: the chosen one first, then by value."""

    options: tuple[Option, ...]
    words: str

    @property
    def chosen(self) -> Option:
        return self.options[0]


@dataclass(frozen=True, slots=True)
class FirstVerdict:
    """What was known `after_s` seconds: by one seed, of the layouts that closed forms favor. `verdict`: None while no
    layout has met the SLO. `decided`: no further run of them would change it."""

    verdict: PlanVerdict | None
    decided: bool
    after_s: float
    requests: int


def first_verdict(request: PlanRequest, race: Race, after_s: float) -> FirstVerdict:
    decided, options = race.decided, race.options
    found = judge(request, options, decided) if options else None
    if found is not None and decided and (tells := _excluded(request, race, found.chosen)):
        best = found.chosen
        tells.insert(0, f"{best.layout.kind} met the SLO at {rate_text(request, best.trial, best.goodput.rate)}")
        found = replace(found, words=f"{found.words.partition(':')[0]}: {', '.join(tells)}")
    return FirstVerdict(found, decided, after_s, race.requests)


def _excluded(request: PlanRequest, race: Race, best: Option) -> list[str]:
    """Why each other layout cannot win: it missed the SLO, or its step costs allow no more."""
    tells = []
    for one in race.contenders:
        kind = one.trial.layout.kind
        if one.trial.layout == best.layout or (request.rate is not None and (one.held or not one.probes)):
            continue
        limit = rate_text(request, one.trial, min(one.broke, one.cap))
        known = f"{kind} missed it at {limit}" if one.broke <= one.cap else f"step costs allow {kind} at most {limit}"
        close = request.rate is None and one.limit / one.trial.weight > best.value
        tells.append(f"{known}{', too little more to matter' if close else ''}")
    return tells


def judge(request: PlanRequest, options: Sequence[Option], complete: bool = True) -> PlanVerdict:
    """Of one option at least. Unless the search is `complete`, the words advise nothing."""
    by_kind = {
        kind: [option for option in options if option.layout.kind == kind] for kind in ("colocated", "split", "hybrid")
    }
    best, why = None, ""
    for candidates in by_kind.values():  # the simplest first
        if not candidates:
            continue
        option = max(candidates, key=lambda each: each.merit(request))
        if best is None:
            best = option
            continue
        wins, reason = _beats(request, best, option)
        if wins or not why:
            why = reason
        best = option if wins else best
    assert best is not None, "there is an option"
    rest = sorted((each for each in options if each is not best), key=lambda each: each.merit(request), reverse=True)
    if complete:
        advice = _advice(request, best.layout.kind, bool(by_kind["colocated"]), bool(by_kind["split"]))
    else:  # an untried layout may be better
        advice = f"Not decided yet; best so far: {best.layout.kind}"
        why = why if all(option.goodput.complete for option in options) else ""  # bounds tell no difference
    return PlanVerdict((best, *rest), f"{advice}{': ' if why else ''}{why}")


def _advice(request: PlanRequest, kind: str, any_colocated: bool, any_split: bool) -> str:
    if kind == "colocated" and not any_split:
        no_split = f"no split on up to {request.gpus} GPUs meets the SLO"
        return f"Do not disaggregate: {no_split if request.gpus > 1 else 'a split needs two GPUs'}"
    if kind == "colocated":
        return "Do not disaggregate"
    if kind == "hybrid":
        return "Disaggregate, and let the pools help each other out"
    return "Disaggregate" if any_colocated else "Disaggregate: no colocated layout meets the SLO"


def _beats(request: PlanRequest, simple: Option, other: Option) -> tuple[bool, str]:
    """Whether the less simple one is surely better, and the reason."""
    simple_weight, other_weight = simple.trial.weight, other.trial.weight
    if request.rate is not None and simple_weight != other_weight:
        needs = f"{other.layout.kind} serves {request.rate:g} requests/s with {other_weight:g} {request.unit}"
        return other_weight < simple_weight, f"{needs}, {simple.layout.kind} with {simple_weight:g} {request.unit}"
    total = request.objective == "throughput"
    one, two = (dict(_values(each, 1.0 if total else each.trial.weight)) for each in (simple, other))
    common = [seed for seed in one if seed in two]  # a search that was cut short knows fewer seeds
    found = difference([one[seed] for seed in common], [two[seed] for seed in common])
    unit = "requests/s" if total else f"requests/s per {request.unit}"
    if len(common) > 1:
        better = found.low > 0.0
    else:  # no interval: by more than the search's own error
        better = found.mean > 2.0 * request.tolerance * (simple.goodput.rate if total else simple.value)
    words = f"{other.layout.kind} serves {found.description(unit, simple.layout.kind)}"
    if not better and found.mean > 0.0:
        words += ", which may be chance; the simpler one is preferred"
    return better, words


def _values(option: Option, weight: float) -> Iterator[tuple[int, float]]:
    """Requests/s per unit of weight by seed; at least the first seed is known."""
    return ((seed, rate / weight) for seed, rate in zip(option.goodput.seeds, option.goodput.by_seed, strict=True))


@dataclass(frozen=True, slots=True)
class Difference:
    """`mean` and its 95 % interval by Student's t over the seeds; unbounded with one seed."""

    mean: float
    low: float
    high: float

    def description(self, unit: str, left: str) -> str:
        sure = f"95 % CI {self.low:+.3g} to {self.high:+.3g}" if self.low > -inf else "one seed, no interval"
        return f"{abs(self.mean):.3g} {unit} {'more' if self.mean > 0.0 else 'less'} than {left} ({sure})"


def difference(left: Sequence[float], right: Sequence[float]) -> Difference:
    """How much greater `right` is, seed by seed: both systems saw the same requests at the same times.

    Raises ValueError for unequal numbers of seeds.
    """
    pairs = [two - one for one, two in zip(left, right, strict=True)]
    mean = fmean(pairs)
    off = half_width(pairs) if len(pairs) > 1 else inf
    return Difference(mean, mean - off, mean + off)
