"""The queue of requests that wait in one gateway, and its order. Pure; knows no worker.

    requests that waited for their class's `max_wait_s`   earliest claim first
    then by the class's priority                          lowest number first
      between tenants                                     start-time fair queueing, by tokens over share
        within a tenant                                   earliest deadline first; missed deadlines last

Source of the fairness: Goyal, Vin, Cheng, Start-time Fair Queueing (SIGCOMM 1996). There a request is tagged at its
arrival; here when it becomes its tenant's next. That is the same for a FIFO queue, and deadlines may reorder requests.
Two tenants with waiting requests differ in tokens over share by at most the largest request of each.
"""

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice

from cluster.policy.admission.classes import Classes
from cluster.policy.estimate.lengths import longest_answer
from cluster.spec import GatewaySpec
from workers.request import Request

_SLACK = 16


@dataclass(frozen=True, slots=True, eq=False)
class QueuedRequest:
    """A waiting request. `tokens`: prompt and expected answer. `need_s`: shortest time from start to first token.

    From `claim_s` on it goes first. `has_ttft_slo`: `deadline_s` is its TTFT SLO, not only its claim. `rejects`: it is
    refused once it can no longer meet the deadline.
    """

    number: int
    request_id: str
    class_name: str
    tenant: str
    share: float
    priority: int
    tokens: int
    need_s: float
    deadline_s: float
    claim_s: float
    has_ttft_slo: bool
    rejects: bool = False

    @property
    def latest_s(self) -> float:
        """The latest start that meets the deadline."""
        return self.deadline_s - self.need_s if self.has_ttft_slo else self.deadline_s


def _by_deadline(queued: QueuedRequest) -> tuple[float, int]:
    return queued.deadline_s, queued.number


def _by_claim(queued: QueuedRequest) -> tuple[float, int]:
    return queued.claim_s, queued.number


@dataclass(slots=True, eq=False)
class _Queue:
    """One tenant at one priority. `tag`: the virtual time at which its next request starts."""

    share: float
    tag: float = 0.0
    timely: list[QueuedRequest] = field(default_factory=list)  # by deadline, as is `late`
    late: list[QueuedRequest] = field(default_factory=list)
    latest: list[tuple[float, int, QueuedRequest]] = field(
        default_factory=list
    )  # a heap of `timely`, and of some that have left

    def __bool__(self) -> bool:
        return bool(self.timely or self.late)

    def enter(self, queued: QueuedRequest) -> None:
        insort(self.timely, queued, key=_by_deadline)
        heapq.heappush(self.latest, (queued.latest_s, queued.number, queued))

    def leave(self, queued: QueuedRequest) -> None:
        if not _drop(self.timely, queued):
            assert _drop(self.late, queued), f"{queued.request_id} is not in the queue"
        if len(self.latest) > 2 * len(self.timely) + _SLACK:
            self.latest = [(each.latest_s, each.number, each) for each in self.timely]
            heapq.heapify(self.latest)

    def in_order(self, now_s: float) -> Iterator[QueuedRequest]:
        self.settle(now_s)
        return chain(self.timely, self.late)

    def settle(self, now_s: float) -> None:
        """Move requests that can no longer meet their deadline to `late`."""
        while self.latest and self.latest[0][0] < now_s:
            _, _, queued = heapq.heappop(self.latest)
            if _drop(self.timely, queued):
                insort(self.late, queued, key=_by_deadline)


def _drop(requests: list[QueuedRequest], queued: QueuedRequest) -> bool:
    index = bisect_left(requests, _by_deadline(queued), key=_by_deadline)
    if index == len(requests) or requests[index] is not queued:
        return False
    del requests[index]
    return True


@dataclass(slots=True, eq=False)
class _Level:
    """All requests of one priority. `clock` is its virtual time."""

    clock: float = 0.0
    queues: dict[str, _Queue] = field(default_factory=dict)  # by tenant with a share

    def in_order(self, now_s: float) -> Iterator[QueuedRequest]:
        """All requests in service order."""
        heap = [(queue.tag, name, queue.in_order(now_s), queue.share) for name, queue in self.queues.items() if queue]
        heapq.heapify(heap)
        while heap:
            tag, name, requests, share = heap[0]
            queued = next(requests, None)
            if queued is None:
                heapq.heappop(heap)
                continue
            heapq.heapreplace(heap, (tag + queued.tokens / share, name, requests, share))
            yield queued


class RequestQueue:
    """Owned by a gateway's AdmissionQueue. Every `enter` is followed by `take` or `leave`.

    `expected` predicts the tokens of an answer.
    """

    def __init__(self, gateway: GatewaySpec, expected: Callable[[Request], int] = longest_answer) -> None:
        self._expected = expected
        self._classes = Classes(gateway)
        self._most = gateway.max_queued
        self._levels: dict[int, _Level] = {}
        self._claims: list[QueuedRequest] = []  # all waiting requests, by claim
        self._of_class: Counter[str] = Counter()
        self._number = 0

    def __len__(self) -> int:
        return len(self._claims)

    def full(self, request: Request) -> str:
        """Why the queue has no room for this request; empty: it has."""
        most, waiting = self._classes.of(request).max_queued, self._of_class[request.slo.class_name]
        if waiting >= most:
            return f"the queue of class {request.slo.class_name!r} is full ({waiting} of {most})"
        if len(self) >= self._most:
            return f"the queue of this gateway is full ({len(self)} of {self._most})"
        return ""

    def enter(self, request: Request, arrived_s: float, need_s: float) -> QueuedRequest:
        """Queue a request; the queue must not be `full` for it. `need_s`: as in `QueuedRequest`."""
        assert not (why := self.full(request)), why
        known, slo = self._classes.of(request), request.slo
        tenant, share = self._classes.share(request)
        claim_s = arrived_s + known.patience_s
        queued = QueuedRequest(
            number=self._number,
            request_id=request.id,
            class_name=slo.class_name,
            tenant=tenant,
            share=share,
            priority=slo.priority,
            tokens=request.num_tokens + self._expected(request),
            need_s=need_s,
            deadline_s=claim_s if slo.ttft_s is None else arrived_s + slo.ttft_s,
            claim_s=claim_s,
            has_ttft_slo=slo.ttft_s is not None,
            rejects=slo.ttft_s is not None and self._classes.rejects(request),
        )
        self._number += 1
        level = self._levels.setdefault(queued.priority, _Level())
        queue = level.queues.setdefault(tenant, _Queue(share))
        if not queue:
            queue.tag = max(queue.tag, level.clock)
        queue.enter(queued)
        insort(self._claims, queued, key=_by_claim)
        self._of_class[queued.class_name] += 1
        return queued

    def take(self, queued: QueuedRequest) -> None:
        """Remove a request that is admitted, and charge its tenant."""
        level = self._levels[queued.priority]
        queue = level.queues[queued.tenant]
        level.clock = max(level.clock, min(each.tag for each in level.queues.values() if each))
        self.leave(queued)
        queue.tag += queued.tokens / queued.share

    def leave(self, queued: QueuedRequest) -> None:
        """Remove a request: admitted, cancelled or refused."""
        self._levels[queued.priority].queues[queued.tenant].leave(queued)
        index = bisect_left(self._claims, _by_claim(queued), key=_by_claim)
        assert self._claims[index] is queued, f"{queued.request_id} is not in the queue"
        del self._claims[index]
        self._of_class[queued.class_name] -= 1
        if not self._of_class[queued.class_name]:
            del self._of_class[queued.class_name]

    def in_order(self, now_s: float, most: int | None = None) -> list[QueuedRequest]:
        """The first `most` requests in order; None: all."""
        return list(islice(self._in_order(now_s), most))

    def _in_order(self, now_s: float) -> Iterator[QueuedRequest]:
        num_claimed = 0
        for queued in self._claims:
            if queued.claim_s > now_s:
                break
            num_claimed += 1
            yield queued
        if num_claimed == len(self._claims):
            return
        for _, level in sorted(self._levels.items()):
            yield from (queued for queued in level.in_order(now_s) if queued.claim_s > now_s)

    def to_reject(self, now_s: float) -> list[QueuedRequest]:
        """Requests to refuse, because they can no longer meet their deadline."""
        found = []
        for level in self._levels.values():
            for queue in level.queues.values():
                queue.settle(now_s)
                found += [queued for queued in queue.late if queued.rejects]
        return found

    def outranks(self, request: Request, now_s: float) -> bool:
        """Whether its priority alone puts it before all waiting requests."""
        if not self._claims:
            return True
        best = min(level for level, known in self._levels.items() if any(known.queues.values()))
        return self._claims[0].claim_s > now_s and request.slo.priority < best

    def check(self) -> None:
        """Prove that every place is counted once, and that the bounds hold. Raises AssertionError."""
        queues = [queue for level in self._levels.values() for queue in level.queues.values()]
        waiting = [queued for queue in queues for queued in (*queue.timely, *queue.late)]
        assert len({queued.number for queued in waiting}) == len(waiting) == len(self._claims), (
            "a request is queued twice"
        )
        assert set(waiting) == set(self._claims), "claims differ from queued requests"
        assert self._of_class == Counter(queued.class_name for queued in waiting), "classes do not add up"
        assert len(waiting) <= self._most, f"{len(waiting)} wait, {self._most} may"
