"""How much longer things take than predicted, learned worker by worker. Pure; knows no costs and no requests."""

import math

_FADE = 0.98  # of the evidence, with each piece that is added: about the latest fifty count
_PRIOR = 4.0  # pieces of evidence that costs which were given are worth
_SURPRISE = 4.0  # no piece counts as more than this much off what was expected: a stall is not a worker's speed
_TOGETHER = 0.05  # what took less of its time than this was done in one with the piece before
_BOUND = 100.0  # what is this much off was no measurement
_FRESH_S, _HALVES_S = 60.0, 60.0
_DIGITS = 2


class Correction:
    """Seconds seen for each second predicted: a ratio of sums, both fading, so that long pieces say more.

    The newest piece stands apart until the next one comes: what ends with it was computed in the same steps.
    """

    __slots__ = ("_newest_seen_s", "_newest_told_s", "_ratio", "_rounded", "_seen_s", "_told_s", "_when_s")

    def __init__(self, prior_s: float) -> None:
        self._seen_s = self._told_s = prior_s
        self._newest_seen_s = self._newest_told_s = 0.0
        self._when_s = 0.0
        self._ratio = self._rounded = 1.0

    def learn(self, seen_s: float, told_s: float, now_s: float) -> None:
        """`told_s` is above 0."""
        self._when_s = now_s
        if self._newest_told_s and seen_s < _TOGETHER * told_s * self._ratio:
            self._newest_seen_s += seen_s
            self._newest_told_s += told_s
        else:
            self._seen_s = self._seen_s * _FADE + self._believed_s()
            self._told_s = self._told_s * _FADE + self._newest_told_s
            self._newest_seen_s, self._newest_told_s = seen_s, told_s
        self._ratio = bounded((self._seen_s + self._believed_s()) / (self._told_s + self._newest_told_s))
        self._rounded = round(self._ratio, _DIGITS)

    def at(self, now_s: float) -> float:
        """The ratio. Above 1 it fades without new samples, since an avoided worker gives none."""
        silent_s = now_s - self._when_s - _FRESH_S
        if silent_s <= 0.0 or self._ratio <= 1.0:
            return self._ratio
        return 1.0 + (self._ratio - 1.0) * math.exp2(-silent_s / _HALVES_S)

    def rounded(self, now_s: float) -> float:
        """The ratio to the hundredth."""
        ratio = self.at(now_s)
        return self._rounded if ratio == self._ratio else round(ratio, _DIGITS)

    def _believed_s(self) -> float:
        """What the newest piece counts for."""
        if not self._told_s:
            return self._newest_seen_s  # the first of all, about a guess
        expected_s = self._newest_told_s * bounded(self._seen_s / self._told_s)
        return min(max(self._newest_seen_s, expected_s / _SURPRISE), expected_s * _SURPRISE)


class Corrections:
    """By worker; 1 for one without observations."""

    def __init__(self) -> None:
        self._found: dict[str, Correction] = {}

    def __contains__(self, worker: str) -> bool:
        return worker in self._found

    def ratio(self, worker: str, now_s: float) -> float:
        found = self._found.get(worker)
        return 1.0 if found is None else found.at(now_s)

    def rounded(self, worker: str, now_s: float) -> float:
        """The same to the hundredth."""
        found = self._found.get(worker)
        return 1.0 if found is None else found.rounded(now_s)

    def learn(self, worker: str, seen_s: float, told_s: float, now_s: float, *, is_guess: bool) -> None:
        """What was predicted by costs alone, above 0, took so long. Given costs outweigh the first observations."""
        found = self._found.get(worker)
        if found is None:
            found = self._found[worker] = Correction(0.0 if is_guess else _PRIOR * told_s)
        found.learn(seen_s, told_s, now_s)


def bounded(ratio: float) -> float:
    return min(max(ratio, 1 / _BOUND), _BOUND)
