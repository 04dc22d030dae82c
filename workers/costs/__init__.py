"""Seconds of steps, transfers and swaps. Pure: no clock, no device.

The router predicts with a `CostModel`; the modelled executor and the simulator wait for the times it gives.

    CostModel            the port: seconds of a mixed step, and what follows from them
    ├─ LinearCost        few coefficients, fitted from running workers
    ├─ PhasedCost        DistServe's fits of prefill and decode
    ├─ TableCost         Splitwise's measured steps
    ├─ LayeredCost       Vidur's measured operators of a layer
    ├─ RooflineCost      arithmetic and memory traffic, for hardware without measurements
    └─ CorrectedCost     another one, corrected by the steps that ran
"""

from workers.costs.corrected import CorrectedCost
from workers.costs.linear import LinearCost
from workers.costs.port import MAX_TOKENS, CostModel, step_seconds
from workers.costs.profiled import LayeredCost, PhasedCost, RooflineCost, StepCurve, TableCost

__all__ = [
    "MAX_TOKENS",
    "CorrectedCost",
    "CostModel",
    "LayeredCost",
    "LinearCost",
    "PhasedCost",
    "RooflineCost",
    "StepCurve",
    "TableCost",
    "step_seconds",
]
