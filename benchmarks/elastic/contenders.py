"""The compared systems: every named system and router, and static configurations of the same workers. Pure."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.elastic.scenarios import Scenario
from cluster.offline.sim.compare import Case
from cluster.offline.sim.systems import SYSTEMS, arrange, prefills_of
from cluster.spec import ROUTING, ClusterSpec, SpecError

CHUNKS = (256, 512, 1024, 2048)  # tokens of a colocated worker's step
PROMPT_CHUNKS = (1024, 2048, 8192)  # of a prefill worker's
SPLIT, COLOCATED = "distserve", "sarathi"  # systems whose pools a static configuration has
SPLITTING = ("distserve", "splitwise")  # routers for split pools
OUR_ROUTER = "slo"
WITH_ADMISSION = "slo+admission"  # with our admission too
ROUTERS = (*ROUTING, WITH_ADMISSION)
_NAMED = re.compile(
    r"((?P<routing>\S+) on )?(split (?P<prefills>\d+), chunk (?P<chunk>\d+)|colocated, chunk (?P<mixed>\d+)"
    r"|(?P<system>[a-z-]+)(, split (?P<halves>\d+))?)"
)


@dataclass(frozen=True, slots=True)
class Contender:
    """A system with its settings. `prefills`: prefill workers (0: colocated, or the split that suits the mean request).

    `chunk`: the step's token budget for prompts; 0: the system's own. `plain`: a static configuration, chunked and
    least-loaded, whose `system` only defines the pools. `routing`: one of `ROUTERS` instead of the system's.
    """

    system: str
    prefills: int = 0
    chunk: int = 0
    plain: bool = False
    routing: str = ""

    @property
    def name(self) -> str:
        """`contender_named` is its inverse."""
        return f"{self.routing} on {self._configuration}" if self.routing else self._configuration

    @property
    def is_ours_in_part(self) -> bool:
        """Our router with fixed roles."""
        return self.routing in (OUR_ROUTER, WITH_ADMISSION)

    @property
    def _configuration(self) -> str:
        if not self.plain:
            return f"{self.system}, split {self.prefills}" if self.prefills else self.system
        return f"split {self.prefills}, chunk {self.chunk}" if self.prefills else f"colocated, chunk {self.chunk}"


def splits(workers: int, chunks: Sequence[int] = PROMPT_CHUNKS) -> Iterator[Contender]:
    """Every split with each chunk size, and DistServe with whole prompts."""
    for prefills in range(1, workers):
        yield Contender(SPLIT, prefills)
        for chunk in chunks:
            yield Contender(SPLIT, prefills, chunk, plain=True)


def colocated(chunks: Sequence[int] = CHUNKS) -> Iterator[Contender]:
    """Colocated with each chunk size, and vLLM with whole prompts first."""
    yield Contender("vllm")
    for chunk in chunks:
        yield Contender(COLOCATED, 0, chunk, plain=True)


def named(prefills: int = 0) -> tuple[Contender, ...]:
    """Every system but ours; split ones have `prefills` prefill workers."""
    return tuple(Contender(name, prefills if each.is_split else 0) for name, each in SYSTEMS.items() if name != "ours")


def routed(split: Contender, better: Contender, names: Sequence[str] = ROUTERS) -> tuple[Contender, ...]:
    """Each router on the better of the best static configurations; routers for split pools on the best split."""
    return tuple(replace(split if name in SPLITTING else better, routing=name) for name in names)


def contender_named(name: str) -> Contender:
    """The inverse of `Contender.name`. Raises `SpecError`."""
    found = _NAMED.fullmatch(name)
    if found is None:
        raise SpecError(f"{name!r} is no contender; write 'ours', 'split 2, chunk 2048' or 'colocated, chunk 512'")
    routing = found["routing"] or ""
    if found["prefills"]:
        return Contender(SPLIT, int(found["prefills"]), int(found["chunk"]), plain=True, routing=routing)
    if found["mixed"]:
        return Contender(COLOCATED, 0, int(found["mixed"]), plain=True, routing=routing)
    return Contender(found["system"], int(found["halves"] or 0), routing=routing)


OURS = Contender("ours")


@dataclass(frozen=True, slots=True)
class View:
    """A gateway's view: statistics are `stale_s` old, `gateways` share the requests, calls take `call_s`.

    `heartbeat_s` of 0 is the fleet's own.
    """

    stale_s: float = 0.0
    gateways: int = 1
    call_s: float = 0.0
    heartbeat_s: float = 0.0


FRESH = View()


def case_of(contender: Contender, scenario: Scenario, view: View = FRESH) -> Case:
    """Raises `SpecError` for an impossible system or split."""
    model = replace(scenario.machines.model(), call_s=view.call_s)
    spec = _viewed(_arranged(contender, scenario), view)
    return Case(contender.name, spec, {pool.name: model for pool in spec.pools})


def _arranged(contender: Contender, scenario: Scenario) -> ClusterSpec:
    fleet, prefills = scenario.fleet, contender.prefills
    if not prefills and not contender.plain:
        cost, load = scenario.machines.model().cost, scenario.draw(1.0, 0)
        prefills = prefills_of(contender.system, cost, fleet, load, scenario.slo)
    spec = arrange(contender.system, fleet, prefills)
    engine: dict[str, Any] = {"batching": "chunked"} if contender.plain else {}
    if contender.chunk:
        engine["max_batch_tokens"] = max(contender.chunk, fleet.engine.max_running)
    pools = tuple(replace(pool, engine=replace(pool.engine, **engine)) for pool in spec.pools)
    routing = contender.routing or ("least-loaded" if contender.plain else spec.gateway.routing)
    known: dict[str, Any] = (
        {"routing": OUR_ROUTER, "admission": "slo"} if routing == WITH_ADMISSION else {"routing": routing}
    )
    gateway = replace(spec.gateway, **known)
    return replace(spec, pools=pools, gateway=gateway)


def _viewed(spec: ClusterSpec, view: View) -> ClusterSpec:
    beat_s = view.heartbeat_s or spec.health.heartbeat_s
    health = replace(spec.health, heartbeat_s=beat_s, dead_after_s=max(spec.health.dead_after_s, 10.0 * beat_s))
    return replace(spec, health=health, gateway=replace(spec.gateway, replicas=view.gateways))
