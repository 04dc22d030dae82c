"""Which workers serve a request: plain least-loaded.

Prefill goes to the worker with the fewest prompt tokens queued, decode to the linked worker with the fewest sequences.
A pool that is empty for the moment does not stop the service: every worker can do both phases, so a healthy one of any
role serves the request alone. Pure.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from cluster.spec import Role
from cluster.view import ClusterView, WorkerView
from workers.request import Request


@dataclass(frozen=True, slots=True)
class Sent:
    """What this gateway has sent to a worker since the statistics in the view were taken."""

    prompt_tokens: int = 0
    sequences: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """`prefill` and `decode` name workers; the same name twice: one worker does both, and nothing moves."""

    prefill: str
    decode: str
    reason: str

    @property
    def colocated(self) -> bool:
        return self.prefill == self.decode


def place(
    view: ClusterView,
    request: Request,
    sent: Mapping[str, Sent],
    avoid: Collection[str] = (),
    *,
    alone: bool = True,
    beside: str = "",
) -> Placement | None:
    """The least-loaded placement that fits the request; None when nobody is ready for it.

    Workers in `avoid` failed or refused this request before; they are left out. `alone`: where no pair is ready, a
    prefill or decode worker may do both phases. `beside` names the worker that computes the same prompt for a sibling:
    it comes first, since there the prompt is computed once.
    """
    fitting = [
        worker
        for worker in view.ready(*Role)
        if request.num_tokens < worker.capacity_tokens and worker.name not in avoid
    ]
    prefills = sorted(
        (w for w in fitting if w.role is Role.PREFILL), key=lambda w: (w.name != beside, _queued_tokens(w, sent))
    )
    decodes = sorted((w for w in fitting if w.role is Role.DECODE), key=lambda w: _sequences(w, sent))
    mixed = sorted((w for w in fitting if w.role is Role.MIXED), key=lambda w: (w.name != beside, _load(w, sent)))

    if request.sampling.max_tokens is not None and request.sampling.max_tokens - len(request.generated) == 1:
        first = (prefills + mixed)[:1]
        if first:
            return Placement(first[0].name, first[0].name, "one token is wanted: nothing to hand over")
    for prefill in prefills:
        for decode in decodes:
            if view.linked(prefill.name, decode.name):
                return Placement(prefill.name, decode.name, "least-loaded prefill and decode workers")
    if mixed:
        return Placement(mixed[0].name, mixed[0].name, "least-loaded mixed worker")
    either = sorted(prefills + decodes, key=lambda w: _load(w, sent))[:1]
    if either and alone:
        return Placement(either[0].name, either[0].name, "no linked pair is ready: one worker does both")
    return None


def _queued_tokens(worker: WorkerView, sent: Mapping[str, Sent]) -> tuple[int, str]:
    return worker.stats.queued_tokens + sent.get(worker.name, Sent()).prompt_tokens, worker.name


def _sequences(worker: WorkerView, sent: Mapping[str, Sent]) -> tuple[int, int, str]:
    stats = worker.stats
    return stats.running + stats.reserved + sent.get(worker.name, Sent()).sequences, -stats.free_blocks, worker.name


def _load(worker: WorkerView, sent: Mapping[str, Sent]) -> tuple[int, int, str]:
    return _queued_tokens(worker, sent)[0], _sequences(worker, sent)[0], worker.name
