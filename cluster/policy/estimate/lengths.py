"""Predicts the lengths of answers. Pure.

A wrong prediction costs performance, never correctness: see `expected_tokens`.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import replace
from typing import Protocol

from cluster.policy.estimate.survival import Curve, Histogram
from diptych.slo import Calibration as Calibration
from workers.request import FinishReason, Request

UNBOUNDED_TOKENS = 512  # assumed length of an answer without `max_tokens`
TEMPLATE_TOKENS = 64  # prompts that share their first tokens share a template

_ENOUGH = 8.0  # a histogram needs this many answers that are at least as long
_SCORED = 1000  # predictions in the calibration
_MAX_TEMPLATES = 1024
_MAX_TENANTS = 256


def longest_answer(request: Request) -> int:
    """The longest answer that the request allows. Exact for a replayed trace: its `max_tokens` are true lengths."""
    most = request.sampling.max_tokens
    return max(1, UNBOUNDED_TOKENS if most is None else most - len(request.generated))


class LengthPredictor(Protocol):
    """Predicts how many output tokens are still to come, given a request and the tokens it already has."""

    def mean(self, request: Request) -> float: ...

    def ended(self, request: Request, num_output: int, finish: FinishReason | None) -> None:
        """An answer ended with `num_output` tokens. `finish` None: it was cancelled or failed."""
        ...

    def calibration(self) -> "Calibration": ...


def expected_tokens(lengths: LengthPredictor, request: Request) -> int:
    """The predicted mean, clamped to what is possible: at least 1, at most what the request allows."""
    most, mean = longest_answer(request), lengths.mean(request)
    return round(mean) if 1.0 <= mean <= most else most  # NaN is neither


class LearnedLengths:
    """Learns answer lengths online. Owned by a Policy; memory is bounded, old samples fade.

    Uses the first of these groups that has seen enough answers at least as long as this one already is:

        tenant and template  ──>  tenant, if it has one  ──>  prompts about as long  ──>  all

    Without samples, the prediction is the longest answer that the request allows.
    """

    def __init__(self) -> None:
        self._templates = _RecentHistograms(_MAX_TEMPLATES)
        self._tenants = _RecentHistograms(_MAX_TENANTS)
        self._sizes: dict[int, Histogram] = {}  # prompts of 2^(n-1) to 2^n - 1 tokens
        self._all = Histogram()
        self._scores = Calibration()
        self._asked: tuple[Request, tuple[Curve | None, int, int]] | None = None  # latest request

    def mean(self, request: Request) -> float:
        """At least 1, at most what the request allows."""
        curve, seen, most = self._known(request)
        return float(most - seen) if curve is None else max(1.0, curve.mean(seen, most))

    def ended(self, request: Request, num_output: int, finish: FinishReason | None) -> None:
        """Learn from an answer of `num_output` tokens.

        An answer cut short by `max_tokens` or its client is a censored sample.
        """
        if num_output < 1:
            return
        if finish is not None:
            self._score(replace(request, generated=()) if request.generated else request, num_output)
        self._asked = None
        cut = finish in (None, FinishReason.LENGTH)
        size = len(request.prompt).bit_length()
        self._all.add(num_output, cut)
        self._sizes.setdefault(size, Histogram()).add(num_output, cut)
        self._templates.get_or_create((request.tenant, _template(request))).add(num_output, cut)
        if request.tenant:
            self._tenants.get_or_create(request.tenant).add(num_output, cut)

    def calibration(self) -> Calibration:
        return self._scores

    def _known(self, request: Request) -> tuple[Curve | None, int, int]:
        """The curve to use, the tokens that the answer has, and the most it may get; cached for the latest request."""
        if self._asked is None or self._asked[0] is not request:
            self._asked = request, self._found(request)
        return self._asked[1]

    def _found(self, request: Request) -> tuple[Curve | None, int, int]:
        seen = len(request.generated)
        most = seen + longest_answer(request)
        for group in self._groups(request):
            if group is not None and group.num >= _ENOUGH and group.curve.num_longer(seen) >= _ENOUGH:
                return group.curve, seen, most
        return None, seen, most

    def _groups(self, request: Request) -> Iterable[Histogram | None]:
        tenant = request.tenant
        return (
            self._templates.get((tenant, _template(request))),
            self._tenants.get(tenant) if tenant else None,
            self._sizes.get(len(request.prompt).bit_length()),
            self._all,
        )

    def _score(self, request: Request, num_output: int) -> None:
        curve, _, most = self._known(request)
        if curve is None:
            return
        answers, were = self._scores.answers + 1, self._scores
        weight = 1.0 / min(answers, _SCORED)

        def mean(was: float, new: float) -> float:
            return was + weight * (new - was)

        self._scores = Calibration(
            answers,
            within_p50=mean(were.within_p50, curve.covered(0.5, num_output, most)),
            within_p90=mean(were.within_p90, curve.covered(0.9, num_output, most)),
            error_tokens=mean(were.error_tokens, abs(curve.mean(0, most) - num_output)),
            asked_error_tokens=mean(were.asked_error_tokens, float(abs(most - num_output))),
        )


class _RecentHistograms:
    """At most `most` histograms by key; the least recently updated one is dropped."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._found: OrderedDict[Hashable, Histogram] = OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: Hashable) -> Histogram | None:
        return self._found.get(key)

    def get_or_create(self, key: Hashable) -> Histogram:
        """The key's histogram, created if needed, and marked as recently updated."""
        found = self._found.setdefault(key, Histogram())
        self._found.move_to_end(key)
        if len(self._found) > self._most:
            self._found.popitem(last=False)
        return found


def _template(request: Request) -> int:
    return hash(request.prompt[:TEMPLATE_TOKENS])  # of integers: the same in every process
