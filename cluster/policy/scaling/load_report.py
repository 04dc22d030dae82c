"""What gateways report to the controller about their load. Frozen: it crosses processes."""

from msgspec import Struct


class Sample(Struct, frozen=True, gc=False):
    """One request that has ended. `computed_tokens` of its prompt were not cached. SLOs in seconds; None: no SLO."""

    prompt_tokens: int
    computed_tokens: int
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None


class LoadReport(Struct, frozen=True, gc=False):
    """What one gateway has seen of one model's requests since its last report, `seconds` ago.

    `arrived` requests came, with `arrived_tokens` of prompt; their answers are expected to have `expected_tokens`.
    """

    gateway: str
    seconds: float
    arrived: int
    arrived_tokens: int
    expected_tokens: int = 0
    samples: tuple[Sample, ...] = ()
    model: str = ""
