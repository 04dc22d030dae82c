"""How long an answer will be, before there is one: predictors that routers are handed. Pure.

A prediction is for performance alone: nothing may break when it is wrong, see `expected_tokens`.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from typing import Protocol

from cluster.policy.estimate.survival import Curve, Histogram
from diptych.slo import Calibration as Calibration
from workers.request import FinishReason, Request

Lengths = Callable[[Request], int]  # output tokens still to come, at least 1
UNBOUNDED_TOKENS = 512  # what an answer without a bound is taken for
TEMPLATE_TOKENS = 64  # prompts that begin with the same tokens up to here share a template
BUCKET_TOKENS = 200  # as TetriInfer divides lengths

_ENOUGH = 8.0  # answers at least as long that a histogram must have seen before it is asked
_SCORED = 1000  # predictions that the calibration looks back on
_MOST_TEMPLATES = 1024
_MOST_TENANTS = 256


def asked_length(request: Request) -> int:
    """As long as the request allows. In a replayed trace, which asks for what it got, this is the truth."""
    most = request.sampling.max_tokens
    return max(1, UNBOUNDED_TOKENS if most is None else most - len(request.generated))


class Predictor(Protocol):
    """Predicts the output tokens that are still to come, from a request and the tokens it has already."""

    def __call__(self, request: Request) -> int:
        """The lower bound of the bucket in which their number lies, most likely; at least 1."""
        ...

    def mean(self, request: Request) -> float: ...

    def most(self, request: Request) -> int:
        """Nine of ten answers end within this many tokens."""
        ...

    def ended(self, request: Request, num_output: int, finish: FinishReason | None) -> None:
        """An answer has ended with this many tokens. `finish` None: it was cancelled, or failed."""
        ...

    def calibration(self) -> "Calibration": ...


def expected_tokens(lengths: Predictor, request: Request) -> int:
    """What a predictor means, held to what can be: at least 1, at most what the request allows."""
    most, mean = asked_length(request), lengths.mean(request)
    return round(mean) if 1.0 <= mean <= most else most  # NaN is neither


class Learned:
    """Learns online how long answers get. Owned by a Policy; memory is bounded, old evidence fades.

    A request is judged by the first of these groups that has seen enough answers at least as long as its own is now:

        tenant and template  ──>  tenant, if it has one  ──>  prompts about as long  ──>  all

    With no evidence at all, an answer is taken to be as long as it may.
    """

    def __init__(self) -> None:
        self._templates = _Shelf(_MOST_TEMPLATES)
        self._tenants = _Shelf(_MOST_TENANTS)
        self._sizes: dict[int, Histogram] = {}  # prompts of 2^(n-1) to 2^n - 1 tokens
        self._all = Histogram()
        self._scores = Calibration()
        self._asked: tuple[Request, tuple[Curve | None, int, int]] | None = None  # since an answer was learnt from

    def __call__(self, request: Request) -> int:
        curve, seen, most = self._known(request)
        bucket = (most - seen - 1) // BUCKET_TOKENS if curve is None else curve.likeliest(seen, most, BUCKET_TOKENS)
        return bucket * BUCKET_TOKENS + 1

    def mean(self, request: Request) -> float:
        """At least 1, at most what the request allows."""
        curve, seen, most = self._known(request)
        return float(most - seen) if curve is None else max(1.0, curve.mean(seen, most))

    def most(self, request: Request) -> int:
        """The 90th percentile; at most what the request allows."""
        curve, seen, most = self._known(request)
        return most - seen if curve is None else curve.within(0.9, seen, most) - seen

    def ended(self, request: Request, num_output: int, finish: FinishReason | None) -> None:
        """Learn from an answer of `num_output` tokens.

        One that was cut, by its bound or its client, says only that it would have been longer.
        """
        if num_output < 1:
            return
        if finish is not None:
            self._score(replace(request, generated=()), num_output)
        self._asked = None
        cut = finish in (None, FinishReason.LENGTH)
        size = len(request.prompt).bit_length()
        self._all.add(num_output, cut)
        self._sizes.setdefault(size, Histogram()).add(num_output, cut)
        self._templates.make((request.tenant, _template(request))).add(num_output, cut)
        if request.tenant:
            self._tenants.make(request.tenant).add(num_output, cut)

    def calibration(self) -> Calibration:
        return self._scores

    def _known(self, request: Request) -> tuple[Curve | None, int, int]:
        """The curve to judge by, the tokens that the answer has, and the most that it may get.

        Asked again of the same request, it is the same until something is learnt.
        """
        if self._asked is None or self._asked[0] is not request:
            self._asked = request, self._found(request)
        return self._asked[1]

    def _found(self, request: Request) -> tuple[Curve | None, int, int]:
        seen = len(request.generated)
        most = seen + asked_length(request)
        for group in self._groups(request):
            if group is not None and group.num >= _ENOUGH and group.curve.num_beyond(seen) >= _ENOUGH:
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
        bucket = curve.likeliest(0, most, BUCKET_TOKENS)
        answers, were = self._scores.answers + 1, self._scores
        weight = 1.0 / min(answers, _SCORED)

        def mean(was: float, new: float) -> float:
            return was + weight * (new - was)

        self._scores = Calibration(
            answers,
            within_p50=mean(were.within_p50, curve.covered(0.5, num_output, most)),
            within_p90=mean(were.within_p90, curve.covered(0.9, num_output, most)),
            bucket_share=mean(were.bucket_share, float((num_output - 1) // BUCKET_TOKENS == bucket)),
            error_tokens=mean(were.error_tokens, abs(curve.mean(0, most) - num_output)),
            asked_error_tokens=mean(were.asked_error_tokens, float(abs(most - num_output))),
        )


class _Shelf:
    """Histograms by key; of more than `most`, the one that learnt nothing for longest is dropped."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._found: OrderedDict[Hashable, Histogram] = OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: Hashable) -> Histogram | None:
        return self._found.get(key)

    def make(self, key: Hashable) -> Histogram:
        """The key's own, new if need be; it counts as having learnt."""
        found = self._found.setdefault(key, Histogram())
        self._found.move_to_end(key)
        if len(self._found) > self._most:
            self._found.popitem(last=False)
        return found


def _template(request: Request) -> int:
    return hash(request.prompt[:TEMPLATE_TOKENS])  # of integers: the same in every process
