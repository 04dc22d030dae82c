"""Which of the options is taken, and why, in words. Pure.

Colocated is the simpler system. It is taken unless splitting is surely better: fewer GPUs (dollars, watts) for the rate
asked for, or more goodput for each of them by more than chance.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.offline.plan.asked import PlanRequest
from cluster.offline.plan.compared import Difference, difference
from cluster.offline.plan.placement import Option


@dataclass(frozen=True, slots=True)
class PlanVerdict:
    """`options`: the chosen one first, then by value."""

    options: tuple[Option, ...]
    words: str

    @property
    def chosen(self) -> Option:
        return self.options[0]


def judged(asked: PlanRequest, options: Sequence[Option], complete: bool = True) -> PlanVerdict:
    """Unless the search is `complete`, the words say so. Raises ValueError without options."""
    together = [option for option in options if option.layout.kind == "colocated"]
    plain = [option for option in options if option.layout.kind == "split"]
    helped = [option for option in options if option.layout.kind == "hybrid"]
    best, why = None, ""
    for candidates in (together, plain, helped):  # the simplest first
        if not candidates:
            continue
        option = max(candidates, key=lambda each: _merit(asked, each))
        if best is None:
            best = option
            continue
        wins, reason = _beats(asked, best, option)
        if wins or not why:
            why = reason
        best = option if wins else best
    if best is None:
        raise ValueError("there are no options to judge")
    rest = sorted((each for each in options if each is not best), key=lambda each: _merit(asked, each), reverse=True)
    if not complete:
        return PlanVerdict((best, *rest), _so_far(best, why))
    return PlanVerdict((best, *rest), f"{_advice(best, together, plain)}{': ' if why else ''}{why}")


def _so_far(best: Option, why: str) -> str:
    """What was not tried in time may be better, so this advises nothing."""
    return f"Not decided in time; the best that was simulated whole is {best.layout.kind}{': ' if why else ''}{why}"


def _advice(best: Option, together: Sequence[Option], plain: Sequence[Option]) -> str:
    if best.layout.kind == "colocated":
        return "Do not disaggregate" if plain else "Do not disaggregate: no split keeps the promise"
    if best.layout.kind == "hybrid":
        return "Disaggregate, and let the pools help each other out"
    return "Disaggregate" if together else "Disaggregate: no colocated layout keeps the promise"


def _merit(asked: PlanRequest, option: Option) -> tuple[float, float]:
    if asked.rate is not None:
        return -option.trial.weight, option.value
    return (option.goodput.rate if asked.objective == "throughput" else option.value), -option.trial.weight


def _beats(asked: PlanRequest, simple: Option, other: Option) -> tuple[bool, str]:
    """Whether the less simple one is surely better, and the reason."""
    ours, theirs = simple.trial.weight, other.trial.weight
    if asked.rate is not None and ours != theirs:
        needs = f"{other.layout.kind} serves {asked.rate:g} requests/s with {theirs:g} {asked.unit}"
        return theirs < ours, f"{needs}, {simple.layout.kind} with {ours:g} {asked.unit}"
    total = asked.objective == "throughput"
    pairs = (simple.goodput.by_seed, other.goodput.by_seed) if total else (simple.values, other.values)
    found = difference(*pairs)
    unit = "requests/s" if total else f"requests/s for each {asked.unit}"
    better = _surely(found, asked, simple.goodput.rate if total else simple.value)
    words = f"the goodput of {other.layout.kind} over {simple.layout.kind} is {found.told(unit)}"
    if not better and found.mean > 0.0:
        words += ", which may be chance; the simpler one is preferred"
    return better, words


def _surely(found: Difference, asked: PlanRequest, scale: float) -> bool:
    """Above zero with its interval; with one seed, by more than the search's own error."""
    if len(asked.seeds) > 1:
        return found.low > 0.0
    return found.mean > 2.0 * asked.tolerance * scale
