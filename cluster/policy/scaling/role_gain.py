"""What a change of roles gains against staying, less what it costs. Pure closed forms; knows no cluster.

    gain = attained(new roles, without the cached prefixes that the changes lose) / attained(present roles) - 1 - cost

`attained` is the share of requests that meet both SLOs while the load stays as it is, and `cost` that of the requests
that the changing workers could have served meanwhile. A load is expected to last for as long as it has been seen.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from cluster.policy.scaling.balance import Group, Mix, Shares, shares
from cluster.policy.scaling.offered_load import SOON_S
from cluster.spec import Role

LATE_AT_FULL_LOAD = 0.1  # of the requests: `balance` calls that load full at which one in ten waits too long
_STEEPNESS = 8  # late requests grow with this power of the load: 1 % at three quarters of full load


def attained(worst: float) -> float:
    """The share of requests that meet both SLOs, by the worst share of full load.

    Below full load, some are late because requests arrive at random. Beyond it, those that exceed it are late, too.
    """
    if worst <= 1.0:
        return 1.0 - LATE_AT_FULL_LOAD * worst**_STEEPNESS
    return (1.0 - LATE_AT_FULL_LOAD) / worst


def gain(present: Sequence[Group], now: Shares, final: Sequence[Group], flips: int, mix: Mix) -> float:
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
    then = attained(shares(final, replace(mix, computed_tokens=mix.computed_tokens + recomputed)).worst)
    before = attained(now.worst)
    if not before:
        return math.inf if then else 0.0
    return then / before - 1.0 - flips * SOON_S / (count * mix.seen_s)


def _count(groups: Sequence[Group], role: Role) -> int:
    return sum(group.count for group in groups if group.role is role)
