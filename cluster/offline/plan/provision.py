"""How many prompt machines and token machines of which kinds: Splitwise's provisioning, by simulation.

Patel et al., Splitwise (ISCA'24), section 4.4: a design names the kind of each phase's machines. A point of a design is
a number of each; it will do when two minutes of load keep all nine bounds on slowdown against an idle A100. What will
do still does with one machine more, so only the border between the two is walked.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import product
from typing import Any

from cluster.offline.plan.asked import Asked, PlanError
from cluster.offline.plan.deploy import Group, Layout
from cluster.offline.plan.estimate import Estimate, estimate, median_and_p99, thinned
from cluster.offline.plan.placement import Told
from cluster.offline.plan.search import SLACK, Effort, Found, best_of
from cluster.offline.plan.trial import Trial, whole
from cluster.offline.scoring.figures import Attainment
from cluster.offline.scoring.goodput import Map, TimeUp
from cluster.offline.scoring.scores import NineWay, nine_way
from cluster.spec import Role
from workers.costs import CostModel
from workers.profiles.sources import cost_of
from workers.request import SLO

MACHINE = 8  # GPUs, one tensor-parallel worker
SPAN_S = 120.0
OUTLINED = 3  # points of the closed-form answer
REFERENCE = "a100-80gb"  # the idle machine that slowdowns are counted against
LETTERS = {"a100-80gb": "A", "h100-80gb": "H", "h100-80gb-pcap": "Hcap"}


@dataclass(frozen=True, slots=True)
class Design:
    """Kinds of the prompt and of the token machines."""

    prompt: str
    token: str

    @property
    def name(self) -> str:
        """`HA`, or `HHcap`, where the kinds have letters."""
        return "".join(LETTERS.get(kind, f"[{kind}]") for kind in (self.prompt, self.token))

    def layout(self, prompts: int, tokens: int) -> Layout:
        groups = (
            Group(Role.PREFILL, self.prompt, MACHINE, 1, prompts, "prefill-first"),
            Group(Role.DECODE, self.token, MACHINE, 1, tokens, "prefill-first"),
        )
        return Layout("split", groups, "splitwise")


def designs(kinds: Sequence[str]) -> list[Design]:
    """Every pair of kinds but those whose prompts run under a power cap: prompts cannot bear it."""
    return [Design(prompt, token) for prompt, token in product(kinds, kinds) if not prompt.endswith("-pcap")]


@dataclass(frozen=True, slots=True)
class Point:
    """A design with numbers of machines; `weight` in the objective's unit."""

    design: Design
    prompts: int
    tokens: int
    weight: float

    @property
    def told(self) -> str:
        return f"{self.design.name}: {self.prompts} prompt and {self.tokens} token machines"


@dataclass(frozen=True, slots=True)
class Provisioned:
    """`points`: for a rate, the border of what will do, the least weight first. `rates`: for most throughput, what each
    point serves. `tried`: points that were simulated. Unless `complete` the time was up before all were."""

    points: tuple[Point, ...]
    rates: tuple[float, ...] = ()
    tried: int = 0
    complete: bool = True


def border(will_do: Callable[[int, int], bool], most: int) -> list[tuple[int, int]]:
    """The pairs (prompts, tokens), at most `most` together, that will do and with one of either less will not.

    `will_do` must stay true with more of either. Walks the border: about `most` questions instead of most²/2.
    """
    found: list[tuple[int, int]] = []
    tokens = 1
    for prompts in range(most - 1, 0, -1):
        while prompts + tokens <= most and not will_do(prompts, tokens):
            tokens += 1
        if prompts + tokens <= most:
            if found and found[-1][1] == tokens:
                found.pop()  # fewer prompt machines do as well
            found.append((prompts, tokens))
    return found


@dataclass(frozen=True, slots=True)
class NineTrial:
    """Attains everything when all nine bounds hold, and nothing else does."""

    trial: Trial
    point: Point
    reference: "Reference"

    @property
    def name(self) -> str:
        return self.trial.name

    @property
    def slo(self) -> SLO:
        return self.trial.slo

    @property
    def gpus(self) -> int:
        return self.trial.gpus

    @property
    def weight(self) -> float:
        return self.trial.weight

    @property
    def estimate(self) -> float:
        return self.trial.estimate

    @property
    def most(self) -> float:
        return self.trial.most

    @property
    def alone(self) -> float:
        """Bounds are multiples of what a request takes alone: every machine near the reference's kind has a chance."""
        return 1.0

    @property
    def requests(self) -> int:
        return self.trial.requests

    def judged(self, rate: float, seed: int, span_s: float = SPAN_S) -> NineWay:
        count = max(self.trial.requests, math.ceil(rate * span_s))
        run = replace(self.trial, requests=count, cut=False).run(rate, seed)
        return nine_way(run, self.reference)

    def __call__(self, rate: float, seed: int) -> Attainment:
        met = float(self.judged(rate, seed).met)
        return Attainment(met, met, met, met)


@dataclass(frozen=True, slots=True)
class Reference:
    """Seconds to the first token, and for each further one, of a request on an idle A100 machine."""

    model: str

    def __call__(self, prompt: int, output: int) -> tuple[float, float]:
        cost = _reference_cost(self.model)
        return cost.prefill_seconds(prompt), cost.decode_seconds(1, prompt + output // 2)


@cache
def _reference_cost(model: str) -> CostModel:
    return cost_of(model, REFERENCE, MACHINE)


def provision(asked: Asked, machines: int, each: Map = map, told: Told = lambda what, how_far: None) -> Provisioned:
    """With a rate: what serves it, the least of the objective first. Without: what serves most for the same weight as
    `machines` machines of the first kind have. Raises `PlanError` when nothing does."""
    kinds = designs(asked.hardware)
    if asked.rate is not None:
        found = _walked(asked, machines, kinds, each, told)
    else:
        found = _most(asked, machines, kinds, each, told)
    if not found.points and found.complete:
        raise PlanError(_nothing(asked, machines, kinds, each))
    return found


def _most(asked: Asked, machines: int, kinds: Sequence[Design], each: Map, told: Told) -> Provisioned:
    points = _within(asked, machines, kinds)
    trials = [_trial(asked, point) for point in points]
    effort = Effort(1.0, asked.seeds[:1], max(0.05, asked.tolerance), asked.most_requests)

    def tell(done: int, total: int, best: Found[NineTrial] | None) -> None:
        so_far = f"; best {best.candidate.point.told}: {best.rate:.4g} requests/s" if best and best.rate else ""
        told("designs for the same " + asked.unit, f"{done} of {total}{so_far}")

    ranking = best_of(trials, effort, each, told=tell)
    best = tuple(found.candidate.point for found in ranking.best)
    return Provisioned(best, tuple(found.rate for found in ranking.best), len(points), not ranking.hurried)


def _walked(asked: Asked, machines: int, kinds: Sequence[Design], each: Map, told: Told) -> Provisioned:
    """The designs one after another, each with the seeds at the same time. A border that was not walked to its end in
    time still says what serves the rate."""
    walk = _Walk(asked, asked.rate or 0.0, each, told)
    points: list[Point] = []
    for design in kinds:
        served_before = len(walk.serve)
        try:
            points += [_point(asked, design, *pair) for pair in border(partial(walk.will_do, design), machines)]
        except TimeUp:
            walk.complete = False
            points += sorted(walk.serve[served_before:], key=_weight)[:1]
    return Provisioned(tuple(sorted(points, key=_weight)), (), walk.tried, walk.complete)


@dataclass(slots=True)
class _Walk:
    """Along the borders. `serve`: all points that serve the rate, as they were found."""

    asked: Asked
    rate: float
    each: Map
    told: Told
    serve: list[Point] = field(default_factory=list)
    tried: int = 0
    complete: bool = True

    def will_do(self, design: Design, prompts: int, tokens: int) -> bool:
        point = _point(self.asked, design, prompts, tokens)
        trial = _trial(self.asked, point)
        if trial.most * SLACK < self.rate:
            return False
        self.tried += 1
        best = min(self.serve, key=_weight, default=None)
        so_far = f"best {best.told}: {best.weight:g} {self.asked.unit}" if best else "nothing serves it yet"
        self.told(f"border of {design.name}", f"trying {prompts} and {tokens} machines; {so_far}")
        does = _keeps(trial, self.rate, self.asked.seeds, self.each)
        self.serve += [point] if does else []
        return does


def _weight(point: Point) -> float:
    return point.weight


def _keeps(trial: NineTrial, rate: float, seeds: Sequence[int], each: Map) -> bool:
    """The first seed alone: most that break do with any."""
    judged = partial(_met, trial, rate)
    return all(each(judged, seeds[:1])) and all(each(judged, seeds[1:]))


def _met(trial: NineTrial, rate: float, seed: int) -> bool:
    return trial.judged(rate, seed).met


def estimates(asked: Asked, machines: int) -> list[Estimate]:
    """Before anything is simulated: with a rate, the least of each design; without, what serves most. TTFT and TPOT
    are held to the promise, not to the nine bounds."""
    short = replace(asked, load=thinned(asked.load))
    kinds = designs(asked.hardware)

    def trial(point: Point) -> Trial:
        return whole(short, point.design.layout(point.prompts, point.tokens))

    if asked.rate is not None:
        rate, found = asked.rate, []
        for design in kinds:
            pairs = border(lambda *pair, of=design: trial(_point(short, of, *pair)).estimate >= rate, machines)
            weighed = [_point(short, design, *pair) for pair in pairs]
            found += sorted(weighed, key=_weight)[:1]
    else:
        points = _within(short, machines, kinds)
        found = sorted(points, key=lambda point: -trial(point).estimate)[:OUTLINED]
    ends = median_and_p99(asked.load)
    return [estimate(trial(point), ends, asked.target, point.told) for point in found]


def _within(asked: Asked, machines: int, kinds: Sequence[Design]) -> list[Point]:
    budget = machines * MACHINE * asked.weight(asked.hardware[0])
    return [point for design in kinds for point in _affordable(asked, design, budget)]


def _point(asked: Asked, design: Design, prompts: int, tokens: int) -> Point:
    weights = MACHINE * asked.weight(design.prompt), MACHINE * asked.weight(design.token)
    return Point(design, prompts, tokens, prompts * weights[0] + tokens * weights[1])


def _affordable(asked: Asked, design: Design, budget: float) -> list[Point]:
    """For each number of prompt machines as many token machines as the rest pays for."""
    prompt, token = MACHINE * asked.weight(design.prompt), MACHINE * asked.weight(design.token)
    most = int(budget / prompt + 1e-9)
    pairs = [(count, int((budget - count * prompt) / token + 1e-9)) for count in range(1, most + 1)]
    return [_point(asked, design, *pair) for pair in pairs if pair[1] >= 1]


def _trial(asked: Asked, point: Point) -> NineTrial:
    """Points of one budget: what counts is the rate alone."""
    trial = whole(asked, point.design.layout(point.prompts, point.tokens))
    return NineTrial(replace(trial, weight=1.0), point, Reference(asked.model))


def _nothing(asked: Asked, machines: int, kinds: Sequence[Design], each: Map) -> str:
    half = machines // 2
    point = _point(asked, kinds[0], machines - half, half)
    what = f"{asked.rate:g} requests/s" if asked.rate is not None else "any rate"
    words = f"no design on {machines} machines keeps the nine bounds on slowdown at {what}"
    try:
        (broken,) = each(partial(_broken, _trial(asked, point), asked.rate or 0.1), asked.seeds[:1])
    except TimeUp:
        return words
    return f"{words}; with {point.told}: {', '.join(broken)}"


def _broken(trial: NineTrial, rate: float, seed: int) -> tuple[str, ...]:
    return trial.judged(rate, seed, span_s=0.0).broken


def told_of(asked: Asked, found: Provisioned) -> list[str]:
    lines = [
        f"{asked.shape.name} for {asked.load.source.name}: P50, P90 and P99 of TTFT, TBT and E2E within Splitwise's"
    ]
    lines.append(f"slowdowns against an idle {REFERENCE}; {found.tried} points tried")
    if not found.points:
        lines.append("  nothing was found in time")
    for number, point in enumerate(found.points):
        serves = f", {found.rates[number]:.4g} requests/s" if found.rates else f" serve {asked.rate:g} requests/s"
        lines.append(f"  {point.told}{serves}: {point.weight:g} {asked.unit}")
    return lines


def as_json(asked: Asked, found: Provisioned) -> dict[str, Any]:
    rates = found.rates or (asked.rate,) * len(found.points)
    return {
        "model": asked.model,
        "workload": asked.load.source.name,
        "objective": asked.objective,
        "tried": found.tried,
        "complete": found.complete,
        "points": [
            {
                "design": point.design.name,
                "prompt_machines": point.prompts,
                "token_machines": point.tokens,
                "weight": point.weight,
                "unit": asked.unit,
                "requests_per_s": rate,
            }
            for point, rate in zip(found.points, rates, strict=True)
        ],
    }
