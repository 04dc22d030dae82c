"""What a caller may say about a request. Pure; what is left out is the server's choice."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

Prompt = str | Sequence[int]


Messages = Sequence[tuple[str, str] | Mapping[str, str]]  # (role, content), or {"role": ..., "content": ...}


@dataclass(frozen=True, slots=True)
class SLO:
    """The promise wanted. A request has times and the name of its class; the gateway fills in the rest."""

    ttft_s: float | None = None
    """Time to first token. Left out: none is promised."""
    tpot_s: float | None = None
    """Mean time per token after the first. Left out: none is promised."""
    class_name: str = "default"
    """The class that the promise belongs to; requests name theirs."""
    priority: int = 0
    """Lower comes first. The gateway fills it in from the class."""
    promised: bool = False
    """Whether an admission has said so; then workers give no slot away that would break it. The gateway fills it in."""


class SamplingOptions(TypedDict, total=False):
    """What a caller may say about sampling; what is left out is the server's choice. See `SamplingParams`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int
    max_tokens: int
    min_tokens: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int
    prompt_logprobs: int
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    n: int
    best_of: int
    include_stop_in_output: bool
    skip_special_tokens: bool


class BatchOptions(SamplingOptions, total=False):
    """What a caller may say about a batch; see `AsyncClient.batch`."""

    model: str
    slo: SLO | None
    tenant: str
    timeout_s: float | None


class RequestOptions(BatchOptions, total=False):
    """What a caller may say about a request; see `AsyncClient.generate`."""

    request_id: str
    session: str
