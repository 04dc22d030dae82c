"""How long a step of a shape takes by a cost model. Knows costs; knows no plan and no engine."""

from diptych.shapes import Shape as Shape
from diptych.shapes import Timings as Timings
from workers.costs import CostModel


def step_seconds(shape: Shape, cost: CostModel) -> float:
    step_s = cost.mixed_seconds(shape.chunks, shape.batch, shape.batch * shape.context)
    return step_s + cost.swap_seconds(shape.swap_bytes)
