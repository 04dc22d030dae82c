"""How long prompts and answers are: distributions that draw one pair of lengths for each request. Knows no time.

A prompt above 512 tokens and an answer above 128 are long; the borders are TetriInfer's (Hu et al., 2024). The mixes'
lengths are log-normal between their borders.
"""

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.offline.workload.arrivals import MOST_TOKENS, Arrival, WorkloadError


class Distribution(Protocol):
    """Of one length, in tokens."""

    def draw(self, source: random.Random) -> int: ...


class Lengths(Protocol):
    """Of a prompt and its answer, in tokens."""

    def draw(self, source: random.Random) -> tuple[int, int]: ...


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normal with this median, drawn again until it lies between `least` and `most`."""

    median: int
    sigma: float
    least: int
    most: int

    def draw(self, source: random.Random) -> int:
        while True:
            drawn = round(self.median * math.exp(source.gauss(0.0, self.sigma)))
            if self.least <= drawn <= self.most:
                return drawn


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every length from `least` to `most` is as likely as any other; both the same: a fixed length."""

    least: int
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most <= MOST_TOKENS:
            raise WorkloadError(
                f"lengths {self.least}-{self.most}: write the shorter first, from 1 to {MOST_TOKENS:,} tokens"
            )

    def draw(self, source: random.Random) -> int:
        return source.randint(self.least, self.most)


@dataclass(frozen=True, slots=True)
class LengthMix:
    """Each request is of one of these kinds (of prompt, of answer), all equally likely."""

    kinds: Sequence[tuple[Distribution, Distribution]]

    def draw(self, source: random.Random) -> tuple[int, int]:
        prompt, output = source.choice(self.kinds)
        return prompt.draw(source), output.draw(source)


@dataclass(frozen=True, slots=True)
class Resampled:
    """Pairs seen elsewhere, drawn with replacement: a prompt keeps its own answer."""

    pairs: Sequence[tuple[int, int]]

    @classmethod
    def of(cls, arrivals: Sequence[Arrival]) -> "Resampled":
        return cls([(each.prompt_tokens, each.output_tokens) for each in arrivals])

    def draw(self, source: random.Random) -> tuple[int, int]:
        return source.choice(self.pairs)


SHORT_PROMPT, LONG_PROMPT = LogNormal(128, 0.7, 16, 512), LogNormal(1024, 0.4, 513, 2048)
SHORT_ANSWER, LONG_ANSWER = LogNormal(32, 0.7, 4, 128), LogNormal(256, 0.4, 129, 512)
_PURE = {
    "short/short": (SHORT_PROMPT, SHORT_ANSWER),
    "short/long": (SHORT_PROMPT, LONG_ANSWER),
    "long/short": (LONG_PROMPT, SHORT_ANSWER),
    "long/long": (LONG_PROMPT, LONG_ANSWER),
}
# prompt/answer -> what a request is drawn from
KINDS = {name: (kind,) for name, kind in _PURE.items()} | {"mixed": tuple(_PURE.values())}
MIXES = {name: LengthMix(kinds) for name, kinds in KINDS.items()}

_WRITTEN = re.compile(r"(?:([1-9]\d?)x)?(\d{1,9})(?:-(\d{1,9}))?/(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)


def written(text: str) -> Lengths | None:
    """A mix by name, or `PROMPT/OUTPUT` where each is a number or a range (`1500-2000/500`). None: neither.

    Several with `+` between are a mix of one's own: `4x64/48+1024/48`, of five requests one is long.
    """
    if text in MIXES:
        return MIXES[text]
    kinds: list[tuple[Distribution, Distribution]] = []
    for part in text.split("+"):
        found = _WRITTEN.fullmatch(part)
        if found is None:
            return None
        times, least, most, shortest, longest = found.groups()
        prompt, output = Uniform(int(least), int(most or least)), Uniform(int(shortest), int(longest or shortest))
        kinds += int(times or 1) * [(prompt, output)]
    return LengthMix(kinds)
