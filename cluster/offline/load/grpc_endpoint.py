"""A Diptych gateway's gRPC server as an endpoint; worker statistics come from the cluster."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from cluster.events import Accepted, Completed, Queued
from cluster.frontend.text import TextDelta
from cluster.offline.load.endpoint import EndpointError
from cluster.offline.load.sender import Ask, Ended, LoadOptions, drive, nothing
from cluster.offline.scoring.records import Run, WorkerRecord
from cluster.offline.workload.arrivals import Workload
from diptych.access import Access
from diptych.client import AsyncClient
from diptych.view import ClusterView
from workers.request import Request


def through(client: AsyncClient, deadline_s: float, keep_ids: bool = False, model: str = "") -> Ask:
    """Sends requests to a gateway. `keep_ids`: use the workload's request ids; only for one load at a time. `model`:
    where several are served.
    """

    def ask(request: Request) -> AsyncGenerator[Queued | Accepted | TextDelta | Completed, None]:
        sampling = request.sampling
        assert sampling.max_tokens is not None and sampling.seed is not None, "a workload sets both"
        return client.generate(
            request.prompt,
            request_id=request.id if keep_ids else "",
            session=request.session,
            model=model,
            slo=request.slo,
            timeout_s=deadline_s,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            seed=sampling.seed,
            n=sampling.n,
            ignore_eos=sampling.ignore_eos,
        )

    return ask


async def drive_cluster(
    client: AsyncClient, workload: Workload, load: LoadOptions, ended: Ended = nothing, model: str = ""
) -> Run:
    """`drive` through a gateway, with worker statistics. Raises `DiptychError` if the gateway does not answer."""
    before = (await client.status()).view
    run = await drive(through(client, load.deadline_s, model=model), workload, load, ended)
    after = (await client.status()).view
    workers = workers_between(before, after)
    return replace(run, gpus=sum(worker.gpus for worker in workers), workers=workers)


class GrpcEndpoint:
    """A running cluster. `open_grpc` owns the client."""

    def __init__(self, client: AsyncClient, address: str, name: str, model: str, vocab_size: int) -> None:
        self._client = client
        self._model = model
        self.name = name
        self.description = f"{name} at {address if '://' in address else f'grpc://{address}'}, model {model}"
        self.vocab_size = vocab_size

    async def drive(self, workload: Workload, load: LoadOptions, ended: Ended = nothing) -> Run:
        return await drive_cluster(self._client, workload, load, ended, self._model)


@asynccontextmanager
async def open_grpc(address: str, access: Access, model: str = "") -> AsyncIterator[GrpcEndpoint]:
    """Raises `DiptychError` if the gateway does not answer, `EndpointError` if its model is not loaded yet, or if
    `model` (empty: the only one) does not say which.
    """
    async with AsyncClient(address, access=access) as client:
        view = (await client.status()).view
        if view.model is None:
            raise EndpointError(f"{view.name} at {address} is still loading its model; try again later")
        served = {each.name: each for each in view.models}
        asked = served.get(model or (view.model.name if len(served) == 1 else ""))
        if asked is None:
            which = f"{view.name} at {address} serves {', '.join(served)}"
            raise EndpointError(f"{which}; choose one of them with --model")
        yield GrpcEndpoint(client, address, view.name, asked.name, asked.vocab_size)


def workers_between(before: ClusterView, after: ClusterView) -> tuple[WorkerRecord, ...]:
    """Differences of worker statistics over a run; of a worker that restarted, since its restart."""
    was = {worker.incarnation: worker.stats for worker in before.workers}
    records = []
    for worker in after.workers:
        now, then = worker.stats, was.get(worker.incarnation)
        records.append(
            WorkerRecord(
                worker.name,
                worker.pool,
                worker.role.value,
                worker.parallel.world_size,
                now.total_blocks,
                steps=now.steps - (then.steps if then else 0),
                preemptions=now.preemptions - (then.preemptions if then else 0),
            )
        )
    return tuple(records)
