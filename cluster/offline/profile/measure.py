"""A whole profile: steps of every pool, request overhead, and slowdown by neighbors. Knows the client."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

from cluster.offline.load import machine
from cluster.offline.profile.overhead import RequestOverhead, measure_overhead
from cluster.offline.profile.slowdown import measure_slowdown
from cluster.offline.profile.steps import Steps, measure_steps
from cluster.spec import Role
from diptych.client import AsyncClient
from diptych.view import ClusterView, WorkerView
from workers.profiles.fit import fit
from workers.profiles.measured import ClusterProfile, Interference, LinkProfile, PoolProfile
from workers.profiles.profile_errors import ProfileError

ROUNDS = 3

OnProgress = Callable[[str, int, int | None], None]  # what, done, total


async def measure(client: AsyncClient, on_progress: OnProgress, rounds: int = ROUNDS) -> ClusterProfile:
    """Measure an idle, running cluster: one worker of each pool stands for its pool.

    Raises `DiptychError` when no server answers or a worker is busy, `ProfileError` when there is nothing to fit.
    """
    view = (await client.status()).view
    if view.other_models:
        names = ", ".join(model.name for model in view.models)
        raise ProfileError(f"the cluster serves several models ({names}), and a profile takes one")
    workers = _one_of_each(view)
    decoder = next((worker for worker in workers if worker.role is not Role.PREFILL), None)
    if decoder is None or view.model is None:
        raise ProfileError("no worker that decodes is ready; wait for one, or raise its pool's replicas")
    on_progress("requests", 0, None)
    overhead = await measure_overhead(client, decoder.name, view.model.vocab_size)
    pools = []
    for worker in workers:
        steps = await measure_steps(client, worker.name, rounds, partial(on_progress, f"steps of {worker.name}"))
        pools.append(_pool(worker, steps, overhead))
    interference: list[Interference] = []
    for one, other in _pairs_of_one_machine(view):
        on_progress(f"{one.name} beside {other.name}", 0, None)
        linked = view.linked(one.name, other.name)
        interference += await measure_slowdown(client, one, other, linked, view.model.vocab_size)
    return ClusterProfile(
        cluster=view.name,
        model=view.model.name,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=f"{len(machine.allowed_cores())} cores of {machine.cpu_name()}, {machine.system_name()}",
        versions=", ".join(f"{name} {version}" for name, version in machine.versions().items()),
        context_length=view.model.context_length,
        vocab_size=view.model.vocab_size,
        pools=tuple(pools),
        links=tuple(_links(view)),
        interference=tuple(_worst(interference)),
        kv_token_bytes=overhead.kv_token_bytes,
        frontend_s=overhead.frontend_s,
        single_request_s=overhead.single_request_s,
    )


def _pool(worker: WorkerView, steps: Steps, overhead: RequestOverhead) -> PoolProfile:
    return PoolProfile(
        worker.pool,
        worker.parallel.tensor,
        worker.parallel.pipeline,
        fit(steps.points),
        steps.points,
        overhead.gap_s,
        overhead.gap_row_s,
        steps.call_s,
    )


def _one_of_each(view: ClusterView) -> list[WorkerView]:
    """The first ready worker of each pool. Raises `ProfileError`."""
    first: dict[str, WorkerView] = {}
    for worker in view.ready(*Role):
        first.setdefault(worker.pool, worker)
    if missing := {worker.pool for worker in view.workers} - first.keys():
        raise ProfileError(f"no worker of {', '.join(sorted(missing))} is ready; wait for it, or take the pool out")
    return list(first.values())


def _pairs_of_one_machine(view: ClusterView) -> Iterator[tuple[WorkerView, WorkerView]]:
    """For each pair of pools, two workers on one node, if there are any; preferably linked ones, owner first."""
    ready = view.ready(*Role)
    pairs = [(one, other) for one in ready for other in ready if one is not other and one.node == other.node]
    done: set[frozenset[str]] = set()
    for one, other in sorted(pairs, key=lambda pair: not view.linked(pair[0].name, pair[1].name)):
        pools = frozenset((one.pool, other.pool))
        if pools not in done:
            done.add(pools)
            yield one, other


def _links(view: ClusterView) -> Iterator[LinkProfile]:
    """The slowest link of each pair of pools."""
    pool_of = {worker.name: worker.pool for worker in view.workers}
    slowest: dict[tuple[str, str], LinkProfile] = {}
    for link in view.links:
        pools = pool_of[link.owner], pool_of[link.reader]
        found = slowest.get(pools)
        if found is None or link.bytes_per_s < found.bytes_per_s:
            slowest[pools] = LinkProfile(*pools, link.transport, link.latency_s, link.bytes_per_s)
    yield from slowest.values()


def _worst(found: list[Interference]) -> Iterator[Interference]:
    """Two workers of one pool give two ratios; keep the larger."""
    worst: dict[tuple[str, ...], Interference] = {}
    for each in found:
        key = (each.pool, each.other, each.phase, each.other_phase)
        known = worst.get(key)
        worst[key] = each if known is None else replace(each, ratio=max(each.ratio, known.ratio))
    yield from worst.values()
