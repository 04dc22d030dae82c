"""Cluster views made by hand, and policies over them."""

from dataclasses import replace
from typing import Any

from cluster.policy.policy import Policy, open_policy
from cluster.policy.routing.router import Enqueue, Placement, PlacementQuery, Refusal, SentWork
from cluster.spec import ClusterSpec, GatewaySpec, PoolSpec, Role
from diptych.view import ClusterView, WorkerState, WorkerView
from kvtransfer.ticket import LinkReport
from workers.config import EngineConfig
from workers.costs import CostModel, LinearCost
from workers.request import SLO, Request, SamplingParams
from workers.stats import WorkerStats

BLOCK = 16
BLOCKS = 1000
# A millisecond for each prompt token, ten for each sequence of a decode step, nothing else: sums by heart.
SIMPLE = LinearCost(0.0, 0.001, 0.0, 0.01, 0.0, 0.0, 0.0, 0.0)
ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "m": Role.MIXED}


def worker(name: str, **stats: Any) -> WorkerView:
    """Ready; its pool and role follow from the first letter of its name. `used` counts blocks."""
    role, used = ROLES[name[0]], int(stats.pop("used", 0))
    known = WorkerStats(**{"total_blocks": BLOCKS, "free_blocks": BLOCKS - used} | stats)
    return WorkerView(name, role.value, role, WorkerState.READY, "1", capacity_tokens=BLOCK * BLOCKS, stats=known)


def view(*workers: WorkerView) -> ClusterView:
    """Every pair is linked."""
    links = tuple(LinkReport(a.name, b.name, "memory", "", 0.0, 1e9) for a in workers for b in workers if a is not b)
    return ClusterView(1, "c", None, workers, links)


def only_linked(picture: ClusterView, *pairs: tuple[str, str]) -> ClusterView:
    """The view in which KV can move only between these pairs."""
    names = [each.name for each in picture.workers]
    every = frozenset((owner, reader) for owner in names for reader in names)
    return replace(picture, unlinked=every - frozenset(pairs))


def changed(picture: ClusterView, *workers: WorkerView) -> ClusterView:
    """The same workers and links, with these workers as they are now."""
    now = {each.name: each for each in workers}
    return replace(picture, workers=tuple(now.get(each.name, each) for each in picture.workers))


def request(
    name: str = "r", length: int = 100, *, max_tokens: int = 9, first: int = 0, slo: SLO | None = None, attempt: int = 0
) -> Request:
    prompt = tuple(range(first, first + length))
    return Request(name, prompt, SamplingParams(seed=1, max_tokens=max_tokens), slo or SLO(), attempt=attempt)


def spec(
    routing: str, admission: str = "none", slo: SLO | None = None, cost: CostModel | None = None, **engine: int
) -> ClusterSpec:
    config = EngineConfig(**{"block_size": BLOCK, "kv_blocks": BLOCKS, "max_batch_tokens": 100_000} | engine)  # type: ignore[arg-type]
    return ClusterSpec(
        model="m",
        pools=tuple(PoolSpec(role.value, role, engine=config, cost=cost) for role in Role),
        gateway=GatewaySpec(routing=routing, admission=admission, slo=slo or SLO()),
    )


class Story:
    """A policy and its events, on its own clock."""

    def __init__(
        self,
        routing: str,
        admission: str = "none",
        slo: SLO | None = None,
        *,
        seed: int = 1,
        cost: CostModel | None = SIMPLE,
        **engine: int,
    ) -> None:
        self.policy: Policy = open_policy(spec(routing, admission, slo, cost, **engine), seed)
        self.now_s = 1000.0

    def ask(
        self, picture: ClusterView, wanted: Request, sent: dict[str, SentWork] | None = None, **options: object
    ) -> PlacementQuery:
        return PlacementQuery(picture, wanted, sent or {}, now_s=self.now_s, **options)  # type: ignore[arg-type]

    def choose(self, picture: ClusterView, wanted: Request, **options: object) -> Placement | Refusal | Enqueue | None:
        return self.policy.choose(self.ask(picture, wanted, **options))  # type: ignore[arg-type]

    def names(self, picture: ClusterView, wanted: Request | None = None, **options: object) -> tuple[str, str]:
        placement = self.choose(picture, wanted or request(), **options)
        assert isinstance(placement, Placement), placement
        return placement.prefill, placement.decode

    def send(self, picture: ClusterView, wanted: Request, **options: object) -> Placement:
        """Choose, and begin."""
        query = self.ask(picture, wanted, **options)  # type: ignore[arg-type]
        placement = self.policy.choose(query)
        assert isinstance(placement, Placement), placement
        self.policy.began(query, placement)
        return placement

    def prefilled(self, wanted: Request) -> None:
        self.policy.prefilled(wanted.key, self.now_s)

    def ended(self, wanted: Request) -> None:
        self.policy.ended(wanted.key, self.now_s)
