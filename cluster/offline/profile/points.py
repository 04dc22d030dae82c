"""Which steps are measured for a fit. Pure.

An engine refuses those beyond its budgets, so the lists hold small and large ones for any machine.
"""

from collections.abc import Iterable
from itertools import product

from diptych.shapes import Shape

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
PREFILL_LOAD = _prompts((2048, 1024, 512, 256, 128, 64, 16), (0,))  # the first that fits: what keeps a worker busy
DECODE_LOAD = _decodes((4, 2, 1), (200, 32))
