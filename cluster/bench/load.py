"""A workload sent to a running cluster, each request at its time, whatever became of those before it.

Time to first token counts from the moment the workload names, also when the sender was late (no coordinated omission).
Knows a way to ask and the clock; knows no cluster.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from cluster.api.client import DiptychClient
from cluster.api.errors import DiptychError
from cluster.events import Accepted, ClusterError, Completed, Delta, Queued, Rejected
from cluster.scoring.records import Ending, Run, WorkerRecord
from cluster.scoring.watch import Watch
from cluster.text import TextDelta
from cluster.view import ClusterView
from cluster.workload.arrivals import Workload
from cluster.workload.prompts import request
from workers.request import SLO, Request

Ask = Callable[[Request], AsyncGenerator[Queued | Accepted | Delta | TextDelta | Completed, None]]

NO_ROOM = ("RESOURCE_EXHAUSTED", "UNAVAILABLE")  # a door's ways of saying no


@dataclass(frozen=True, slots=True)
class Load:
    """How a workload is sent. One more request than `most_in_flight` is refused here, and one that takes longer than
    `deadline_s` is given up. `seed` is the requests' own."""

    vocab_size: int
    deadline_s: float = 300.0
    most_in_flight: int = 256
    seed: int = 0
    slo: SLO = field(default_factory=SLO)
    system: str = ""

    def __post_init__(self) -> None:
        if not self.deadline_s > 0.0 or self.most_in_flight < 1:
            raise ValueError(f"deadline_s is {self.deadline_s} and most_in_flight {self.most_in_flight}; both above 0")


def through(client: DiptychClient, deadline_s: float) -> Ask:
    """A cluster's gRPC door."""

    def ask(request: Request) -> AsyncGenerator[Queued | Accepted | TextDelta | Completed, None]:
        sampling = request.sampling
        assert sampling.max_tokens is not None and sampling.seed is not None, "a workload says both"
        return client.generate(
            request.prompt,
            session=request.session,
            slo=request.slo,
            timeout_s=deadline_s,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            seed=sampling.seed,
            ignore_eos=sampling.ignore_eos,
        )

    return ask


async def drive(ask: Ask, workload: Workload, load: Load) -> Run:
    """Send all of it and wait for the last answer; cancelling ends every request. What nobody foresaw is raised.

    The run counts one GPU and no workers: who asks may know better.
    """
    sender = _Sender(ask, workload, load)
    await sender.run()
    return sender.result()


async def drive_cluster(client: DiptychClient, workload: Workload, load: Load) -> Run:
    """The same through a cluster's door, with its workers' own counts. Raises `DiptychError` when nobody answers."""
    before = (await client.status()).view
    run = await drive(through(client, load.deadline_s), workload, load)
    after = (await client.status()).view
    workers = workers_between(before, after)
    return replace(run, gpus=sum(worker.gpus for worker in workers), workers=workers)


class _Sender:
    def __init__(self, ask: Ask, workload: Workload, load: Load) -> None:
        self._ask = ask
        self._workload = workload
        self._load = load
        self._begin_s = asyncio.get_running_loop().time() - workload.arrivals[0].at_s
        self._watches = [Watch(index, arrival, self._now_s) for index, arrival in enumerate(workload.arrivals)]
        self._in_flight = 0
        self._late_s = 0.0

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time() - self._begin_s

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for watch in self._watches:
                    made = request(
                        self._workload,
                        watch.index,
                        self._load.vocab_size,
                        slo=self._load.slo,
                        seed=self._load.seed,
                    )
                    await asyncio.sleep(watch.arrival.at_s - self._now_s())
                    self._late_s = max(self._late_s, self._now_s() - watch.arrival.at_s)
                    if self._in_flight >= self._load.most_in_flight:
                        watch.end(Ending.REJECTED, f"{self._in_flight} requests were in flight already")
                        continue
                    self._in_flight += 1
                    group.create_task(self._one(watch, made))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _one(self, watch: Watch, made: Request) -> None:
        try:
            async with asyncio.timeout(self._load.deadline_s), aclosing(self._ask(made)) as events:
                async for event in events:
                    watch.see(event)
        except Rejected as error:
            watch.end(Ending.REJECTED, str(error))
        except DiptychError as error:
            watch.end(Ending.REJECTED if error.code in NO_ROOM else Ending.FAILED, str(error))
        except ClusterError as error:
            watch.end(Ending.FAILED, f"{type(error).__name__}: {error}")
        except TimeoutError:
            watch.end(Ending.FAILED, f"no end within {self._load.deadline_s:g} s")
        finally:
            self._in_flight -= 1

    def result(self) -> Run:
        wall_s = self._now_s() - self._workload.arrivals[0].at_s  # of one clock with the rest
        served = tuple(watch.served() for watch in self._watches)
        ends = [each.token_s[-1] for each in served if len(each.token_s)]
        return Run(
            system=self._load.system,
            workload=self._workload.name,
            clock="real",
            seed=self._load.seed,
            gpus=1,
            seconds=max(ends, default=0.0) - served[0].arrival_s,
            wall_s=wall_s,
            served=served,
            notes=(*self._workload.notes, f"sent at most {self._late_s * 1e3:.1f} ms late"),
        )


def workers_between(before: ClusterView, after: ClusterView) -> tuple[WorkerRecord, ...]:
    """What the workers' own counts tell of a run; of one that restarted meanwhile, since then."""
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
                swaps=now.swaps - (then.swaps if then else 0),
            )
        )
    return tuple(records)
