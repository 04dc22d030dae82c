"""What all cost models of published or computed profiles share: their link, their swap, and a ratio of slowness."""

from dataclasses import dataclass, replace
from typing import Self

from workers.costs.port import CostModel, refuse_nonsense


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledCost(CostModel):
    """`ratio` multiplies every step. Seconds, and seconds for each byte; without a network both transfers are free."""

    transfer_latency_s: float = 0.0
    transfer_byte_s: float = 0.0
    swap_byte_s: float = 0.0
    ratio: float = 1.0

    def __post_init__(self) -> None:
        refuse_nonsense(self)

    def scaled(self, ratio: float) -> Self:
        return replace(self, ratio=self.ratio * ratio)
