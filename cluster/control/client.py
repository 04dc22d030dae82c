"""A gateway's calls to the controller: membership, load reports, changes, decisions. Every call has a timeout.

While the controller is away the gateway continues; only changes are refused.
"""

from contextlib import suppress
from typing import Any

from cluster.control.changes import ControllerUnavailable
from cluster.control.membership import NO_MEMBERSHIP, Membership
from cluster.policy.scaling.offered_load import LoadReport
from cluster.runtime.interface import ServiceHandle
from cluster.runtime.runtime_errors import WorkerGone
from cluster.spec import Role
from diptych.view import Adapter, DecisionRecord

GRACE_S = 5.0  # beyond the controller's own timeout
DECISIONS_S = 2.0

DecisionCounts = tuple[tuple[str, str, int], ...]  # kind, outcome, count


class ControllerClient:
    """Owned by the GatewayService of this name. `decides`: the cluster has an elastic policy.

    `preflight_s` bounds the preflight of one pair, which a flip may have to wait for.
    """

    def __init__(self, controller: ServiceHandle, gateway: str, preflight_s: float, *, decides: bool) -> None:
        self._controller = controller
        self._gateway = gateway
        self._decides = decides
        self._known = NO_MEMBERSHIP  # the controller need not send it again
        self._change_s = 2 * preflight_s + GRACE_S  # a change may wait for another change

    async def members(self, revision: int, timeout_s: float) -> Membership:
        """Long poll of the membership. Raises `WorkerGone`."""
        known = self._known if self._known.revision == revision else NO_MEMBERSHIP
        membership: Membership = await self._controller.call(
            "members", revision, timeout_s, self._gateway, known.links_id, timeout_s=timeout_s + GRACE_S
        )
        self._known = membership.after(known)
        return self._known

    async def unlinked(self, owner: str, reader: str) -> None:
        """Report that a worker could not connect to an owner of KV. Raises `WorkerGone`."""
        await self._controller.call("unlinked", owner, reader, timeout_s=GRACE_S)

    async def report(self, report: LoadReport) -> None:
        """Send a load report. Raises `WorkerGone`."""
        await self._controller.call("report", report, timeout_s=GRACE_S)

    async def decisions(self) -> tuple[DecisionRecord, ...]:
        """The latest decisions of the elastic policy, oldest first; empty while the controller is away."""
        decisions: tuple[DecisionRecord, ...] = await self._elastic("decisions") or ()
        return decisions

    async def decision_counts(self) -> DecisionCounts | None:
        """Decisions of the elastic policy by kind and outcome; None while unknown."""
        counts: DecisionCounts | None = await self._elastic("decision_counts")
        return counts

    async def _elastic(self, method: str) -> Any:
        """None: there is no elastic policy, or the controller is away."""
        with suppress(WorkerGone):
            return await self._controller.call(method, timeout_s=DECISIONS_S) if self._decides else None

    async def flip(self, worker: str, role: Role, revision: int) -> int:
        """Change a worker's role. Returns the new revision. All changes raise `ChangeError`."""
        return await self._change("flip", worker, role, revision)

    async def drain(self, worker: str, revision: int, deadline_s: float) -> int:
        """Drain a worker. `deadline_s` 0: the specification's."""
        return await self._change("drain", worker, revision, deadline_s)

    async def scale(self, pool: str, replicas: int, revision: int) -> int:
        """Set a pool's target number of workers."""
        return await self._change("scale", pool, replicas, revision)

    async def load_adapter(self, adapter: Adapter, revision: int) -> int:
        """Serve an adapter, which has been checked."""
        return await self._change("load_adapter", adapter, revision)

    async def unload_adapter(self, name: str, revision: int) -> int:
        """Stop serving an adapter."""
        return await self._change("unload_adapter", name, revision)

    async def _change(self, verb: str, *args: object) -> int:
        try:
            revision: int = await self._controller.call(verb, *args, timeout_s=self._change_s)
        except WorkerGone as error:
            raise ControllerUnavailable(
                f"the controller does not answer ({error}) and may have made the change: check, and try again"
            ) from None
        return revision
