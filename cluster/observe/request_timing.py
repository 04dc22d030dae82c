"""Times and outcome of one request, for `cluster.policy.slo_attainment`. Knows no worker."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from cluster.events import DeadlineExceeded, Rejected, Unservable
from cluster.policy.routing.router import Placement
from cluster.policy.slo_attainment import Ended
from workers.errors import InvalidRequest
from workers.request import SLO


@dataclass(slots=True)
class RequestTiming:
    """Owned by its request's coroutine. Times are seconds of the dispatcher's clock.

    Keeps the prediction of the attempt that sent the first token.
    """

    arrived_s: float
    num_tokens: int = 0
    _placed_s: float = 0.0
    _predicted_ttft_s: float | None = None
    _predicted_tpot_s: float | None = None
    _first_s: float | None = None
    _last_s: float = 0.0

    @property
    def has_begun(self) -> bool:
        """Whether there were tokens."""
        return self._first_s is not None

    def placed(self, placement: Placement, now_s: float) -> None:
        """Workers are chosen. Predictions count from the request's arrival."""
        if self._first_s is None:
            self._placed_s = now_s
            self._predicted_ttft_s, self._predicted_tpot_s = placement.predicted_ttft_s, placement.predicted_tpot_s

    def tokens(self, count: int, times_s: Sequence[float]) -> list[float]:
        """Count new tokens: all at one time, or each at its own.

        Returns the seconds before each of them, equal parts of a gap before several; none for the answer's first.
        """
        self.num_tokens += count
        last_s, self._last_s = self._last_s, times_s[-1]
        if self._first_s is None:
            self._first_s = last_s = times_s[0]
            times_s = times_s[1:]
        if len(times_s) == 1 and count:
            return [(times_s[0] - last_s) / count] * count
        return [now_s - before_s for before_s, now_s in pairwise((last_s, *times_s))]

    def ended(self, slo: SLO, error: BaseException | None, now_s: float) -> Ended:
        """The outcome, to be scored. `error`: None if the request completed."""
        ttft_s = after_placement_s = tpot_s = predicted_s = None
        if self._first_s is not None:
            ttft_s, after_placement_s = self._first_s - self.arrived_s, self._first_s - self._placed_s
        if self._first_s is not None and self.num_tokens > 1:
            tpot_s = (self._last_s - self._first_s) / (self.num_tokens - 1)
        if self._predicted_ttft_s is not None:
            predicted_s = self._predicted_ttft_s - (self._placed_s - self.arrived_s)
        return Ended(
            outcome=_outcome(error),
            class_name=slo.class_name,
            refusal=error.cause if isinstance(error, Rejected) else "",
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            after_placement_s=after_placement_s,
            waited_s=now_s - self.arrived_s,
            predicted_ttft_s=predicted_s,
            predicted_tpot_s=self._predicted_tpot_s,
            ttft_slo_s=slo.ttft_s,
            tpot_slo_s=slo.tpot_s,
        )


def _outcome(error: BaseException | None) -> str:
    match error:
        case None:
            return "completed"
        case Rejected():
            return "refused"
        case DeadlineExceeded():
            return "deadline"
        case Unservable() | InvalidRequest():
            return "invalid"
        case Exception():  # AttemptsExhausted, and unexpected errors
            return "failed"
        case _:
            return "cancelled"
