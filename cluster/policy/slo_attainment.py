"""Scores requests that have ended: how often SLOs were met, and how far predictions were off. Pure.

TTFT counts from the request's arrival. Prediction errors count from the placement, when the prediction was made. Memory
is bounded, whatever class names clients send.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from cluster.policy.estimate.histograms import RequestTotals
from cluster.policy.estimate.lengths import Calibration
from diptych.slo import ClassScore as ClassScore
from diptych.slo import Errors as Errors
from diptych.slo import SLOAttainment
from diptych.slo import SLOCount as SLOCount

MAX_CLASSES = 64
OTHER = "other"  # the class beyond the limit of classes, and the reason of refusals without one
OUTCOMES = ("completed", "cancelled", "deadline", "refused", "failed", "invalid")
REASONS = ("admission", "no-room", "no-worker", "gateway-full", "queue-full", "waited", OTHER)
KINDS = ("ttft", "tpot")
# Histogram bounds of (actual - predicted) / predicted.
ERROR_BOUNDS = (-0.75, -0.5, -0.25, -0.1, -0.05, 0.0, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0)

_WINDOW = 512  # latest errors of a class in its percentiles
_MAX_ERROR = 1000.0


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that has ended. Times in seconds; None: no such token, prediction or SLO.

    `ttft_s` counts from arrival; `after_placement_s` (to the first token) and `predicted_ttft_s` from the placement.
    A request without a first token `waited_s` for it. `refusal` is the reason of a refusal.
    """

    outcome: str
    class_name: str = "default"
    refusal: str = ""
    ttft_s: float | None = None
    tpot_s: float | None = None
    after_placement_s: float | None = None
    waited_s: float = 0.0
    predicted_ttft_s: float | None = None
    predicted_tpot_s: float | None = None
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None

    def is_met(self, kind: str) -> bool | None:
        """Whether this SLO was met; None: there was none, or it is unknown."""
        if kind == "tpot":
            return _within(self.tpot_s, self.tpot_slo_s)
        if self.ttft_s is None and self.ttft_slo_s is not None and self.outcome != "refused":
            is_missed = self.outcome == "failed" or self.waited_s > self.ttft_slo_s
            return False if is_missed else None
        return _within(self.ttft_s, self.ttft_slo_s)

    def error(self, kind: str) -> float | None:
        """(actual - predicted) / predicted; None: unknown."""
        actual_s, predicted_s = (
            (self.tpot_s, self.predicted_tpot_s) if kind == "tpot" else (self.after_placement_s, self.predicted_ttft_s)
        )
        if actual_s is None or predicted_s is None or not predicted_s > 0.0:
            return None
        return min(actual_s / predicted_s - 1.0, _MAX_ERROR)


@dataclass(frozen=True, slots=True)
class ErrorCounts:
    """A histogram: `counts` up to each of `ERROR_BOUNDS` and above the last; not cumulative."""

    kind: str
    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True, slots=True)
class GatewayAttainment(SLOAttainment):
    """`SLOAttainment` of one gateway, with what only its metrics show."""

    errors: tuple[ErrorCounts, ...] = ()
    moves: tuple[tuple[str, str, int], ...] = ()  # (reason, outcome, count) of migrations and, "requeue", of prompts
    moved_bytes: int = 0
    role_changes: tuple[tuple[str, str, int], ...] = ()  # (old role, new role, count) that this gateway has seen
    fallbacks: tuple[tuple[str, int], ...] = ()  # (role, requests served elsewhere because no worker of it was ready)
    dropped_hashes: tuple[tuple[str, int], ...] = ()  # (tier, hashes for which the prefix index had no room)
    totals: RequestTotals = field(default_factory=RequestTotals)


class _Class:
    def __init__(self) -> None:
        self.requests = 0
        self.settled = dict.fromkeys((*KINDS, "both"), 0)
        self.met = dict.fromkeys((*KINDS, "both"), 0)
        self.errors: dict[str, deque[float]] = {kind: deque(maxlen=_WINDOW) for kind in KINDS}

    def score(self, name: str) -> ClassScore:
        ttft, tpot, both = (SLOCount(self.settled[kind], self.met[kind]) for kind in (*KINDS, "both"))
        return ClassScore(
            name, self.requests, ttft, tpot, both, _errors(self.errors["ttft"]), _errors(self.errors["tpot"])
        )


class SLOScores:
    """The scores of one gateway. Owned by its dispatcher."""

    def __init__(self) -> None:
        self._classes: dict[str, _Class] = {}
        self._outcomes = dict.fromkeys(OUTCOMES, 0)
        self._refused = dict.fromkeys(REASONS, 0)
        self._counts = {kind: [0] * (len(ERROR_BOUNDS) + 1) for kind in KINDS}
        self._totals = dict.fromkeys(KINDS, 0.0)

    def ended(self, ended: Ended) -> None:
        """Score a request; once each."""
        self._outcomes[ended.outcome] += 1
        if ended.outcome == "refused":
            self._refused[ended.refusal if ended.refusal in REASONS else OTHER] += 1
        known = self._class(ended.class_name)
        known.requests += 1
        verdicts = {kind: ended.is_met(kind) for kind in KINDS}
        if None not in verdicts.values():
            verdicts["both"] = all(verdicts.values())
        for kind, is_met in verdicts.items():
            if is_met is not None:
                known.settled[kind] += 1
                known.met[kind] += is_met
        for kind in KINDS:
            error = ended.error(kind)
            if error is not None:
                known.errors[kind].append(error)
                self._counts[kind][bisect_left(ERROR_BOUNDS, error)] += 1
                self._totals[kind] += error

    def attainment(self, calibration: Calibration) -> GatewayAttainment:
        return GatewayAttainment(
            classes=tuple(known.score(name) for name, known in sorted(self._classes.items())),
            outcomes=tuple(self._outcomes.items()),
            refused=tuple(self._refused.items()),
            errors=tuple(ErrorCounts(kind, tuple(self._counts[kind]), self._totals[kind]) for kind in KINDS),
            calibration=calibration,
        )

    def _class(self, name: str) -> _Class:
        if name not in self._classes and len(self._classes) >= MAX_CLASSES - 1:
            name = OTHER
        return self._classes.setdefault(name, _Class())


def _within(actual_s: float | None, slo_s: float | None) -> bool | None:
    return None if actual_s is None or slo_s is None else actual_s <= slo_s


def _errors(found: Iterable[float]) -> Errors | None:
    ordered = sorted(found)
    if not ordered:
        return None
    p10, p50, p90 = (ordered[round(share * (len(ordered) - 1))] for share in (0.1, 0.5, 0.9))
    return Errors(p10, p50, p90)
