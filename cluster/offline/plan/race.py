"""The first verdict: the layouts that closed forms favor, simulated whole with one seed until one has surely won.

Each contender has a bracket: the highest rate that met the target and the lowest that missed it. All that can still win
are tried at once; one whose bracket ends below the best is tried no more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf, sqrt

from cluster.offline.plan.deploy import Layout
from cluster.offline.plan.request import PlanRequest
from cluster.offline.plan.trial import Option, Trial, full_trial
from cluster.offline.scoring.figures import Attainment
from cluster.offline.scoring.goodput import Goodput, Map, Probe, Search

CLOSE = 0.05  # brackets and values this near to each other count as equal
START, STRIDE = 0.8, 1.3  # of the closed form's rate; between two rates outside the bracket
LENGTHENING = 3  # shorter runs than those of the whole search
MAX_ADDED = 4  # instances added to a layout that does not serve the rate after all


@dataclass(slots=True)
class LayoutContender:
    """`held`: the highest rate that met the target (0: none yet); `broke`: the lowest that missed it."""

    trial: Trial
    cap: float
    held: float = 0.0
    broke: float = inf
    probes: list[Probe] = field(default_factory=list)
    added: int = 0

    def rates(self, count: int) -> list[float]:
        """The next ones to try, the most telling first."""
        if self.held and self.broke < inf:
            step = (self.broke / self.held) ** (1.0 / (count + 1))
            return [self.held * step ** (number + 1) for number in range(count)]
        if self.broke < inf:
            return [self.broke / STRIDE ** (number + 1) for number in range(count)]
        first = self.held * STRIDE or min(START * self.trial.estimate, self.cap)
        found = [min(self.cap, first * sqrt(STRIDE) ** number) for number in range(count)]
        return [rate for rate in dict.fromkeys(found) if rate > self.held]

    def learn(self, probe: Probe, held: bool) -> None:
        self.probes.append(probe)
        if held:
            self.held = max(self.held, probe.rate)
        else:
            self.broke = min(self.broke, probe.rate)

    @property
    def limit(self) -> float:
        """No rate at or above this can be shown to hold."""
        return min(self.broke, self.cap * (1.0 + CLOSE))


class Race:
    """Run by one thread; another may ask for `options` and `decided` at any time.

    `width`: runs at once. `tried(layout, rate)` is called before each run, `on_best(option)` after each better one.
    """

    def __init__(
        self,
        request: PlanRequest,
        layouts: Sequence[Layout],
        each: Map = map,
        width: int = 1,
        tried: Callable[[str, float], None] = lambda layout, rate: None,
        on_best: Callable[[Option], None] = lambda option: None,
    ) -> None:
        self._request = request
        self._each = each
        self._width = width
        self._tried = tried
        self._on_best = on_best
        self._best: tuple[float, ...] = ()
        self.requests = 0
        self.decided = False
        self.contenders = [self._contender(layout) for layout in layouts]

    def _contender(self, layout: Layout) -> LayoutContender:
        trial = replace(full_trial(self._request, layout), give_up=self._request.target, lengthening=LENGTHENING)
        return LayoutContender(trial, trial.max_rate * (1.0 + CLOSE))

    def run(self, past: Callable[[], bool] = lambda: False) -> None:
        """Until a verdict is certain or `past` returns true. Raises `TimeUp` like `each`."""
        while not past() and (wanted := self._wanted()):
            self._try(wanted)
        self.decided = not self._wanted()

    def _try(self, wanted: list[tuple[LayoutContender, float]]) -> None:
        seed, target = self._request.seeds[0], self._request.target
        for one, rate in wanted:
            self._tried(one.trial.layout.description, rate)
        results = self._each(
            _attained, [one.trial for one, _ in wanted], [rate for _, rate in wanted], [seed] * len(wanted)
        )
        for (one, rate), attained in zip(wanted, results, strict=True):
            self.requests += one.trial.count(rate)
            one.learn(Probe(rate, seed, attained), attained.both >= target)
            if attained.both < target and self._request.rate is not None:
                self._enlarge(one, attained)
            option = self._option(one)
            if option is not None and option.merit(self._request) > self._best:
                self._best = option.merit(self._request)
                self._on_best(option)

    def _enlarge(self, one: LayoutContender, attained: Attainment) -> None:
        """One more instance of the phase that misses its SLO, up to the GPUs of the request."""
        layout = enlarged(one.trial.layout, attained, self._request.target)
        if one.added < MAX_ADDED and layout.gpus <= self._request.gpus:
            grown = self._contender(layout)
            one.trial, one.cap, one.broke, one.probes, one.added = grown.trial, grown.cap, inf, [], one.added + 1

    def _wanted(self) -> list[tuple[LayoutContender, float]]:
        """What to run next; empty when nothing more can change the verdict."""
        rate = self._request.rate
        if rate is not None:
            best = min((each.trial.weight for each in self.contenders if each.held), default=inf)
            return [
                (each, rate)
                for each in self.contenders
                if not each.held and each.broke > rate and each.cap >= rate and each.trial.weight <= best
            ]
        alive = [each for each in self.contenders if self._may_win(each)]
        if len(alive) == 1 and alive[0].held:
            return []
        count = max(1, self._width // max(1, len(alive)))
        return [(each, at) for each in alive if self._is_open(each) for at in each.rates(count)]

    def _may_win(self, one: LayoutContender) -> bool:
        best = max((each.held / self._unit(each) for each in self.contenders if each is not one), default=0.0)
        return one.limit / self._unit(one) > best * (1.0 + CLOSE)

    def _is_open(self, one: LayoutContender) -> bool:
        return one.held < one.cap and one.broke > max(one.held, one.cap / 256.0) * (1.0 + CLOSE)

    def _unit(self, one: LayoutContender) -> float:
        return 1.0 if self._request.objective == "throughput" else one.trial.weight

    @property
    def options(self) -> list[Option]:
        """Those that met the target at some rate, as far as they are known."""
        return [option for each in self.contenders if (option := self._option(each))]

    def _option(self, one: LayoutContender) -> Option | None:
        if not one.held:
            return None
        request = self._request
        found = Goodput(
            slo=request.slo,
            target=request.target,
            gpus=one.trial.gpus,
            seeds=request.seeds[:1],
            by_seed=(one.held,),
            rate=one.held,
            low=one.held,
            high=one.held,
            search=Search(one.held, min(one.held, one.cap), max(one.held, one.cap)),
            probes=tuple(sorted(one.probes, key=lambda each: each.rate)),
            complete=False,
            broke=(one.broke if one.broke < inf else None,),
        )
        serves = next((each.attained for each in one.probes if each.rate == request.rate), None)
        return Option(one.trial.layout, one.trial, found, serves)


def _attained(trial: Trial, rate: float, seed: int) -> Attainment:
    return trial(rate, seed)


def enlarged(layout: Layout, attained: Attainment, target: float) -> Layout:
    """One more instance of the phase that misses its SLO."""
    counts = [group.replicas for group in layout.groups]
    misses_tpot = attained.broken(target)[:1] == ("TPOT",)
    counts[-1 if misses_tpot else 0] += 1
    return layout.times(*counts)
