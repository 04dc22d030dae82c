"""The question for the planner, validated once. Knows hardware and models by name; simulates nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

from cluster.offline.plan.load import PlanLoad
from workers.profiles.hardware import Hardware, hardware_of
from workers.profiles.profile_errors import ProfileError
from workers.profiles.shapes import ModelShape, shape_of
from workers.profiles.sources import BEST, INTER_NODE, LINKS, SOURCES, profile_of
from workers.request import SLO

OBJECTIVES = ("gpus", "cost", "power", "throughput")
MAX_GPUS = 4096


class PlanError(ValueError):
    """There is no plan; the message says why, and what to change or what comes closest."""


@dataclass(frozen=True)
class PlanRequest:
    """`gpus`: at most this many, of all kinds together, on `nodes` nodes (None: sized by the data sheets).

    `rate`: requests/s to serve with the least GPUs, cost or power, as `objective` says. Without a rate, the planner
    maximizes goodput per GPU, dollar or watt, or total goodput ("throughput"). `requests`: of one simulated run of one
    instance. Raises `PlanError` and `ProfileError`.
    """

    model: str
    hardware: tuple[str, ...]
    gpus: int
    load: PlanLoad
    slo: SLO
    nodes: int | None = None
    rate: float | None = None
    target: float = 0.9
    objective: str = "gpus"
    kv_link: str = INTER_NODE  # pairs of prefill and decode inside nodes, or anywhere
    requests: int = 300
    seeds: tuple[int, ...] = (0, 1, 2)
    tolerance: float = 0.03
    source: str = BEST
    kv_dtype: str = ""  # int8 or fp8; empty: that of the weights
    max_requests: int = 1_000_000  # simulated in the whole search
    prices: Mapping[str, float] = field(default_factory=dict)  # $/hour by kind, instead of the data sheets'
    sheets: dict[str, Hardware] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._check_numbers()
        for name, known in (("objective", OBJECTIVES), ("kv_link", LINKS)):
            if getattr(self, name) not in known:
                raise PlanError(f"{name} {getattr(self, name)!r} is not one of {', '.join(known)}")
        if not self.hardware or len(set(self.hardware)) != len(self.hardware):
            raise PlanError("hardware: name one or more different kinds")
        shape_of(self.model)
        object.__setattr__(self, "sheets", {name: self._sheet(name) for name in self.hardware})

    def _check_numbers(self) -> None:
        def need(ok: bool, what: str, rule: str) -> None:
            if not ok:
                raise PlanError(f"{what} must be {rule}")

        for name, seconds in (("ttft", self.slo.ttft_s), ("tpot", self.slo.tpot_s)):
            need(seconds is not None and 0.0 < seconds < inf, f"{name} is {seconds}; it", "above 0 seconds")
        need(1 <= self.gpus <= MAX_GPUS, f"gpus is {self.gpus}; it", f"from 1 to {MAX_GPUS}")
        need(self.rate is None or 0.0 < self.rate < inf, f"rate is {self.rate}; it", "above 0 requests/s")
        need(0.0 < self.target <= 1.0, f"target is {self.target}; it", "a share above 0 and at most 1")
        need(10 <= self.requests <= 100_000, f"requests is {self.requests}; it", "from 10 to 100,000")
        seeds = self.seeds
        need(bool(seeds) and len(set(seeds)) == len(seeds), f"seeds are {seeds}; they", "one or more, and differ")
        need(
            self.nodes is None or (1 <= self.nodes <= self.gpus and self.gpus % self.nodes == 0),
            f"nodes is {self.nodes}; it",
            f"a number of equal nodes with {self.gpus} GPUs in all",
        )

    def _sheet(self, name: str) -> Hardware:
        sheet = hardware_of(name)
        sheet = replace(sheet, price_per_hour=self.prices.get(name, sheet.price_per_hour))
        if self.objective == "cost" and sheet.price_per_hour is None:
            raise PlanError(
                f"no price of {name} is known; give it with --price {name}=DOLLARS an hour, or take --objective gpus"
            )
        return sheet if self.nodes is None else replace(sheet, gpus_per_node=self.gpus // self.nodes)

    @cached_property
    def shape(self) -> ModelShape:
        return replace(shape_of(self.model), kv_dtype=self.kv_dtype)

    @cached_property
    def sources(self) -> dict[str, str]:
        """One source of step times per kind of hardware, the best that covers any of its instances.

        Two sources differ by more than placements do, so all instances must use the same one.
        """
        return {name: self._source(sheet) for name, sheet in self.sheets.items()}

    def _source(self, sheet: Hardware) -> str:
        if self.source != BEST:
            return self.source
        found = set()
        for tensor in range(1, min(sheet.gpus_per_node, self.gpus) + 1):
            try:
                found.add(profile_of(self.shape, sheet, tensor).source)
            except ProfileError:
                continue
        return min(found, key=SOURCES.index)

    def weight(self, hardware: str) -> float:
        """What one GPU counts for the objective: 1, its dollars per hour, or its watts."""
        sheet = self.sheets[hardware]
        if self.objective == "cost":
            assert sheet.price_per_hour is not None, "checked at construction"
            return sheet.price_per_hour
        return sheet.watts if self.objective == "power" else 1.0

    @property
    def goal(self) -> str:
        """What is sought, as a sentence."""
        gpus = f"{self.gpus} GPU{'s' * (self.gpus > 1)}"
        if self.rate is not None:
            least = {"cost": "dollars", "power": "watts"}.get(self.objective, "GPUs")
            return f"Goal: {self.rate:g} requests/s with the least {least}, at most {gpus}."
        most = "" if self.objective == "throughput" else f" per {self.unit}"
        return f"Goal: the most requests/s{most}, at most {gpus}; --rate R: the least that serve R requests/s."

    @property
    def unit(self) -> str:
        """The unit of weights."""
        return {"cost": "$/h", "power": "W"}.get(self.objective, "GPU")

    def one_node(self, gpus: int) -> bool:
        """Whether this many GPUs fit in one node, whatever their kind."""
        return gpus <= min(sheet.gpus_per_node for sheet in self.sheets.values())
