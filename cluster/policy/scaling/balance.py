"""How well a fleet with given roles would meet its SLOs under a given load: closed forms, no simulation. Pure.

Decodes are spread so that all steps take equally long (Little's law); prompts get the time that decodes leave, and wait
as in an M/D/1 queue that all who compute prompts share. What comes out is the load as a share of the most with which
each promise holds: above 1 it breaks. Shares of time promised would not do: a step of one sequence takes half of what a
full one does, and says nothing of how many more there is room for.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.spec import Role
from workers.config import ADAPTIVE_MARGIN
from workers.costs import CostModel

_SATURATED = 0.95  # of what workers can do: from there on the wait is not a matter of chance any more
_ALL = 2.0  # so much more does a share count by which steps are too long: not for some, but for all
_STEEP = 20.0  # so much more does a share count for which there is no decode room
_TAIL = 2.0  # times the mean wait: about what one request in ten waits for
_HALVINGS = 24
_LEAST_CHUNK = 16


@dataclass(frozen=True, slots=True)
class Group:
    """Workers that are alike. `kv_tokens` and `most_running` are of one; `count` may be 0."""

    pool: str
    role: Role
    count: int
    cost: CostModel
    kv_tokens: int
    most_running: int


@dataclass(frozen=True, slots=True)
class Mix:
    """A load: requests a second, their mean tokens, and their SLOs. None: no SLO.

    `computed_tokens` of a prompt are not cached; `spread` is the squared coefficient of variation of a prompt's work.
    `backlog`: prompts that wait, as so many a second more to compute. `answers`: what decodes, where that is still
    another load than what comes; None: the same. `requests`: of how many it was seen; `is_known`: some of them
    have ended, and said what of their prompts was cached.
    """

    rate: float
    prompt_tokens: float
    computed_tokens: float
    output_tokens: float
    ttft_s: float | None
    tpot_s: float | None
    spread: float = 1.0
    backlog: float = 0.0
    answers: "Answers | None" = None
    requests: float = math.inf
    is_known: bool = True

    @property
    def doubt(self) -> float:
        """The share by which so few requests, come at random, are off: one standard deviation."""
        return min(1.0, math.sqrt((1.0 + self.spread) / max(1.0, self.requests)))

    @property
    def decoded(self) -> "Answers":
        return self.answers or Answers(self.rate, self.prompt_tokens, self.output_tokens)


@dataclass(frozen=True, slots=True)
class Answers:
    """Requests a second that go on to decode, and their mean tokens. `running`: so many decode now; `soon`: no more
    will before the next step can be taken.
    """

    rate: float
    prompt_tokens: float
    output_tokens: float
    running: float = 0.0
    soon: float = math.inf

    @property
    def context(self) -> float:
        """Tokens of a sequence half way."""
        return self.prompt_tokens + self.output_tokens / 2


@dataclass(frozen=True, slots=True)
class Shares:
    """The load as a share of the highest load that meets each SLO: 1 is full."""

    ttft: float
    tpot: float
    decode_queue: float  # of decode slots and memory

    @property
    def worst(self) -> float:
        """The greatest, for who seeks the least. Of too many prompts some are late; of too many decodes, all."""
        return max(self.ttft, self.tpot + _ALL * max(0.0, self.tpot - 1.0), self.decode_queue)

    def __str__(self) -> str:
        return f"TTFT {self.ttft:.2f}, TPOT {self.tpot:.2f}, decode room {self.decode_queue:.2f} of full load"


def shares(groups: Sequence[Group], mix: Mix) -> Shares:
    """How much of what these workers can bear the load is."""
    decoding = [group for group in groups if group.count and group.role is not Role.PREFILL]
    prompting = [group for group in groups if group.count and group.role is not Role.DECODE]
    if not decoding or not prompting:
        return Shares(math.inf, math.inf, math.inf)
    context = mix.decoded.context
    step_s, room = _steps(decoding, _wanted(mix), context)
    paces = [_pace(group, mix, context, step_s) for group in prompting]
    ttft, busy = _ttft_share(prompting, [pace.speed for pace in paces], mix)
    tpot = 0.0
    if mix.tpot_s is not None:
        most = _most_kept(decoding, mix.tpot_s, context)
        tpot = _wanted(mix) / most if most else step_s / mix.tpot_s
        tpot += min(1.0, busy) * max(0.0, max(pace.step_share for pace in paces) - tpot)
    return Shares(ttft, tpot, room)


def _wanted(mix: Mix) -> float:
    """Tokens a second: of arriving answers, or those that meet the SLO of all running decodes.

    Answers pile up until as many end as begin. A burst is over by then, so only as many count as there can be soon.
    """
    answers = mix.decoded
    coming = answers.rate * max(0.0, answers.output_tokens - 1)
    if mix.tpot_s is None:
        return coming
    return max(answers.running, min(coming * mix.tpot_s, answers.soon)) / mix.tpot_s


def _most_kept(groups: Sequence[Group], tpot_s: float, context: float) -> float:
    """Tokens a second within the SLO on the workers that can meet it at all."""
    able = [group for group in groups if _step(group, 1, context) <= tpot_s]
    return sum(group.count * _batch(group, tpot_s, context) for group in able) / tpot_s


def _steps(groups: Sequence[Group], wanted: float, context: float) -> tuple[float, float]:
    """The step time at which these workers make so many tokens a second, and how full they then are."""
    if wanted <= 0.0:
        return min(_step(group, 1, context) for group in groups), 0.0

    def made(step_s: float) -> float:
        return sum(group.count * _batch(group, step_s, context) for group in groups) / step_s

    low = min(_step(group, 1, context) for group in groups)
    high = max(_step(group, _most(group, context), context) for group in groups)
    best = made(high)
    if best < wanted:
        return high * wanted / max(best, 1e-9), _over(wanted / max(best, 1e-9))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if made(middle) >= wanted else (middle, high)
    held = sum(group.count * _batch(group, high, context) for group in groups)
    most = sum(group.count * _most(group, context) for group in groups)
    return high, held / most if most else math.inf


def _step(group: Group, batch: float, context: float) -> float:
    return group.cost.decode_seconds(round(batch), round(batch * context))


def _most(group: Group, context: float) -> float:
    """Sequences that fit."""
    return max(1.0, min(group.most_running, group.kv_tokens / max(1.0, context)))


def _batch(group: Group, step_s: float, context: float) -> float:
    """Sequences with which a step takes so long."""
    low, high = 0.0, _most(group, context)
    if _step(group, high, context) <= step_s:
        return high
    for _ in range(_HALVINGS // 2):
        middle = (low + high) / 2
        low, high = (middle, high) if _step(group, middle, context) <= step_s else (low, middle)
    return low


def _ttft_share(groups: Sequence[Group], speeds: Sequence[float], mix: Mix) -> tuple[float, float]:
    """Of the load with which first tokens are in time, and how busy prompts keep workers; unpromised, both that."""
    capacity = quickest_s = 0.0
    for group, speed in zip(groups, speeds, strict=True):
        if speed > 0.0:
            took_s = _alone_seconds(group, mix) / speed
            capacity += group.count / took_s
            quickest_s = min(quickest_s or took_s, took_s)
    if capacity <= 0.0:
        return math.inf, math.inf
    busy = (mix.rate + mix.backlog) / capacity
    if mix.ttft_s is None:
        return busy, busy
    servers = max(1.0, capacity * quickest_s)
    wait_s = _TAIL * quickest_s * (1.0 + mix.spread) / 2.0 / servers  # times load / (1 - load)
    spare_s = mix.ttft_s - quickest_s
    if spare_s <= 0.0:
        return quickest_s / mix.ttft_s * (1.0 + busy), busy
    return busy / min(_SATURATED, spare_s / (spare_s + wait_s)), busy


def _alone_seconds(group: Group, mix: Mix) -> float:
    """A prompt computed without any decodes beside it."""
    tokens = max(1, round(mix.computed_tokens))
    return group.cost.prefill_seconds(tokens, max(0, round(mix.prompt_tokens) - tokens))


@dataclass(frozen=True, slots=True)
class _Pace:
    """Of prompts beside decodes: their speed as a share of that without any, and how long the steps of both then are,
    as a share of the promise; 0 where there are none.
    """

    speed: float
    step_share: float = 0.0


def _pace(group: Group, mix: Mix, context: float, step_s: float) -> _Pace:
    """Chunks fill a step up to the SLO. Where no chunk would fit, the smallest one breaks the SLO: the engine
    takes that much at least, so that prompts move on.

    A worker that does both has a decode at least: requests stay where their prompts were computed, also on a kind whose
    steps are too slow to have any if all steps took equally long.
    """
    if group.role is not Role.MIXED or mix.decoded.output_tokens <= 1.0:
        return _Pace(1.0)
    batch = max(1, round(_batch(group, step_s, context)))
    tokens = max(1, round(mix.computed_tokens))
    took_s = mix.tpot_s * ADAPTIVE_MARGIN if mix.tpot_s is not None else 2 * step_s
    chunk = min(tokens, group.cost.prompt_tokens_within(took_s, 0, (), batch, round(batch * context)))
    step_share, least = 1.0, min(_LEAST_CHUNK, tokens)
    if chunk < least:
        chunk, took_s = least, group.cost.mixed_seconds([(least, 0)], batch, round(batch * context))
        step_share = max(1.0, took_s / mix.tpot_s) if mix.tpot_s is not None else 1.0
    return _Pace(min(1.0, chunk / took_s * _alone_seconds(group, mix) / tokens), step_share)


def _over(share: float) -> float:
    return 1.0 + _STEEP * (share - 1.0)
