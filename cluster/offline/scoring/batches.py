"""Static batches: so many requests at once, and nothing new until the last has ended. Pure.

    duration             from when the batch was sent to its last token
    throughput           output tokens of the whole batch / duration
    latency of a request from when the batch was sent to this request's last token; the average is over requests
    TTFT                 from when the batch was sent to this request's first token

Throughput says what the machine does, latency what one client waits for; neither follows from the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from cluster.offline.scoring.records import RequestOutcome, Run

Spread = tuple[float, float, float]  # median, least, greatest


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch that was sent. Of no finished request there is no average: `latency_s` and `ttft_s` are None."""

    size: int
    finished: int
    output_tokens: int
    duration_s: float
    latency_s: float | None
    ttft_s: float | None

    @property
    def throughput(self) -> float:
        """Output tokens a second, of all its requests together."""
        return self.output_tokens / self.duration_s if self.duration_s > 0.0 else 0.0


@dataclass(frozen=True, slots=True)
class BatchFigures:
    """One size: medians over its repeats, with the least and the greatest."""

    size: int
    repeats: int
    failed: int  # requests, of all repeats
    duration_s: Spread
    throughput: Spread
    latency_s: Spread | None
    ttft_s: Spread | None

    def as_json(self) -> dict[str, Any]:
        import msgspec

        told: dict[str, Any] = msgspec.to_builtins(self)
        return told


def batch(run: Run) -> Batch:
    """A run whose requests were all sent at once."""
    begin_s = min(each.arrival_s for each in run.served)
    done = [each for each in run.served if each.ending is RequestOutcome.FINISHED]
    ends = [each.token_s[-1] - begin_s for each in run.served if len(each.token_s)]
    return Batch(
        size=len(run.served),
        finished=len(done),
        output_tokens=sum(len(each.token_s) for each in run.served),
        duration_s=max(ends, default=0.0),
        latency_s=fmean(each.token_s[-1] - begin_s for each in done) if done else None,
        ttft_s=fmean(each.token_s[0] - begin_s for each in done) if done else None,
    )


def batch_figures(batches: Sequence[Batch]) -> BatchFigures:
    """Of repeats of one size. Raises ValueError when there are none or they differ in size."""
    sizes = {each.size for each in batches}
    if len(sizes) != 1:
        raise ValueError(f"batches of sizes {sorted(sizes)} are no repeats of one")
    latencies = [each.latency_s for each in batches if each.latency_s is not None]
    ttfts = [each.ttft_s for each in batches if each.ttft_s is not None]
    return BatchFigures(
        size=sizes.pop(),
        repeats=len(batches),
        failed=sum(each.size - each.finished for each in batches),
        duration_s=_middle([each.duration_s for each in batches]),
        throughput=_middle([each.throughput for each in batches]),
        latency_s=_middle(latencies) if latencies else None,
        ttft_s=_middle(ttfts) if ttfts else None,
    )


def _middle(samples: Sequence[float]) -> Spread:
    return median(samples), min(samples), max(samples)
