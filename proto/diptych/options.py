"""The options of a request. The server has defaults. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

Prompt = str | Sequence[int]


Messages = Sequence[tuple[str, str] | Mapping[str, str]]  # (role, content), or {"role": ..., "content": ...}


@dataclass(frozen=True, slots=True)
class SLO:
    """The SLO of a request. Requests set the times and the class; the gateway sets the rest."""

    ttft_s: float | None = None
    """Time to first token. Default: no TTFT SLO."""
    tpot_s: float | None = None
    """Mean time per output token after the first. Default: no TPOT SLO."""
    class_name: str = "default"
    """The SLO class."""
    priority: int = 0
    """Lower is served first. Set by the gateway from the class."""
    is_enforced: bool = False
    """Workers grant no decode slot that would miss this SLO. Set by the gateway, with `admission: slo`."""


class SamplingOptions(TypedDict, total=False):
    """Sampling options of a call. The server has defaults; see `SamplingParams`.

    Of `json_schema`, `regex`, `choice` and `lark` (or GBNF) only one: the answer matches it.
    """

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
    json_schema: str | Mapping[str, Any]
    regex: str
    choice: Sequence[str]
    lark: str


class BatchOptions(SamplingOptions, total=False):
    """Options of a batch; see `AsyncClient.batch`."""

    model: str
    slo: SLO | None
    tenant: str
    timeout_s: float | None


class RequestOptions(BatchOptions, total=False):
    """Options of a request; see `AsyncClient.generate`."""

    request_id: str
    session: str
