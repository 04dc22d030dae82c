"""Learns the ratio of measured to predicted time for each worker. Pure; knows no costs and no requests."""

import math

_FADE = 0.98  # factor on old samples with each new one: about the latest fifty count
_PRIOR = 4.0  # number of samples that configured costs count as
_MAX_DEVIATION = 4.0  # factor by which a sample may differ from the ratio: a stall says nothing about speed
_TOGETHER = 0.05  # a sample that took a smaller share of its prediction was computed with the one before
_BOUND = 100.0  # largest ratio
_FRESH_S, _HALVES_S = 60.0, 60.0
_DIGITS = 2


class Correction:
    """Measured seconds per predicted second: a ratio of two fading sums, so that long samples weigh more.

    The newest sample stays separate until the next one: samples that end with it were computed in the same steps.
    """

    def __init__(self, prior_s: float) -> None:
        self._measured_s = self._predicted_s = prior_s
        self._newest_measured_s = self._newest_predicted_s = 0.0
        self._when_s = 0.0
        self._ratio = self._rounded = 1.0

    def learn(self, measured_s: float, predicted_s: float, now_s: float) -> None:
        """Add a sample; `predicted_s` is above 0."""
        self._when_s = now_s
        if self._newest_predicted_s and measured_s < _TOGETHER * predicted_s * self._ratio:
            self._newest_measured_s += measured_s
            self._newest_predicted_s += predicted_s
        else:
            self._measured_s = self._measured_s * _FADE + self._clipped_newest_s()
            self._predicted_s = self._predicted_s * _FADE + self._newest_predicted_s
            self._newest_measured_s, self._newest_predicted_s = measured_s, predicted_s
        self._ratio = bounded(
            (self._measured_s + self._clipped_newest_s()) / (self._predicted_s + self._newest_predicted_s)
        )
        self._rounded = round(self._ratio, _DIGITS)

    def at(self, now_s: float) -> float:
        """The ratio. Above 1 it fades without new samples, since a worker that is avoided gives none."""
        silent_s = now_s - self._when_s - _FRESH_S
        if silent_s <= 0.0 or self._ratio <= 1.0:
            return self._ratio
        return 1.0 + (self._ratio - 1.0) * math.exp2(-silent_s / _HALVES_S)

    def rounded(self, now_s: float) -> float:
        """The ratio, rounded to hundredths."""
        ratio = self.at(now_s)
        return self._rounded if ratio == self._ratio else round(ratio, _DIGITS)

    def _clipped_newest_s(self) -> float:
        """Measured seconds that the newest sample counts for."""
        expected_s = self._newest_predicted_s * bounded(self._measured_s / self._predicted_s)
        return min(max(self._newest_measured_s, expected_s / _MAX_DEVIATION), expected_s * _MAX_DEVIATION)


class Corrections:
    """One for each worker; 1 for a worker without samples."""

    def __init__(self) -> None:
        self._by_worker: dict[str, Correction] = {}

    def ratio(self, worker: str, now_s: float) -> float:
        found = self._by_worker.get(worker)
        return 1.0 if found is None else found.at(now_s)

    def rounded(self, worker: str, now_s: float) -> float:
        """The same, rounded to hundredths."""
        found = self._by_worker.get(worker)
        return 1.0 if found is None else found.rounded(now_s)

    def learn(self, worker: str, measured_s: float, predicted_s: float, now_s: float) -> None:
        """Add a sample; `predicted_s`, above 0, is by costs alone, which outweigh the first samples."""
        found = self._by_worker.get(worker)
        if found is None:
            found = self._by_worker[worker] = Correction(_PRIOR * predicted_s)
        found.learn(measured_s, predicted_s, now_s)


def bounded(ratio: float) -> float:
    return min(max(ratio, 1 / _BOUND), _BOUND)
