"""When workers change their roles, and pools their size: one step at a time, and each with its reason. Pure.

Every period the roles are judged on the load of the last seconds, as gateways told it: how much of what first tokens,
further tokens and decode room could bear it is, by the worst of the three (`balance`). A step is one worker with
another role. The best one, or the first on the way to a pool that is all split or all mixed, is taken when that makes
the worst better by `margin`, has done so for `dwell_s` on end, and the last step is `cooldown_s` ago; a promise that
breaks by a factor makes both times shorter by it. Where nothing is in danger, or what looks so may be the chance of few
requests, nothing changes, but that workers of which some are mixed become so all: roles that swing cost
more than roles that are not quite right (Mooncake and Splitwise say that ratios drift slowly, Narwhal that hysteresis
is what keeps flips useful).

A pool with room to grow gets a worker when no step keeps the promises; one that could do without a worker for
`PATIENCE` times as long loses one.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from cluster.policy.scaling.balance import Group, Mix, Shares, shares
from cluster.policy.scaling.evidence import Decision, Report
from cluster.policy.scaling.offered_load import LEAST_REQUESTS, Offered
from cluster.spec import ClusterSpec, PoolSpec, Role
from diptych.view import ClusterView, WorkerState, WorkerView
from workers.costs import LinearCost

CALM = 0.75  # share of full load below which no change is worth it
STEP_BACK = 1.1  # so much worse a step may make it that leads on to better roles
ROOMY = 0.6  # share of full load without the leaving worker
PATIENCE = 20.0
SETTLED = 10.0  # times `dwell_s` without a reason for another step
_MOST_TARGETS = 256


@dataclass(frozen=True, slots=True)
class _Step:
    """One worker less here, one more there; None: it joins, or leaves, the cluster. `at_last`: the worst where
    it leads.
    """

    source: Group | None
    target: Group | None
    after: Shares
    at_last: float = math.inf


class Elastic:
    """Owned by the controller's shell. Told by gateways, asked every period."""

    def __init__(self, spec: ClusterSpec) -> None:
        self._elastic = spec.elastic
        self._pools = {pool.name: pool for pool in spec.pools}
        puts_off = all(pool.engine.prompt_order == "deadline" for pool in spec.pools)
        self._offered = Offered(spec.elastic, spec.gateway.slo, puts_off=puts_off)
        self._wanted_since_s: dict[str, float] = {}  # kind of step -> since when it is wanted without a break
        self._stepped_s: float | None = None

    def on_report(self, report: Report, now_s: float) -> None:
        """A gateway's report of its load."""
        self._offered.on_report(report, now_s)

    def decide(self, view: ClusterView, now_s: float) -> Decision | None:
        """The next step, or None."""
        mix = self._offered.mix(view.workers, now_s)
        groups = self._groups(view)
        if mix is None or not groups:
            self._wanted_since_s = {kind: since_s for kind, since_s in self._wanted_since_s.items() if kind == "shrink"}
            return self._shrink_idle(view, groups, now_s)
        now = shares(groups, mix)
        surely = now.worst * (1.0 - mix.doubt)
        in_danger = surely > CALM or (now.worst > 1.0 and mix.is_known)
        flip = self._best_flip(groups, now, mix) if in_danger else None
        haste = max(1.0, now.worst)  # the worse the SLO is missed, the sooner the next change
        is_settled = flip is None and CALM < now.worst <= 1.0
        half = self._halfway(groups, now, mix) if is_settled else None
        if self._ripe("whole", half is not None, now_s, SETTLED * self._elastic.dwell_s):
            assert half is not None
            return self._flip(view, half, now, mix, now_s)
        is_better = flip is not None and flip.at_last <= now.worst * (1.0 - self._elastic.margin)
        flips = flip is not None and is_better and flip.at_last < math.inf  # endless is not better than endless
        grows = in_danger and now.worst > 1.0 and (flip is None or flip.at_last > 1.0)
        if self._ripe("flip", flips, now_s, self._elastic.dwell_s, haste):
            assert flip is not None
            return self._flip(view, flip, now, mix, now_s)
        if self._ripe("grow", grows and not flips, now_s, self._elastic.dwell_s, haste):
            return self._grow(view, groups, now, mix, now_s)
        leaver = self._best(list(self._leaving(groups, mix)))
        if self._ripe("shrink", leaver is not None, now_s, PATIENCE * self._elastic.dwell_s):
            assert leaver is not None
            return self._shrink(view, leaver, now, mix, now_s)
        return None

    def _groups(self, view: ClusterView) -> list[Group]:
        """The ready workers of each pool by role; an empty group for each role that a pool's workers could take."""
        counts: dict[tuple[str, Role], int] = {(pool, role): 0 for pool in self._pools for role in Role}
        kv_tokens: dict[str, int] = {}
        for worker in _ready(view):
            counts[worker.pool, worker.role] += 1
            size = self._pools[worker.pool].engine.block_size
            kv_tokens[worker.pool] = worker.stats.total_blocks * size
        return [
            self._group(self._pools[pool], role, count, kv_tokens[pool])
            for (pool, role), count in counts.items()
            if pool in kv_tokens
        ]

    @staticmethod
    def _group(pool: PoolSpec, role: Role, count: int, kv_tokens: int) -> Group:
        return Group(pool.name, role, count, pool.cost or LinearCost(), kv_tokens, pool.engine.max_running)

    # ---- the steps ---------------------------------------------------------------------------------------------

    def _flips(self, groups: Sequence[Group], mix: Mix) -> Iterator[_Step]:
        for source in groups:
            for target in groups:
                if source.count and target.pool == source.pool and target.role is not source.role:
                    after = _changed(groups, source, target)
                    if self._keeps_floors(after):
                        yield _Step(source, target, shares(after, mix))

    def _best_flip(self, groups: Sequence[Group], now: Shares, mix: Mix) -> _Step | None:
        """The first step to where the worst is least: one step off, or alike workers all split, or all mixed."""
        steps = [step for step in self._flips(groups, mix) if step.after.worst <= now.worst * STEP_BACK]
        found = [replace(step, at_last=step.after.worst) for step in steps]
        kinds = _alike(groups)
        for targets in _targets(kinds):
            there = [group for target in targets for group in target]
            first = self._best([step for step in steps if _leads(step, kinds, targets)])
            if first is not None and self._keeps_floors(there):
                found.append(replace(first, at_last=shares(there, mix).worst))
        return self._best(found)

    def _halfway(self, groups: Sequence[Group], now: Shares, mix: Mix) -> _Step | None:
        """Where some of alike workers are mixed and others are not: the step to all mixed, if they bear as much so.

        Closed forms do not know what mixed workers lose beside others: prompts go past them to those that have no
        decodes, away from the prefixes that they have, and each hand-over waits for a step with prompts.
        """
        kinds = _alike(groups)
        steps = [step for step in self._flips(groups, mix) if step.after.worst <= now.worst]
        for kind in kinds:
            roles = _by_role(kind)
            if 0 < roles[Role.MIXED] < sum(roles.values()):
                *_, mixed = _whole(kind)
                there = [group for each in kinds for group in (mixed if each is kind else each)]
                towards = [step for step in steps if step.source in kind and _to_mixed(step)]
                if towards and self._keeps_floors(there) and shares(there, mix).worst <= now.worst:
                    return self._best(towards)
        return None

    def _leaving(self, groups: Sequence[Group], mix: Mix) -> Iterator[_Step]:
        for source, after in self._without_one(groups):
            if (needed := shares(after, mix)).worst <= ROOMY:
                yield _Step(source, None, needed)

    def _without_one(self, groups: Sequence[Group]) -> Iterator[tuple[Group, list[Group]]]:
        """Groups that may lose a worker, and what there is without it."""
        for source in groups:
            least, _ = self._pools[source.pool].bounds
            there = sum(group.count for group in groups if group.pool == source.pool)  # not those that leave already
            after = _changed(groups, source, None)
            if source.count and there > least and self._keeps_floors(after):
                yield source, after

    def _keeps_floors(self, groups: Sequence[Group]) -> bool:
        floors = self._elastic.floors
        prompting = sum(group.count for group in groups if group.role is not Role.DECODE)
        decoding = sum(group.count for group in groups if group.role is not Role.PREFILL)
        return prompting >= floors.get("prefill", 0) and decoding >= floors.get("decode", 0)

    @staticmethod
    def _best(steps: Sequence[_Step]) -> _Step | None:
        """The least of the worst; of equals, the least in all."""
        return min(
            steps,
            key=lambda step: (round(min(step.at_last, step.after.worst), 3), step.after.worst, step.after.ttft),
            default=None,
        )

    def _ripe(self, kind: str, is_wanted: bool, now_s: float, dwell_s: float, haste: float = 1.0) -> bool:
        """Whether a kind of step has been wanted for long enough, and the last one is over for long enough."""
        if not is_wanted:
            self._wanted_since_s.pop(kind, None)
            return False
        since_s = self._wanted_since_s.setdefault(kind, now_s)
        rested = self._stepped_s is None or now_s - self._stepped_s >= self._elastic.cooldown_s / haste
        return rested and now_s - since_s >= dwell_s / haste

    # ---- the decisions -----------------------------------------------------------------------------------------

    def _flip(self, view: ClusterView, step: _Step, now: Shares, mix: Mix, now_s: float) -> Decision:
        assert step.source is not None and step.target is not None
        worker = _least_busy(view, step.source)
        reason = f"{step.source.role.value} to {step.target.role.value}: {_words(now, step.after, mix)}"
        self._stepped(now_s)
        return Decision("flip", reason, worker=worker.name, role=step.target.role)

    def _grow(self, view: ClusterView, groups: Sequence[Group], now: Shares, mix: Mix, now_s: float) -> Decision | None:
        roomy = {pool.name for pool in view.pools if pool.wanted < pool.max_replicas}
        steps = []
        for target in groups:
            if target.role is self._pools[target.pool].role and target.pool in roomy:
                steps.append(_Step(None, target, shares(_changed(groups, None, target), mix)))
        step = self._best(steps)
        if step is None or step.target is None:
            return None
        self._stepped(now_s)
        reason = f"one more worker: {_words(now, step.after, mix)}; no other roles would do"
        return Decision("grow", reason, pool=step.target.pool)

    def _shrink(self, view: ClusterView, step: _Step, now: Shares, mix: Mix, now_s: float) -> Decision:
        assert step.source is not None
        self._stepped(now_s)
        worker = _members(view, step.source)[-1]  # what it decodes moves; a node that came for the last one may go
        reason = f"one worker less: {_words(now, step.after, mix)}"
        return Decision("shrink", reason, worker=worker.name, pool=step.source.pool)

    def _shrink_idle(self, view: ClusterView, groups: Sequence[Group], now_s: float) -> Decision | None:
        """Hardly anybody asks, as gateways say: as patiently as under a load, but only who has nothing to do goes."""
        spare = (worker for source, _ in self._without_one(groups) for worker in _members(view, source))
        idle = [worker for worker in spare if _has_nothing_to_do(worker)] if self._offered.has_reports else []
        if not self._ripe("shrink", bool(idle), now_s, PATIENCE * self._elastic.dwell_s):
            return None
        self._stepped(now_s)
        reason = f"one worker less: fewer than {LEAST_REQUESTS} requests in {self._elastic.window_s:g} s"
        return Decision("shrink", reason, worker=idle[-1].name, pool=idle[-1].pool)

    def _stepped(self, now_s: float) -> None:
        self._stepped_s = now_s
        self._wanted_since_s.clear()


def _ready(view: ClusterView) -> list[WorkerView]:
    return [worker for worker in view.workers if worker.state is WorkerState.READY]


def _alike(groups: Sequence[Group]) -> list[list[Group]]:
    """The groups by what their workers can do, in an order that no hash seed changes."""
    kinds: list[list[Group]] = []
    for group in groups:
        for kind in kinds:
            if replace(group, pool=kind[0].pool, role=kind[0].role, count=kind[0].count) == kind[0]:
                kind.append(group)
                break
        else:
            kinds.append([group])
    return kinds


def _by_role(groups: Sequence[Group]) -> dict[Role, int]:
    return {role: sum(group.count for group in groups if group.role is role) for role in Role}


def _whole(alike: Sequence[Group]) -> Iterator[list[Group]]:
    """These workers split in each way, and all mixed; as one pool, for what they could do together."""
    count = sum(group.count for group in alike)
    one = {group.role: group for group in alike if group.pool == alike[0].pool}
    for number in range(count + 1):
        yield [replace(one[Role.PREFILL], count=number), replace(one[Role.DECODE], count=count - number)]
    yield [replace(one[Role.MIXED], count=count)]


def _targets(kinds: Sequence[list[Group]]) -> Iterator[list[list[Group]]]:
    """Each kind whole, or as it is; all kinds at once while that is few: what one is best for hangs on the others."""
    wholes = [list(_whole(kind)) for kind in kinds]
    if math.prod(len(each) + 1 for each in wholes) > _MOST_TARGETS:
        for number, each in enumerate(wholes):
            yield from ([*kinds[:number], whole, *kinds[number + 1 :]] for whole in each)
        return
    yield from map(list, product(*([kind, *each] for kind, each in zip(kinds, wholes, strict=True))))


def _leads(step: _Step, kinds: Sequence[list[Group]], targets: Sequence[list[Group]]) -> bool:
    """Whether it is one of the steps that are wanted."""
    assert step.source is not None and step.target is not None
    for kind, target in zip(kinds, targets, strict=True):
        if step.source in kind:
            there, wanted = _by_role(kind), _by_role(target)
            source, to = step.source.role, step.target.role
            return there[source] > wanted[source] and there[to] < wanted[to]
    return False


def _to_mixed(step: _Step) -> bool:
    return step.target is not None and step.target.role is Role.MIXED


def _changed(groups: Sequence[Group], source: Group | None, target: Group | None) -> list[Group]:
    """One less in the source, one more in the target."""
    return [replace(group, count=group.count - (group is source) + (group is target)) for group in groups]


def _members(view: ClusterView, group: Group) -> list[WorkerView]:
    return [worker for worker in _ready(view) if worker.pool == group.pool and worker.role is group.role]


def _has_nothing_to_do(worker: WorkerView) -> bool:
    stats = worker.stats
    return not (stats.running or stats.waiting or stats.reserved or stats.leases or stats.queued_tokens)


def _least_busy(view: ClusterView, group: Group) -> WorkerView:
    """The worker whose change of role leaves the least work behind."""
    workers = _members(view, group)
    if group.role is Role.PREFILL:
        return min(workers, key=lambda worker: (worker.stats.queued_tokens, worker.name))
    return min(workers, key=lambda worker: (worker.stats.running + worker.stats.reserved, worker.name))


def _words(now: Shares, after: Shares, mix: Mix) -> str:
    load = f"{mix.rate:.3g} requests/s of {mix.prompt_tokens:.0f} + {mix.output_tokens:.0f} tokens"
    return f"{load} are {now}; then {after}"
