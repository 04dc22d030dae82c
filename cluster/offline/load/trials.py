"""Runs the same load on several configurations in turn; each is started on this machine and stopped again.

    for each seed                  the order rotates by it, so each configuration gets every position
        for each configuration     start, warm up, one run for each rate that lacks one, stop

`cluster.offline.scoring.trials` compares the runs.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from cluster.offline.load.endpoint import Endpoint, EndpointError, Target
from cluster.offline.load.processes import Child, ProcessFailed
from cluster.offline.load.sender import Ended, LoadOptions, nothing
from cluster.offline.scoring.figures import figures
from cluster.offline.scoring.records import Run
from cluster.offline.scoring.trials import SeedRun
from cluster.offline.workload.arrivals import Workload
from cluster.offline.workload.changes import at_rate, first, run_number, with_distinct_prompts
from cluster.offline.workload.load import load_workload
from cluster.spec import Role
from cluster.spec_file import load_spec
from diptych.access import Access

START_S = 300.0
READY = "ready: grpc"  # or grpcs
WARM_UP = 2  # requests
KINDS = {"colocated=": True, "split=": False}  # prefixes of an endpoint's address


@dataclass(frozen=True, slots=True)
class Configuration:
    """One side of the comparison. `is_colocated`: its workers always do both phases; None: unknown.

    `target`: a server that already runs; else `path` is the YAML of a cluster to start.
    """

    name: str
    description: str
    is_colocated: bool | None
    path: Path | None = None
    target: Target | None = None


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """What each configuration is sent. `rates`: requests/s; None: the workload's own arrival times. `access`: for
    clusters that are started here. `concurrency`: requests in flight, whatever their times."""

    source: str
    rates: tuple[float | None, ...]
    seeds: tuple[int, ...]
    runtime: str = "ray"
    access: Access = field(default_factory=Access)
    concurrency: int | None = None

    def load_name(self, rate: float | None) -> str:
        if self.concurrency is not None:
            return f"{self.concurrency} in flight"
        return "as written" if rate is None else f"{rate:g} requests/s"

    def workload(self, rate: float | None, seed: int) -> Workload:
        """The same for every configuration, with other prompts at every rate."""
        made = load_workload(self.source, seed=seed)
        turn = 1 + self.rates.index(rate)
        return with_distinct_prompts(made if rate is None else at_rate(made, rate), run_number(seed, turn))

    def warm_up(self, seed: int) -> Workload:
        return with_distinct_prompts(first(load_workload(self.source, seed=seed), WARM_UP), run_number(seed, 0))

    def order(self, configurations: Sequence[Configuration], seed: int) -> list[Configuration]:
        """The configurations in the order for this seed."""
        first = seed % len(configurations)
        return [*configurations[first:], *configurations[:first]]


class TrialObserver(Protocol):
    """Called when a configuration starts, when a run begins (returns what to call after each request), and after it."""

    def starts(self, name: str) -> None: ...
    def runs(self, name: str, what: str, requests: int) -> Ended: ...
    def ran(self, trial: SeedRun) -> None: ...


def configuration_of(path: str) -> Configuration:
    """A cluster to start from its YAML. Raises `SpecError` and OSError."""
    spec = load_spec(path)
    spec.check_one_model("a comparison")
    pools = ", ".join(f"{pool.replicas} {pool.role.value}" for pool in spec.pools)
    is_colocated = spec.elastic.mode != "act" and all(pool.role is Role.MIXED for pool in spec.pools)
    return Configuration(spec.name, f"{spec.name}: {path}, {pools}", is_colocated, Path(path))


def kind_of(given: str) -> tuple[bool | None, str]:
    """Splits `colocated=ADDRESS` or `split=ADDRESS` into (is colocated, address); None without a prefix."""
    word = next((word for word in KINDS if given.startswith(word)), "")
    return KINDS.get(word), given.removeprefix(word)


def external(given: str, target: Target) -> Configuration:
    """A server that already runs and keeps running."""
    is_colocated, address = kind_of(given)
    kind = {True: "colocated", False: "split", None: "not known whether colocated or split"}[is_colocated]
    description = f"{address}, already running; {kind}"
    return Configuration(address.partition("://")[2], description, is_colocated, target=target)


async def run_trials(
    configurations: Sequence[Configuration],
    plan: TrialPlan,
    load: Callable[[Endpoint, int], LoadOptions],
    observer: TrialObserver,
    known: Collection[tuple[str, str, int]] = (),
) -> tuple[tuple[SeedRun, ...], dict[str, Run]]:
    """All runs but the `known` ones (configuration, load, seed), and the first one of each configuration with its
    records. Raises what starting one raises.
    """
    trials: list[SeedRun] = []
    firsts: dict[str, Run] = {}
    for seed in plan.seeds:
        for each in plan.order(configurations, seed):
            rates = [rate for rate in plan.rates if (each.name, plan.load_name(rate), seed) not in known]
            if not rates:
                continue
            observer.starts(each.name)
            async with running(each, plan) as endpoint:
                wanted = load(endpoint, seed)
                await endpoint.drive(plan.warm_up(seed), replace(wanted, concurrency=WARM_UP), nothing)
                for rate in rates:
                    workload, name = plan.workload(rate, seed), plan.load_name(rate)
                    ended = observer.runs(each.name, f"seed {seed}, {name}", len(workload.arrivals))
                    run = replace(await endpoint.drive(workload, wanted, ended), system=each.name)
                    firsts.setdefault(each.name, run)
                    trials.append(SeedRun(each.name, each.is_colocated, name, seed, figures(run, wanted.slo)))
                    observer.ran(trials[-1])
    return tuple(trials), firsts


@asynccontextmanager
async def running(configuration: Configuration, plan: TrialPlan) -> AsyncIterator[Endpoint]:
    """The configuration's endpoint for as long as the block lasts. Raises `EndpointError` with its last output."""
    if configuration.target is not None:
        async with open_endpoint(configuration.target) as endpoint:
            yield endpoint
        return
    command = [sys.executable, "-m", "cluster.cli", "serve", "-f", str(configuration.path), "--port", "0", "--no-http"]
    unbuffered = {"PYTHONUNBUFFERED": "1"}
    if "RAY_ADDRESS" in os.environ:
        raise EndpointError("RAY_ADDRESS is set; configurations share the cores of this machine only: unset it")
    with Child([*command, "--runtime", plan.runtime], unbuffered) as child:
        try:
            line = await asyncio.to_thread(child.wait_line, READY, START_S)
        except ProcessFailed as error:
            last = child.lines[-1].text if child.lines else ""
            why = last.removeprefix("Error: ") if last.startswith("Error: ") else str(error)
            raise EndpointError(f"{configuration.name} does not start: {why}") from error
        async with open_endpoint(Target(line.text.partition("ready: ")[2], access=plan.access)) as endpoint:
            yield endpoint


def open_endpoint(target: Target) -> AbstractAsyncContextManager[Endpoint]:
    """Connect and ask for the model. Raises `EndpointError` and `DiptychError`."""
    if target.is_http:
        from cluster.offline.load.http_endpoint import open_http

        return open_http(target)
    from cluster.offline.load.grpc_endpoint import open_grpc

    return open_grpc(target.address, target.access, target.model)
