"""Decodes requests. Pure. `diptych.messages` encodes them, and has the events of an answer in both directions.

Bad input is `InvalidRequest` naming the message's field.
"""

from collections.abc import Mapping
from typing import Any

from cluster.frontend.text import ChatPrompt, TextPrompt, TokenPrompt, Unencoded
from diptych.codec import seconds
from diptych.options import SLO
from diptych.v1 import inference_pb2
from workers.errors import InvalidRequest
from workers.request import SamplingParams

LONGEST_CLASS = 64
NOTHING: Mapping[str, Any] = {}
# Fields of Sampling that are one value, in our types of the same name.
SCALARS = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("seed", "max_tokens", "min_tokens", "ignore_eos", "logprobs", "prompt_logprobs", "n", "best_of"),
    *("include_stop_in_output", "skip_special_tokens"),
)


def prompt_from(request: inference_pb2.GenerateRequest) -> Unencoded:
    match request.WhichOneof("prompt"):
        case "text":
            return TextPrompt(request.text, apply_chat_template=request.apply_chat_template)
        case "tokens":
            return TokenPrompt(tuple(request.tokens.ids))
        case "chat":
            messages = tuple((each.role, each.content) for each in request.chat.messages)
            return ChatPrompt(messages, tuple(request.chat.tools))
        case _:
            raise InvalidRequest("prompt", "is missing; give one of text, tokens or chat")


def sampling_from(message: inference_pb2.Sampling, defaults: Mapping[str, Any] = NOTHING) -> SamplingParams:
    """`defaults` stand for what is not said."""
    given = {name: getattr(message, name) for name in SCALARS if message.HasField(name)}
    return SamplingParams(
        **{**defaults, **given},
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias=tuple(sorted(message.logit_bias.items())),
    )


def slo_from(message: inference_pb2.Slo) -> SLO:
    def promise(name: str) -> float | None:
        if not message.HasField(name):
            return None
        wanted_s = seconds(getattr(message, name))
        if not wanted_s > 0.0:
            rule = "it must be above 0, or absent where nothing is wanted"
            raise InvalidRequest(f"slo.{name}", f"is {wanted_s:g} s; {rule}")
        return wanted_s

    name = checked_class(message.class_name or "default", "slo.class_name")
    return SLO(promise("time_to_first_token"), promise("time_per_output_token"), name)


def checked_class(name: str, field: str) -> str:
    """Raises `InvalidRequest` for what cannot name a class."""
    if len(name) > LONGEST_CLASS or not all(" " < letter <= "~" for letter in name):
        rule = f"must be at most {LONGEST_CLASS} visible ASCII characters"
        raise InvalidRequest(field, f"{name[:40]!r} cannot be used; it {rule}")
    return name
