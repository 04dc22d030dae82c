"""The first sentence of a report: which system did best. Pure."""

from collections.abc import Sequence
from operator import attrgetter

from cluster.offline.report.compared import Compared, unit_of


def verdict(systems: Sequence[Compared]) -> str:
    """By goodput at the highest target that all systems have, else by SLO attainment at the main load."""
    if not systems:
        return ""
    targets = set.intersection(*({goodput.target for goodput in system.goodputs} for system in systems))
    return _by_goodput(systems, max(targets)) if targets else _by_attainment(systems)


def _by_goodput(systems: Sequence[Compared], target: float) -> str:
    found = [(system.name, each) for system in systems for each in system.goodputs if each.target == target]
    (name, best), *others = sorted(found, key=lambda each: each[1].per_gpu, reverse=True)
    share = f"{100 * target:g} % of requests within their SLOs"
    if not best.rate:
        return f"No system keeps {share} at any rate that was tried."
    carries = f"{name} carries {best.per_gpu:.3g} requests/s per {unit_of(systems)} with {share}"
    if not others:
        return f"{carries}."
    second, other = others[0]
    if not other.rate:
        return f"{carries}; no other system does at any rate that was tried."
    doubt = "; the 95 % intervals overlap" if best.low / best.gpus <= other.high / other.gpus else ""
    return f"{carries}, {best.per_gpu / other.per_gpu:.2f} times as many as {second}, the next{doubt}."


def _by_attainment(systems: Sequence[Compared]) -> str:
    best, *others = sorted(systems, key=attrgetter("figures.attainment.both"), reverse=True)
    meets = f"{best.name} meets the SLOs of {_share(best)} of the requests"
    return f"{meets}, {others[0].name}, the next, of {_share(others[0])}." if others else f"{meets}."


def _share(system: Compared) -> str:
    return f"{100 * system.figures.attainment.both:.1f} %"
