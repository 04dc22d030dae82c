"""Roles that a plan wants, and which steps of one worker lead there. Pure; judges no step."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cluster.policy.scaling.balance import Group
from cluster.spec import Role


@dataclass(frozen=True, slots=True)
class Aim:
    """`counts`: workers by pool and role; none of a role that is not named. `reason`: of the plan, in words.

    A pool may have other workers by now than when it was planned: then it is reached as far as can be.
    """

    counts: Mapping[tuple[str, Role], int]
    reason: str

    def steps(self, groups: Sequence[Group]) -> Iterator[tuple[Group, Group]]:
        """From which group to which a worker may change; none: it is reached."""
        for source in groups:
            for target in groups:
                if source.pool == target.pool and self._over(source) > 0 > self._over(target):
                    yield source, target

    def _over(self, group: Group) -> int:
        return group.count - self.counts.get((group.pool, group.role), 0)
