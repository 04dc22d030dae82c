"""Step times measured through the gateway: the points of a fit. Knows the client and shapes; knows no engine."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from statistics import median

from diptych.client import AsyncClient
from diptych.errors import DiptychError
from diptych.shapes import Shape, Timings
from workers.profiles.fit import COEFFICIENTS, Point
from workers.profiles.profile_errors import ProfileError

CHUNKS = (16, 64, 128, 256, 512, 1024, 2048)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
SWAP_BYTES = 8 << 20


def _prompts(chunks: Iterable[int], cached: Iterable[int]) -> tuple[Shape, ...]:
    return tuple(Shape(((tokens, before),)) for tokens, before in product(chunks, cached))


def _decodes(batches: Iterable[int], contexts: Iterable[int]) -> tuple[Shape, ...]:
    return tuple(Shape((), batch, context) for batch, context in product(batches, contexts))


def _mixed(chunks: Iterable[int], cached: int, batches: Iterable[int], context: int) -> tuple[Shape, ...]:
    return tuple(Shape(((tokens, cached),), batch, context) for tokens, batch in product(chunks, batches))


SEEN = (
    *_prompts(CHUNKS, (0,)),
    *_prompts((16, 64, 256, 1024), (512, 1536)),
    *(Shape(((64, 0),) * count) for count in (2, 4, 8)),
    *_decodes(BATCHES, (64, 480)),
    *_decodes((1, 4, 10), (1500,)),
    *_mixed((32, 128, 224), 512, (4, 16, 31), 300),
    *(Shape((), 1, 64, swap_bytes=count * SWAP_BYTES) for count in (1, 4)),
)
HELD_OUT = (
    *_prompts((32, 96, 192, 384, 768), (0,)),
    *_prompts((48, 160, 640), (1024,)),
    Shape(((50, 0),) * 3),
    *_decodes((1, 3, 6, 12, 20), (200, 700)),
    *_mixed((40, 100, 400), 256, (2, 8, 24), 400),
)
PREFILL_LOAD = _prompts((2048, 1024, 512, 256, 128, 64, 16), (0,))  # the first that fits keeps a worker busy
DECODE_LOAD = _decodes((4, 2, 1), (200, 32))

REPEAT_S = 0.25  # short steps are repeated for this long in a round
MAX_REPEATS = 8
TRIES = 3

OnProgress = Callable[[int, int], None]  # done, total


@dataclass(frozen=True, slots=True)
class Steps:
    """Of one worker. `call_s`: a round trip from the gateway."""

    points: tuple[Point, ...]
    call_s: float


async def measure_steps(client: AsyncClient, worker: str, rounds: int, on_progress: OnProgress) -> Steps:
    """Medians over rounds. Each round measures every shape that the worker's engine takes.

    Raises `DiptychError` when the worker is busy or gone, `ProfileError` when it takes too few shapes for a fit.
    """
    shapes = (*SEEN, *HELD_OUT)
    seconds: dict[Shape, list[float]] = defaultdict(list)
    calls: list[float] = []
    for number in range(rounds):
        for done, shape in enumerate(shapes if number == 0 else tuple(seconds)):
            known = seconds.get(shape)
            repeats = max(1, min(MAX_REPEATS, int(REPEAT_S / max(known[0], 1e-4)))) if known else 1
            if timings := await measured(client, worker, shape, repeats):
                seconds[shape] += timings.seconds
                calls.append(timings.call_s)
            on_progress(number * len(shapes) + done + 1, rounds * len(shapes))
    points = tuple(Point(shape, median(took), shape in HELD_OUT) for shape, took in seconds.items() if took)
    if sum(not point.held_out for point in points) <= len(COEFFICIENTS):
        raise ProfileError(
            f"{worker} could be measured with {len(points)} of {len(shapes)} shapes, too few for a fit: raise "
            "engine.max_batch_tokens, engine.max_running or engine.kv_blocks, or measure when no requests come"
        )
    if not all(point.seconds > 0.0 for point in points):
        raise ProfileError(f"the steps of {worker} take no time; a simulated worker without a cost has none to fit")
    return Steps(points, max(0.0, median(calls)))


async def measured(client: AsyncClient, worker: str, shape: Shape, repeats: int) -> Timings | None:
    """None: the engine takes no such step. Waits for earlier requests to be cleaned up, `TRIES` times."""
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
