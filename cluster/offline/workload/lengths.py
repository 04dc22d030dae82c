"""Distributions of prompt and output lengths; each draw is one pair of lengths.

A prompt above 512 tokens and an output above 128 are long, as in TetriInfer (Hu et al., 2024). Lengths of the mixes are
log-normal within those bounds.
"""

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.offline.workload.arrivals import MAX_TOKENS, Arrival, WorkloadError


class Distribution(Protocol):
    """A distribution of lengths in tokens."""

    def draw(self, source: random.Random) -> int: ...


class Lengths(Protocol):
    """A distribution of (prompt, output) lengths in tokens."""

    def draw(self, source: random.Random) -> tuple[int, int]: ...


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normal with this median, truncated to `least`..`most` by rejection."""

    median: int
    sigma: float
    least: int
    most: int

    def draw(self, source: random.Random) -> int:
        while True:
            length = round(self.median * math.exp(source.gauss(0.0, self.sigma)))
            if self.least <= length <= self.most:
                return length


@dataclass(frozen=True, slots=True)
class Uniform:
    """Uniform from `least` to `most`; a fixed length if they are equal."""

    least: int
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most <= MAX_TOKENS:
            raise WorkloadError(
                f"lengths {self.least}-{self.most}: write the shorter first, from 1 to {MAX_TOKENS:,} tokens"
            )

    def draw(self, source: random.Random) -> int:
        return source.randint(self.least, self.most)


@dataclass(frozen=True, slots=True)
class LengthMix:
    """A mix of (prompt, output) distributions, all equally likely."""

    kinds: Sequence[tuple[Distribution, Distribution]]

    def draw(self, source: random.Random) -> tuple[int, int]:
        prompt, output = source.choice(self.kinds)
        return prompt.draw(source), output.draw(source)


@dataclass(frozen=True, slots=True)
class Resampled:
    """Pairs of a trace, drawn with replacement; a prompt keeps its own output length."""

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

_LENGTHS = re.compile(r"(?:([1-9]\d?)x)?(\d{1,9})(?:-(\d{1,9}))?/(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)


def parse_lengths(text: str) -> Lengths | None:
    """Parse a mix's name, or `PROMPT/OUTPUT` where each is a number or a range (`1500-2000/500`). None: invalid.

    `+` makes a mix: with `4x64/48+1024/48`, one in five requests is long.
    """
    if text in MIXES:
        return MIXES[text]
    kinds: list[tuple[Distribution, Distribution]] = []
    for part in text.split("+"):
        found = _LENGTHS.fullmatch(part)
        if found is None:
            return None
        times, least, most, shortest, longest = found.groups()
        prompt, output = Uniform(int(least), int(most or least)), Uniform(int(shortest), int(longest or shortest))
        kinds += int(times or 1) * [(prompt, output)]
    return LengthMix(kinds)
