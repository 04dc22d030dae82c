"""Goodput: the highest request rate at which the target share of requests meets the SLO. Pure search.

Each seed has its own bracket. From `start`, the rate doubles until the target is missed, or halves until it is met;
from a start that is close, the first factor is `stride` and each next one its square. Then the bracket is bisected
until it is narrower than the tolerance. Geometric means make all seeds and targets probe the same rates and share
results. A seed's goodput is the highest rate that met the target. The confidence interval is Student's t over the
goodputs of the seeds: it covers the differences between seeds, not the error of the model.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, sqrt
from statistics import fmean, stdev
from typing import Any

from cluster.offline.scoring.figures import Attainment, slo_text
from workers.request import SLO

Attain = Callable[[float, int], Attainment]  # (rate, seed)
Map = Callable[..., Iterable[Any]]  # the builtin `map` or an executor's: results in order

NEAR_STRIDE = 1.1  # from another seed's goodput
MAX_STRIDE = 2.0  # the largest factor between two rates outside the bracket

# Student's t, two-sided 95 %, by degrees of freedom from 1; the last value is used for more.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120)


class TimeUp(Exception):
    """The time limit has passed; a `Map` raises it. The search then answers with what is known."""


@dataclass(frozen=True, slots=True)
class Search:
    """The range of a search in requests/s of the whole system. Raises ValueError if the range is empty.

    No rate below `floor` or above `cap` is tried. `tolerance`: the lowest rate that missed over the highest that met
    the target, less 1.
    """

    start: float
    floor: float
    cap: float
    tolerance: float = 0.03
    stride: float = MAX_STRIDE

    def __post_init__(self) -> None:
        if not 0.0 < self.floor <= self.start <= self.cap < inf:
            raise ValueError(f"rates must be 0 < floor <= start <= cap, got {self.floor}, {self.start}, {self.cap}")
        if not 1e-6 <= self.tolerance < inf:
            raise ValueError(f"tolerance: must be 1e-6 or more, got {self.tolerance}")
        if not 1.0 < self.stride <= MAX_STRIDE:
            raise ValueError(f"stride: must be above 1 and at most {MAX_STRIDE:g}, got {self.stride}")


@dataclass(frozen=True, slots=True)
class Probe:
    """The attainment of one seed at one rate."""

    rate: float
    seed: int
    attained: Attainment


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests/s of the whole system on `gpus` GPUs or ranks (`unit`), counting all that were provisioned.

    `rate` is the mean of `by_seed`, `low` to `high` its 95 % confidence interval (the rate itself with one seed).
    `probes`: all results, by rate and seed. `target`: a share, 0 to 1. `seeds`: those with at least one result. Unless
    `complete`, the time limit passed: a seed's goodput is then at least its rate in `by_seed`, and below its rate in
    `broke` (None: no rate missed the target yet).
    """

    slo: SLO
    target: float
    gpus: int
    seeds: tuple[int, ...]
    by_seed: tuple[float, ...]
    rate: float
    low: float
    high: float
    search: Search
    probes: tuple[Probe, ...]
    complete: bool = True
    broke: tuple[float | None, ...] = ()
    unit: str = "GPU"

    @property
    def provisioned(self) -> str:
        return f"{self.gpus} {self.unit}{'s' * (self.gpus > 1)}"

    @property
    def per_gpu(self) -> float:
        return self.rate / self.gpus

    @property
    def unattainable(self) -> bool:
        """No seed met the target even at the lowest rate."""
        return self.rate == 0.0 and self.complete

    @property
    def capped(self) -> bool:
        """A seed met the target at the highest allowed rate, so the goodput is at least this."""
        return self.search.cap in self.by_seed

    @property
    def closest(self) -> Probe:
        """The probe with the highest attainment; among equals, the one at the highest rate."""
        return max(self.probes, key=lambda probe: (probe.attained.both, probe.rate))

    @property
    def limits(self) -> tuple[str, ...]:
        """What each seed missed above its goodput, the most frequent first: TTFT, TPOT, or requests not served."""
        counts: Counter[str] = Counter()
        for seed, held in zip(self.seeds, self.by_seed, strict=True):
            above = (each.attained for each in self.probes if each.seed == seed and each.rate > held)
            counts.update(next(filter(None, (attained.broken(self.target) for attained in above)), ()))
        return tuple(name for name, _ in counts.most_common())

    @property
    def curve(self) -> tuple[tuple[float, Attainment], ...]:
        """The mean attainment at each rate that all seeds probed; a mean over some seeds would be biased."""
        by_rate: dict[float, list[Attainment]] = {}
        for probe in self.probes:
            if probe.seed in self.seeds:
                by_rate.setdefault(probe.rate, []).append(probe.attained)
        return tuple((rate, mean_attainment(each)) for rate, each in by_rate.items() if len(each) == len(self.seeds))

    @property
    def summary(self) -> str:
        """One sentence with the rate, its confidence interval, target, SLO, GPUs and what limits it."""
        rate, why = self._rate_and_why
        return f"{rate}: at least {100 * self.target:g} % of requests with {slo_text(self.slo)}; {why}"

    @property
    def short(self) -> str:
        """The summary without target and SLO."""
        return "; ".join(self._rate_and_why)

    @property
    def _rate_and_why(self) -> tuple[str, str]:
        if self.unattainable:
            near = self.closest
            return (
                f"goodput 0 on {self.provisioned}",
                f"not attainable, not even at {self.search.floor:g} requests/s; closest is {near.attained.both:.1%} at "
                f"{near.rate:.4g} requests/s ({_joined(self.limits)} missed)",
            )
        if not self.complete:
            return self._partial_rate_and_why
        sure = f"95 % CI {self.low:.4g}..{self.high:.4g}, t over {len(self.seeds)} seeds"
        bound = "at least " if self.capped else ""
        limits = "the search's cap" if self.capped else _joined(self.limits)
        return (
            f"goodput {bound}{self.rate:.4g} requests/s ({sure if len(self.seeds) > 1 else 'one seed'}), "
            f"{bound}{self.per_gpu:.4g} per {self.unit} on {self.provisioned}",
            f"limited by {limits}",
        )

    @property
    def _partial_rate_and_why(self) -> tuple[str, str]:
        if not self.probes:
            return "goodput not known", "the time limit came before the end of the first run"
        low, bounds = min(self.by_seed), [each for each in self.broke if each is not None]
        below = f"below {max(bounds):.4g} requests/s" if bounds else ""
        held = " and ".join(filter(None, (f"at least {low:.4g} requests/s" if low else "", below)))
        return (
            f"goodput {held} on {self.provisioned}",
            f"known from {len(self.probes)} run{'s' * (len(self.probes) > 1)}",
        )

    def as_json(self) -> dict[str, Any]:
        import msgspec

        written: dict[str, Any] = msgspec.to_builtins(self)
        return {
            **written,
            "per_gpu": self.per_gpu,
            "interval": f"95 %, Student's t over {len(self.seeds)} seeds" if len(self.seeds) > 1 else "none: one seed",
            "unattainable": self.unattainable,
            "capped": self.capped,
            "limits": self.limits,
            "closest": msgspec.to_builtins(self.closest) if self.probes else None,
            "summary": self.summary,
        }


def probe_span_s(slo: SLO, mean_output_tokens: float) -> float:
    """The minimum length of a probe, because a growing queue needs time to break an SLO: ten times the TTFT and two
    answers."""
    return 10 * (slo.ttft_s or 0.0) + 2 * (slo.tpot_s or 0.0) * mean_output_tokens


def trying(rate: float, held: float) -> str:
    """A search's progress."""
    so_far = f"{held:.3g} held so far" if held else "none has held yet"
    return f"trying {rate:.3g} requests/s, {so_far}"


class Probes:
    """The attainment of one system by (rate, seed), evaluated through `each` and cached for other targets.

    `attain(rate, seed)` must be deterministic. `each` may be an executor's `map`; `attain` must then be picklable.
    `known`: results that exist already.
    """

    def __init__(
        self, attain: Attain, each: Map = map, known: Mapping[tuple[float, int], Attainment] | None = None
    ) -> None:
        self._attain = attain
        self._each = each
        self._known = dict(known or {})

    def at(self, wanted: Sequence[tuple[float, int]]) -> list[Attainment]:
        """The attainment of each pair; pairs not known yet are evaluated in one call."""
        new = [pair for pair in dict.fromkeys(wanted) if pair not in self._known]
        if new:
            made = self._each(self._attain, [rate for rate, _ in new], [seed for _, seed in new])
            self._known.update(zip(new, made, strict=True))
        return [self._known[pair] for pair in wanted]

    def known(self, rate: float, seed: int) -> Attainment | None:
        return self._known.get((rate, seed))

    @property
    def all(self) -> tuple[Probe, ...]:
        """By rate and seed."""
        return tuple(Probe(*pair, self._known[pair]) for pair in sorted(self._known))


def goodput(
    probes: Probes,
    search: Search,
    slo: SLO,
    *,
    target: float,
    seeds: Sequence[int],
    gpus: int,
    unit: str = "GPU",
    led: bool = False,
    on_probe: Callable[[float, float], None] = lambda rate, held: None,
) -> Goodput:
    """Search until every seed's bracket is narrow or the time limit passes. Raises ValueError on an invalid target,
    seeds or GPUs.

    Takes about log2(cap / start) + log2(1 / tolerance) probes per seed; the next probes of all seeds run together.
    `led`: search the first seed alone and start the others at its goodput, which needs fewer probes but more rounds.
    `on_probe(rate, held)` is called before each probe with its rate and the highest rate that held.
    """
    if not 0.0 < target <= 1.0:
        raise ValueError(f"target: must be a share above 0 and at most 1, got {target}")
    if not seeds or len(set(seeds)) != len(seeds) or gpus < 1:
        raise ValueError(f"seeds must be one or more and differ, gpus at least 1; got {list(seeds)} and {gpus}")
    brackets: dict[int, _Bracket] = {}
    complete = True
    try:
        for group in (seeds[:1], seeds[1:]) if led else (seeds,):
            near = _near(search, brackets[seeds[0]].held) if brackets else search
            begun = {seed: _Bracket(near) for seed in group}
            brackets |= begun
            while pairs := [(rate, seed) for seed, each in begun.items() if (rate := each.next()) is not None]:
                on_probe(pairs[0][0], max(each.held for each in brackets.values()))
                try:
                    probes.at(pairs)
                finally:  # also learn from a round that was cut short
                    for rate, seed in pairs:
                        if (attained := probes.known(rate, seed)) is not None:
                            begun[seed].learn(rate, attained.both >= target)
    except TimeUp:
        complete = False
    known = {seed: each for seed, each in brackets.items() if each.begun} or {seeds[0]: _Bracket(search)}
    by_seed = tuple(each.held for each in known.values())
    rate, off = fmean(by_seed), half_width(by_seed)
    broke = tuple(each.broke if each.broke < inf else None for each in known.values())
    return Goodput(
        slo=slo,
        target=target,
        gpus=gpus,
        seeds=tuple(known),
        by_seed=by_seed,
        rate=rate,
        low=max(0.0, rate - off),
        high=rate + off,
        search=search,
        probes=probes.all,
        complete=complete,
        broke=broke,
        unit=unit,
    )


def _near(search: Search, held: float) -> Search:
    """Starts at another seed's goodput, unless that is 0."""
    return replace(search, start=min(max(held, search.floor), search.cap), stride=NEAR_STRIDE) if held else search


class _Bracket:
    """One seed's search: `held`, the highest rate that met the target (0: none yet), and `broke`, the lowest that
    missed it (infinite: none yet)."""

    def __init__(self, search: Search) -> None:
        self._search = search
        self.held = 0.0
        self.broke = inf
        self._stride = search.stride  # of the next probe outside the bracket

    @property
    def begun(self) -> bool:
        return self.held > 0.0 or self.broke < inf

    def next(self) -> float | None:
        """The next rate; None if the bracket is narrow enough."""
        search = self._search
        if self.held == 0.0 and self.broke == inf:
            return search.start
        if self.broke == inf:
            return min(self._stride * self.held, search.cap) if self.held < search.cap else None
        if self.held == 0.0:
            return max(self.broke / self._stride, search.floor) if self.broke > search.floor else None
        return sqrt(self.held * self.broke) if self.broke > self.held * (1.0 + search.tolerance) else None

    def learn(self, rate: float, held: bool) -> None:
        if self.held or self.broke < inf:
            self._stride = min(MAX_STRIDE, self._stride**2)
        if held:
            self.held = rate
        else:
            self.broke = rate


def half_width(samples: Sequence[float]) -> float:
    """Half the width of the mean's 95 % confidence interval, by Student's t; 0 with one sample (no interval)."""
    if len(samples) < 2:
        return 0.0
    return T95[min(len(samples) - 1, len(T95)) - 1] * stdev(samples) / sqrt(len(samples))


def mean_attainment(attained: Sequence[Attainment]) -> Attainment:
    return Attainment(*(fmean(getattr(each, name) for each in attained) for name in ("ttft", "tpot", "both", "served")))


def _joined(names: Sequence[str]) -> str:
    return " and ".join(names) or "nothing"
