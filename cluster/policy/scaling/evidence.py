"""What gateways tell the controller of the load, and what it may decide to change. Frozen: it crosses processes."""

from msgspec import Struct

from diptych.view import Decision as Decision


class Sample(Struct, frozen=True, gc=False):
    """One request, reported once it has ended. Seconds are None where there was no such token or no such SLO.

    `computed_tokens` of its prompt were not cached.
    """

    prompt_tokens: int
    computed_tokens: int
    output_tokens: int
    ttft_s: float | None = None
    tpot_s: float | None = None
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None


class Report(Struct, frozen=True, gc=False):
    """Of one gateway, about what happened since its last one, `seconds` ago.

    `arrived` requests came, with `arrived_tokens` of prompt; their answers are expected to have `expected_tokens`.
    `overdue` wait for a first token that was promised by now; `waiting` have none yet, and the longest of them has
    waited `oldest_wait_s`.
    """

    gateway: str
    seconds: float
    arrived: int
    arrived_tokens: int
    waiting: int = 0
    overdue: int = 0
    oldest_wait_s: float = 0.0
    expected_tokens: int = 0
    samples: tuple[Sample, ...] = ()
