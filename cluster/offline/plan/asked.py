"""What is asked of the planner, checked once. Knows hardware and models by name; simulates nothing.

PlanError   no answer can be given; the message says why, and what comes closest
"""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

from cluster.offline.plan.load import PlanLoad
from workers.profiles.hardware import Hardware, hardware_of
from workers.profiles.profile_errors import ProfileError
from workers.profiles.shapes import ModelShape, shape_of
from workers.profiles.sources import BEST, SOURCES, profile_of
from workers.request import SLO

OBJECTIVES = ("gpus", "cost", "power", "throughput")
NETWORKS = ("fast", "slow")
MOST_GPUS = 4096


class PlanError(ValueError):
    """There is no plan; the message says what to change, or what comes closest."""


@dataclass(frozen=True)
class PlanRequest:
    """`gpus`: at most so many, of all kinds together, on `nodes` nodes (None: as the data sheets have them).

    `rate` in requests a second: the cluster shall serve it at the least GPUs, cost or power, as `objective` says; None:
    the most goodput for each of those, or the most of all ("throughput"). `requests` are those of one simulated run of
    one instance. Raises `PlanError` and `ProfileError`.
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
    network: str = "fast"
    requests: int = 300
    seeds: tuple[int, ...] = (0, 1, 2)
    tolerance: float = 0.03
    source: str = BEST
    most_requests: int = 1_000_000  # simulated in the whole search
    sheets: dict[str, Hardware] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._check_numbers()
        for name, known in (("objective", OBJECTIVES), ("network", NETWORKS)):
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

        promises = (("ttft", self.slo.ttft_s), ("tpot", self.slo.tpot_s))
        for name, seconds in promises:
            need(seconds is not None and 0.0 < seconds < math.inf, f"{name} is {seconds}; it", "above 0 seconds")
        need(1 <= self.gpus <= MOST_GPUS, f"gpus is {self.gpus}; it", f"from 1 to {MOST_GPUS}")
        need(self.rate is None or 0.0 < self.rate < math.inf, f"rate is {self.rate}; it", "above 0 requests a second")
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
        if self.objective == "cost" and sheet.price_per_hour is None:
            raise PlanError(f"nobody's price of {name} is known here; give a hardware file with price_per_hour")
        return sheet if self.nodes is None else replace(sheet, gpus_per_node=self.gpus // self.nodes)

    @cached_property
    def shape(self) -> ModelShape:
        return shape_of(self.model)

    @cached_property
    def sources(self) -> dict[str, str]:
        """For each kind of hardware the one source of step times by which all its instances are measured, the best that
        has any: figures of two sources differ by more than placements do."""
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
        """What one GPU counts for the objective: itself, its dollars an hour, or its watts."""
        sheet = self.sheets[hardware]
        if self.objective == "cost":
            assert sheet.price_per_hour is not None, "checked when asked"
            return sheet.price_per_hour
        return sheet.watts if self.objective == "power" else 1.0

    @property
    def unit(self) -> str:
        """What weights are counted in."""
        return {"cost": "$/h", "power": "W"}.get(self.objective, "GPU")

    def one_node(self, gpus: int) -> bool:
        """Whether so many GPUs stand in one node, whatever their kind."""
        return gpus <= min(sheet.gpus_per_node for sheet in self.sheets.values())
