"""Goodput: the largest request rate at which a share of requests, the target, keeps its promises. Pure search.

Each seed has a bracket of its own: from `start` the rate doubles until it breaks, or halves until it holds (from a
start that is near, by `stride` first, whose square comes next), and is then bisected (by geometric means, so all seeds
and targets probe the same rates and share what is known) until the bracket
is narrower than the tolerance. A seed's goodput is the greatest rate that held. The interval is Student's t over the
seeds' goodputs; it says how far seeds differ, not how far the model is from the truth.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf, sqrt
from statistics import fmean, stdev
from typing import Any

from cluster.offline.scoring.figures import Attainment, slo_text
from workers.request import SLO

Attain = Callable[[float, int], Attainment]  # at a rate, with a seed
Map = Callable[..., Iterable[Any]]  # as the builtin `map`, or as an executor's: results in order

NEAR = 1.1  # the stride from another seed's goodput
MOST_STRIDE = 2.0  # by which a rate is multiplied or divided at most while nothing bounds it

# Student's t, two-sided 95 %, by degrees of freedom from 1 on; the last stands for more.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120)


class TimeUp(Exception):
    """The time for an answer is over; a `Map` raises it. Whoever searches answers with what is known by then."""


@dataclass(frozen=True, slots=True)
class Search:
    """Where to look, in requests a second of the whole system, and how closely. Raises ValueError when that is nowhere.

    Nothing below `floor` or above `cap` is tried; `tolerance` is relative: the rate that broke over the one that held.
    """

    start: float
    floor: float
    cap: float
    tolerance: float = 0.03
    stride: float = MOST_STRIDE

    def __post_init__(self) -> None:
        if not 0.0 < self.floor <= self.start <= self.cap < inf:
            raise ValueError(f"rates must be 0 < floor <= start <= cap, got {self.floor}, {self.start}, {self.cap}")
        if not 1e-6 <= self.tolerance < inf:
            raise ValueError(f"tolerance: must be 1e-6 or more, got {self.tolerance}")
        if not 1.0 < self.stride <= MOST_STRIDE:
            raise ValueError(f"stride: must be above 1 and at most {MOST_STRIDE:g}, got {self.stride}")


@dataclass(frozen=True, slots=True)
class Probe:
    """What one seed attained at one rate."""

    rate: float
    seed: int
    attained: Attainment


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests a second of the whole system on `gpus` GPUs, or on as many ranks (`unit`), all that were provisioned.

    `rate` is the mean of `by_seed`, `low` to `high` its 95 % confidence interval (both the rate itself with one seed).
    `probes` are all that is known, by rate and seed; `target` is a share, 0 to 1. `seeds` are those of which something
    is known. Unless `complete` the time was up: a seed's goodput is then at least the rate that held, and below the
    rate in `broke` (None: none broke yet).
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
        return f"{self.gpus} {self.unit}s"

    @property
    def per_gpu(self) -> float:
        return self.rate / self.gpus

    @property
    def unattainable(self) -> bool:
        """No seed met the target even at the lowest rate."""
        return self.rate == 0.0 and self.complete

    @property
    def capped(self) -> bool:
        """Some seed met the target at the greatest rate tried, so the goodput is at least this."""
        return self.search.cap in self.by_seed

    @property
    def closest(self) -> Probe:
        """The probe with the greatest attainment; of equals the one at the greatest rate."""
        return max(self.probes, key=lambda probe: (probe.attained.both, probe.rate))

    @property
    def limits(self) -> tuple[str, ...]:
        """What broke where each seed first failed, the most frequent first: TTFT, TPOT, or requests not served."""
        named: dict[str, int] = {}
        for seed, held in zip(self.seeds, self.by_seed, strict=True):
            above = (each.attained for each in self.probes if each.seed == seed and each.rate > held)
            for name in next(filter(None, (attained.broken(self.target) for attained in above)), ()):
                named[name] = named.get(name, 0) + 1
        return tuple(sorted(named, key=lambda name: -named[name]))

    @property
    def curve(self) -> tuple[tuple[float, Attainment], ...]:
        """The mean attainment at each rate that was probed with all seeds: a mean over some would lean to one side."""
        by_rate: dict[float, list[Attainment]] = {}
        for probe in self.probes:
            if probe.seed in self.seeds:
                by_rate.setdefault(probe.rate, []).append(probe.attained)
        return tuple((rate, _mean(each)) for rate, each in by_rate.items() if len(each) == len(self.seeds))

    @property
    def summary(self) -> str:
        """In words, with metric, target, promise, GPUs and how sure it is."""
        asked = f"at least {100 * self.target:g} % of requests with {slo_text(self.slo)}"
        if self.unattainable:
            near = self.closest
            return (
                f"goodput 0 on {self.gpus} {self.unit}s: {asked} is not attainable, not even at {self.search.floor:g} "
                f"requests/s; closest is {near.attained.both:.1%} at {near.rate:.4g} requests/s "
                f"({_joined(self.limits)} missed)"
            )
        if not self.complete:
            return self._partial_summary(asked)
        sure = f"95 % CI {self.low:.4g}..{self.high:.4g}, t over {len(self.seeds)} seeds"
        bound = "at least " if self.capped else ""
        limits = "the search's cap" if self.capped else _joined(self.limits)
        return (
            f"goodput {bound}{self.rate:.4g} requests/s ({sure if len(self.seeds) > 1 else 'one seed'}), "
            f"{bound}{self.per_gpu:.4g} per {self.unit} on {self.gpus} {self.unit}s: {asked}; limited by {limits}"
        )

    def _partial_summary(self, asked: str) -> str:
        tried = f"{len(self.probes)} runs"
        if not self.probes:
            return f"goodput not known: the time was up before a first run had ended ({asked})"
        low, bounds = min(self.by_seed), [each for each in self.broke if each is not None]
        below = f"below {max(bounds):.4g} requests/s" if bounds else ""
        held = " and ".join(filter(None, (f"at least {low:.4g} requests/s" if low else "", below)))
        return f"goodput {held} on {self.gpus} {self.unit}s: {asked}; the time was up after {tried}"

    def as_json(self) -> dict[str, Any]:
        """Built of what JSON knows."""
        import msgspec

        written: dict[str, Any] = msgspec.to_builtins(self)
        return {
            **written,
            "promise": slo_text(self.slo),
            "per_gpu": self.per_gpu,
            "interval": f"95 %, Student's t over {len(self.seeds)} seeds" if len(self.seeds) > 1 else "none: one seed",
            "unattainable": self.unattainable,
            "capped": self.capped,
            "limits": self.limits,
            "closest": msgspec.to_builtins(self.closest) if self.probes else None,
            "told": self.summary,
        }


def probe_span_s(slo: SLO, mean_output_tokens: float) -> float:
    """How long a probe must go on at least, since a queue that grows needs time to break a promise: ten times the wait
    that is allowed, and two answers."""
    return 10 * (slo.ttft_s or 0.0) + 2 * (slo.tpot_s or 0.0) * mean_output_tokens


def trying(rate: float, held: float) -> str:
    """The progress of a search."""
    so_far = f"{held:.3g} held so far" if held else "none has held yet"
    return f"trying {rate:.3g} requests/s, {so_far}"


class Probes:
    """All that is known of one system: evaluations by (rate, seed), made through `each` and kept for further targets.

    `attain(rate, seed)` must be the same whenever it is called; `each` may be an executor's `map`, so `attain` may
    have to be picklable.
    """

    def __init__(self, attain: Attain, each: Map = map) -> None:
        self._attain = attain
        self._each = each
        self._known: dict[tuple[float, int], Attainment] = {}

    def at(self, wanted: Sequence[tuple[float, int]]) -> list[Attainment]:
        """Evaluate what is not known yet, all at once."""
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
        return tuple(Probe(rate, seed, attained) for (rate, seed), attained in sorted(self._known.items(), key=_first))


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
    """Search until every seed's bracket is narrow, or the time is up. Raises ValueError on a target, seeds or GPUs that
    make no sense.

    About log2(cap / start) + log2(1 / tolerance) probes a seed; all seeds' next probes go out together. `led`: the
    first seed is searched alone, the others start from where it ended: fewer probes in all, one after another.
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
                finally:  # also of a round that was cut short
                    for rate, seed in pairs:
                        if (attained := probes.known(rate, seed)) is not None:
                            begun[seed].learn(rate, attained.both >= target)
    except TimeUp:
        complete = False
    known = {seed: each for seed, each in brackets.items() if each.begun} or {seeds[0]: _Bracket(search)}
    by_seed = tuple(each.held for each in known.values())
    rate, off = fmean(by_seed), half_width(by_seed)
    bounds = max(0.0, rate - off), rate + off
    broke = tuple(each.broke if each.broke < inf else None for each in known.values())
    return Goodput(
        *(slo, target, gpus, tuple(known), by_seed, rate, *bounds, search, probes.all, complete), broke=broke, unit=unit
    )


def _near(search: Search, held: float) -> Search:
    """From where another seed ended; from the same start when that held nothing."""
    return replace(search, start=min(max(held, search.floor), search.cap), stride=NEAR) if held else search


class _Bracket:
    """One seed's search: the greatest rate that held (0: none yet) and the least that broke (infinite: none yet)."""

    def __init__(self, search: Search) -> None:
        self._search = search
        self.held = 0.0
        self.broke = inf
        self._stride = search.stride  # of the next probe outside of the bracket

    @property
    def begun(self) -> bool:
        return self.held > 0.0 or self.broke < inf

    def next(self) -> float | None:
        """The rate to try, None when it is narrow enough."""
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
            self._stride = min(MOST_STRIDE, self._stride**2)
        if held:
            self.held = rate
        else:
            self.broke = rate


def half_width(samples: Sequence[float]) -> float:
    """Of the mean's 95 % confidence interval, by Student's t; 0 with one sample, which says nothing about sureness."""
    if len(samples) < 2:
        return 0.0
    return T95[min(len(samples) - 1, len(T95)) - 1] * stdev(samples) / sqrt(len(samples))


def _mean(attained: Sequence[Attainment]) -> Attainment:
    return Attainment(*(fmean(getattr(each, name) for each in attained) for name in ("ttft", "tpot", "both", "served")))


def _first(item: tuple[tuple[float, int], Attainment]) -> tuple[float, int]:
    return item[0]


def _joined(names: Sequence[str]) -> str:
    return " and ".join(names) or "nothing"
