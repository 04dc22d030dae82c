"""What steps, transfers and swaps cost in seconds. Pure: no clock, no device.

The router predicts with a `CostModel`, the modelled executor and the simulator sleep by it.
"""

from workers.costs.linear import LinearCost
from workers.costs.port import CostModel

__all__ = ["CostModel", "LinearCost"]
