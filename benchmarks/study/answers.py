"""Latency and throughput figures of a run. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, quantiles

from benchmarks.study.workload import StudyRequest


@dataclass(frozen=True, slots=True)
class StudyAnswer:
    """Token times of one request, in seconds on the clock of its arrival; at least two."""

    request: StudyRequest
    token_s: tuple[float, ...]

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.request.at_s

    @property
    def tpot_s(self) -> float:
        """Mean time for a token after the first."""
        return (self.token_s[-1] - self.token_s[0]) / (len(self.token_s) - 1)

    @property
    def worst_gap_s(self) -> float:
        """The longest gap between two consecutive tokens."""
        return max(later - sooner for sooner, later in zip(self.token_s, self.token_s[1:], strict=False))


@dataclass(frozen=True, slots=True)
class StudyRun:
    """All answers of one seed."""

    answers: tuple[StudyAnswer, ...]
    preemptions: int

    @property
    def seconds(self) -> float:
        """From the first arrival to the last token."""
        return max(each.token_s[-1] for each in self.answers) - min(each.request.at_s for each in self.answers)


@dataclass(frozen=True, slots=True)
class StudyFigures:
    """Percentiles over the requests of all seeds; `gap_*` over each request's worst gap. Rates are per second."""

    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    tpot_p90_s: float
    gap_p99_s: float
    gap_max_s: float
    requests_rate: float
    output_rate: float
    total_rate: float
    preemptions: int


def run(asked: Sequence[StudyRequest], token_s: Mapping[str, Sequence[float]], preemptions: int) -> StudyRun:
    """Raises ValueError when a request lacks tokens."""
    for each in asked:
        if len(token_s[each.request_key]) != each.answer_tokens:
            raise ValueError(f"{each.key} got {len(token_s[each.request_key])} of {each.answer_tokens} tokens")
    return StudyRun(tuple(StudyAnswer(each, tuple(token_s[each.request_key])) for each in asked), preemptions)


def figures(runs: Sequence[StudyRun]) -> StudyFigures:
    answers = [answer for each in runs for answer in each.answers]
    ttft, tpot, gaps = ([getattr(each, name) for each in answers] for name in ("ttft_s", "tpot_s", "worst_gap_s"))
    seconds = sum(each.seconds for each in runs)
    output = sum(len(each.token_s) for each in answers)
    prompts = sum(each.request.prompt_tokens for each in answers)
    return StudyFigures(
        ttft_p50_s=percentile(ttft, 50),
        ttft_p90_s=percentile(ttft, 90),
        ttft_p99_s=percentile(ttft, 99),
        tpot_mean_s=fmean(tpot),
        tpot_p90_s=percentile(tpot, 90),
        gap_p99_s=percentile(gaps, 99),
        gap_max_s=max(gaps),
        requests_rate=len(answers) / seconds,
        output_rate=output / seconds,
        total_rate=(output + prompts) / seconds,
        preemptions=sum(each.preemptions for each in runs),
    )


def percentile(values: Sequence[float], which: int) -> float:
    """Interpolated between neighbors; the minimum is the 0th percentile, the maximum the 100th."""
    return quantiles(values, n=100, method="inclusive")[which - 1]
