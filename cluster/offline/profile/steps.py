"""Steps measured through the door: the points of a fit.

Knows the client and shapes; knows no engine.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from cluster.offline.profile.points import HELD_OUT, SEEN
from diptych.client import AsyncClient
from diptych.errors import DiptychError
from diptych.shapes import Shape, Timings
from workers.profiles.errors import ProfileError
from workers.profiles.fit import COEFFICIENTS, Point

SHORT_S = 0.25  # steps are repeated for so long in a round
MOST_REPEATS = 8
TRIES = 3

Tell = Callable[[int, int], None]  # done, of how many


@dataclass(frozen=True, slots=True)
class Steps:
    """Of one worker. `call_s`: from the gateway to it and back."""

    points: tuple[Point, ...]
    call_s: float


async def measure_steps(client: AsyncClient, worker: str, rounds: int, tell: Tell) -> Steps:
    """Medians over rounds, each of which measures every shape that this worker's engine takes.

    Raises `DiptychError` (it has work, is gone), `ProfileError` when it takes too few shapes for a fit.
    """
    shapes = (*SEEN, *HELD_OUT)
    seconds: dict[Shape, list[float]] = defaultdict(list)
    calls: list[float] = []
    for number in range(rounds):
        for done, shape in enumerate(shapes if number == 0 else tuple(seconds)):
            told = seconds.get(shape)
            repeats = max(1, min(MOST_REPEATS, int(SHORT_S / max(told[0], 1e-4)))) if told else 1
            if timings := await measured(client, worker, shape, repeats):
                seconds[shape] += timings.seconds
                calls.append(timings.call_s)
            tell(number * len(shapes) + done + 1, rounds * len(shapes))
    points = tuple(Point(shape, median(took), shape in HELD_OUT) for shape, took in seconds.items() if took)
    if sum(not point.held_out for point in points) <= len(COEFFICIENTS):
        raise ProfileError(
            f"{worker} could be measured with {len(points)} of {len(shapes)} shapes, too few for a fit: raise "
            "engine.max_batch_tokens, engine.max_running or engine.kv_blocks, or measure when no requests come"
        )
    if not all(point.seconds > 0.0 for point in points):
        raise ProfileError(f"the steps of {worker} take no time; a modelled worker without a cost has none to fit")
    return Steps(points, max(0.0, median(calls)))


async def measured(client: AsyncClient, worker: str, shape: Shape, repeats: int) -> Timings | None:
    """None: no step there can have this shape. What the last request left behind is waited for, `TRIES` times."""
    for left in reversed(range(TRIES)):
        try:
            return await client.measure(worker, shape, repeats)
        except DiptychError as error:
            if error.code == "INVALID_ARGUMENT" and error.field == "shape":
                return None
            if error.code != "RESOURCE_EXHAUSTED" or not left:
                raise
            await asyncio.sleep(error.retry_after_s or 0.0)
    raise AssertionError("the last try answers or raises")
