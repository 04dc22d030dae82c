"""How well workers with given roles would meet their SLOs under a given load, and what a change of roles gains. Pure.

Decodes are spread so that all steps take equally long (Little's law). Prompts get the time that decodes leave, and wait
as in one M/D/1 queue that all workers with prompts share. The result is the load as a share of the highest load that
meets each SLO: above 1 the SLO is missed. The step time as a share of the TPOT SLO would not do: a step of one sequence
takes half as long as a full one, so it does not show how many more sequences fit.

    gain = attained(new roles, without the cached prefixes that the changes lose) / attained(present roles) - 1 - cost

`attained` is the share of requests that meet both SLOs while the load stays as it is, and `cost` that of the requests
that the changing workers could have served meanwhile. A load is expected to last for as long as it has been seen.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster.spec import Role
from workers.config import ADAPTIVE_MARGIN
from workers.costs import CostModel

SOON_S = 5.0  # about what a role change takes: only decodes that start within it count
_SATURATED = 0.95  # share of the capacity beyond which the queue grows without bound
_ALL_LATE = 2.0  # extra weight of a TPOT share above 1: a step that is too long makes all requests late, not some
_NO_ROOM = 20.0  # slope of a decode room share above 1
_TAIL = 2.0  # times the mean wait: the wait that about one request in ten exceeds
_BISECTIONS = 24
_MIN_CHUNK = 16
LATE_AT_FULL_LOAD = 0.1  # of the requests: that load is full at which one in ten waits too long
_STEEPNESS = 8  # late requests grow with this power of the load: 1 % at three quarters of full load


@dataclass(frozen=True, slots=True)
class Group:
    """`count` equal workers, possibly 0. `kv_tokens` and `most_running` are those of one worker."""

    pool: str
    role: Role
    count: int
    cost: CostModel
    kv_tokens: int
    most_running: int


@dataclass(frozen=True, slots=True)
class Mix:
    """A load: requests per second, their mean tokens, and their SLOs in seconds. None: no SLO.

    `computed_tokens` of a prompt are not cached; `spread` is the squared coefficient of variation of a prompt's work.
    `backlog`: waiting prompts, as additional prompts per second. `answers`: the decode load, if it differs from that of
    the arriving requests. `requests`: how many requests these means are from; `is_known`: enough of them have ended and
    reported how much of their prompts was cached. `seen_s`: for how long the load has been seen, at most the window.
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
    seen_s: float = math.inf

    @property
    def relative_error(self) -> float:
        """One standard deviation of the load, since this many requests arrived at random; at most 1."""
        return min(1.0, math.sqrt((1.0 + self.spread) / max(1.0, self.requests)))

    @property
    def decoded(self) -> "Answers":
        return self.answers or Answers(self.rate, self.prompt_tokens, self.output_tokens)


@dataclass(frozen=True, slots=True)
class Answers:
    """Requests per second that decode, and their mean tokens.

    `running` sequences decode now; at most `soon` will before roles can change again.
    """

    rate: float
    prompt_tokens: float
    output_tokens: float
    running: float = 0.0
    soon: float = math.inf

    @property
    def context(self) -> float:
        """Tokens of a sequence in the middle of its answer."""
        return self.prompt_tokens + self.output_tokens / 2


@dataclass(frozen=True, slots=True)
class Utilization:
    """The load as a share of the highest load that meets each SLO: 1 is full."""

    ttft: float
    tpot: float
    decode_queue: float  # of decode slots and memory

    @property
    def worst(self) -> float:
        """The highest share. Too many prompts make some requests late, too many decodes make all late."""
        return max(self.ttft, self.tpot + _ALL_LATE * max(0.0, self.tpot - 1.0), self.decode_queue)

    def __str__(self) -> str:
        return f"TTFT {self.ttft:.2f}, TPOT {self.tpot:.2f}, decode room {self.decode_queue:.2f} of full load"


def utilization(groups: Sequence[Group], mix: Mix) -> Utilization:
    """The load as a share of what these workers can serve."""
    decoding = [group for group in groups if group.count and group.role is not Role.PREFILL]
    prompting = [group for group in groups if group.count and group.role is not Role.DECODE]
    if not decoding or not prompting:
        return Utilization(math.inf, math.inf, math.inf)
    context = mix.decoded.context
    step_s, room = _steps(decoding, _wanted(mix), context)
    paces = [_pace(group, mix, context, step_s) for group in prompting]
    ttft, busy = _ttft_share(prompting, [pace.speed for pace in paces], mix)
    tpot = 0.0
    if mix.tpot_s is not None:
        most = _max_output_rate(decoding, mix.tpot_s, context)
        tpot = _wanted(mix) / most if most else step_s / mix.tpot_s
        tpot += min(1.0, busy) * max(0.0, max(pace.step_share for pace in paces) - tpot)
    return Utilization(ttft, tpot, room)


def _wanted(mix: Mix) -> float:
    """Output tokens per second that the load needs.

    Running decodes need one token per TPOT SLO. Arriving answers accumulate until as many end as start; a burst ends
    before that, so at most `soon` of them count.
    """
    answers = mix.decoded
    coming = answers.rate * max(0.0, answers.output_tokens - 1)
    if mix.tpot_s is None:
        return coming
    return max(answers.running, min(coming * mix.tpot_s, answers.soon)) / mix.tpot_s


def _max_output_rate(groups: Sequence[Group], tpot_s: float, context: float) -> float:
    """Output tokens per second within the TPOT SLO, on the workers that can meet it at all."""
    able = [group for group in groups if _step(group, 1, context) <= tpot_s]
    return sum(group.count * _batch(group, tpot_s, context) for group in able) / tpot_s


def _steps(groups: Sequence[Group], wanted: float, context: float) -> tuple[float, float]:
    """The step time at which these workers generate `wanted` tokens per second, and the share of decode room in use."""
    if wanted <= 0.0:
        return min(_step(group, 1, context) for group in groups), 0.0

    def output_rate(step_s: float) -> float:
        return sum(group.count * _batch(group, step_s, context) for group in groups) / step_s

    low = min(_step(group, 1, context) for group in groups)
    high = max(_step(group, _max_batch(group, context), context) for group in groups)
    best = output_rate(high)
    if best < wanted:
        return high * wanted / max(best, 1e-9), _over_capacity(wanted / max(best, 1e-9))
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if output_rate(middle) >= wanted else (middle, high)
    held = sum(group.count * _batch(group, high, context) for group in groups)
    most = sum(group.count * _max_batch(group, context) for group in groups)
    return high, held / most if most else math.inf


def _step(group: Group, batch: float, context: float) -> float:
    return group.cost.decode_seconds(round(batch), round(batch * context))


def _max_batch(group: Group, context: float) -> float:
    """Sequences that fit on one worker."""
    return max(1.0, min(group.most_running, group.kv_tokens / max(1.0, context)))


def _batch(group: Group, step_s: float, context: float) -> float:
    """Sequences on one worker whose step takes `step_s`."""
    low, high = 0.0, _max_batch(group, context)
    if _step(group, high, context) <= step_s:
        return high
    for _ in range(_BISECTIONS // 2):
        middle = (low + high) / 2
        low, high = (middle, high) if _step(group, middle, context) <= step_s else (low, middle)
    return low


def _ttft_share(groups: Sequence[Group], speeds: Sequence[float], mix: Mix) -> tuple[float, float]:
    """The load as a share of that which meets the TTFT SLO, and the share of time that prompts take.

    Without a TTFT SLO both are the latter.
    """
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
    """Seconds of a mean prompt without decodes beside it."""
    tokens = max(1, round(mix.computed_tokens))
    return group.cost.prefill_seconds(tokens, max(0, round(mix.prompt_tokens) - tokens))


@dataclass(frozen=True, slots=True)
class _Pace:
    """Prompts beside decodes: their speed as a share of that without decodes, and the steps' share of the TPOT SLO.

    `step_share` 0: there are no decodes.
    """

    speed: float
    step_share: float = 0.0


def _pace(group: Group, mix: Mix, context: float, step_s: float) -> _Pace:
    """Chunks fill a step up to the TPOT SLO. If not even the smallest chunk fits, it is taken anyway and misses it,
    as in the engine, so that prompts advance.

    A mixed worker has at least one decode: requests decode where their prompts were computed, even on hardware so slow
    that equal step times would give it none.
    """
    if group.role is not Role.MIXED or mix.decoded.output_tokens <= 1.0:
        return _Pace(1.0)
    batch = max(1, round(_batch(group, step_s, context)))
    tokens = max(1, round(mix.computed_tokens))
    took_s = mix.tpot_s * ADAPTIVE_MARGIN if mix.tpot_s is not None else 2 * step_s
    chunk = min(tokens, group.cost.prompt_tokens_within(took_s, 0, (), batch, round(batch * context)))
    step_share, smallest = 1.0, min(_MIN_CHUNK, tokens)
    if chunk < smallest:
        chunk, took_s = smallest, group.cost.mixed_seconds([(smallest, 0)], batch, round(batch * context))
        step_share = max(1.0, took_s / mix.tpot_s) if mix.tpot_s is not None else 1.0
    return _Pace(min(1.0, chunk / took_s * _alone_seconds(group, mix) / tokens), step_share)


def _over_capacity(share: float) -> float:
    return 1.0 + _NO_ROOM * (share - 1.0)


def attained(worst: float) -> float:
    """The share of requests that meet both SLOs, by the worst share of full load.

    Below full load, some are late because requests arrive at random. Beyond it, those that exceed it are late, too.
    """
    if worst <= 1.0:
        return 1.0 - LATE_AT_FULL_LOAD * worst**_STEEPNESS
    return (1.0 - LATE_AT_FULL_LOAD) / worst


def gain(present: Sequence[Group], now: Utilization, final: Sequence[Group], flips: int, mix: Mix) -> float:
    """How many more requests meet both SLOs, as a share of those that do now, if `flips` workers change roles.

    `present` has the shares `now`; `final` are the groups after the changes.

    - A worker that changes serves nothing for `SOON_S`, until its work has moved and new work has come. Of `count`
      workers over `seen_s` seconds, that is flips * SOON_S / (count * seen_s).
    - Its cached prefixes count as lost, since prompts then go elsewhere: of the prompt tokens found in caches, those
      of the changing workers' share of the workers that take prompts. The new roles are rated with as many more prompt
      tokens to compute. A decode worker has no such prefixes.
    """
    count = sum(group.count for group in present)
    from_decode = max(0, _count(present, Role.DECODE) - _count(final, Role.DECODE))
    prompting = max(1, count - _count(present, Role.DECODE))
    recomputed = min(1.0, (flips - from_decode) / prompting) * (mix.prompt_tokens - mix.computed_tokens)
    then = attained(utilization(final, replace(mix, computed_tokens=mix.computed_tokens + recomputed)).worst)
    before = attained(now.worst)
    if not before:
        return math.inf if then else 0.0
    return then / before - 1.0 - flips * SOON_S / (count * mix.seen_s)


def _count(groups: Sequence[Group], role: Role) -> int:
    return sum(group.count for group in groups if group.role is role)
