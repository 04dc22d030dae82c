"""Seconds of steps, transfers and swaps. Pure: no clock, no device.

The router predicts with a `CostModel`; the simulated executor and the simulator wait for the times it gives.

    CostModel            the port: seconds of a mixed step, and what follows from them
    ├─ LinearCost        few coefficients, fitted from running workers
    ├─ PhasedCost        DistServe's fits of prefill and decode
    ├─ TableCost         Splitwise's measured steps
    ├─ LayeredCost       Vidur's measured operators of a layer
    ├─ RooflineCost      arithmetic and memory traffic, for hardware without measurements
    └─ CorrectedCost     another one, corrected by the steps that ran
"""

from workers.costs.linear import LinearCost as LinearCost
from workers.costs.port import MAX_TOKENS as MAX_TOKENS
from workers.costs.port import CorrectedCost as CorrectedCost
from workers.costs.port import CostModel as CostModel
from workers.costs.port import step_seconds as step_seconds
from workers.costs.profiled import LayeredCost as LayeredCost
from workers.costs.profiled import PhasedCost as PhasedCost
from workers.costs.profiled import RooflineCost as RooflineCost
from workers.costs.profiled import StepCurve as StepCurve
from workers.costs.profiled import TableCost as TableCost
