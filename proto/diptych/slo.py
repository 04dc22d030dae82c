"""SLO attainment and prediction quality of one gateway since it started. Pure."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Calibration:
    """Accuracy of recent length predictions. Each answer is scored against the state before it was learned.

    `within_p50`, `within_p90`: shares of answers within the predicted percentiles; 0.5 and 0.9 are ideal. If many
    answers have the same length, the part of them that the percentile covers counts. Errors are mean absolute errors in
    tokens, of the prediction and of `longest_answer` for the same answers.
    """

    answers: int = 0  # scored since the start
    within_p50: float = 0.0
    within_p90: float = 0.0
    error_tokens: float = 0.0
    asked_error_tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class SLOCount:
    """SLOs of one kind: those with a known outcome (`settled`), and those of them that were met (`kept`)."""

    settled: int = 0
    kept: int = 0

    @property
    def share(self) -> float | None:
        return self.kept / self.settled if self.settled else None


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors of recent predictions: percentiles of (measured - predicted) / predicted."""

    p10: float
    p50: float
    p90: float


@dataclass(frozen=True, slots=True)
class ClassScore:
    """One SLO class; where there are several models, of one of them. `both`: requests with both SLOs, both settled.
    Errors None: no prediction yet.
    """

    name: str
    requests: int
    ttft: SLOCount
    tpot: SLOCount
    both: SLOCount
    ttft_errors: Errors | None = None
    tpot_errors: Errors | None = None
    model: str = ""


@dataclass(frozen=True, slots=True)
class SLOAttainment:
    """`outcomes` and `refused` (by reason) are counts of requests; `queued` requests wait in the gateway."""

    classes: tuple[ClassScore, ...] = ()
    outcomes: tuple[tuple[str, int], ...] = ()
    refused: tuple[tuple[str, int], ...] = ()
    calibration: Calibration = field(default_factory=Calibration)
    queued: int = 0
