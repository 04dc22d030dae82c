"""The fields of request bodies: refuses those that are not supported or not known, and completes the JSON schema. Pure.

Values without an effect pass: null, false, empty, and defaults. Fields that cannot influence the answer pass with any
value: docs/http.md lists them.
"""

import difflib
import math
from collections.abc import Collection, Mapping
from typing import Any

from workers.errors import InvalidRequest
from workers.request import BOUNDS

MAX_NAME_CHARS = 64  # characters of a field's name in an error
OFF: tuple[object, ...] = (None, False, "", [], {})
IGNORED = frozenset(
    (
        *("user", "metadata", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
        *("service_tier", "prediction"),
    )
)
# Fields of OpenAI, vLLM and SGLang, each with the values that pass.
FIELDS: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("suffix", "prompt_logprobs", "truncate_prompt_tokens", "truncation_side", "prompt_embeds"), OFF),
    **dict.fromkeys(("regex", "ebnf", "json_schema", "structural_tag"), OFF),
    **dict.fromkeys(("guided_decoding_backend", "guided_whitespace_pattern"), OFF),
    **dict.fromkeys(("bad_words", "allowed_token_ids", "logprob_token_ids", "logits_processors"), OFF),
    **dict.fromkeys(("use_beam_search", "early_stopping", "watermarking", "repetition_detection"), OFF),
    **dict.fromkeys(
        ("chat_template", "chat_template_kwargs", "continue_final_message", "documents", "functions", "echo"), OFF
    ),
    **dict.fromkeys(("audio", "web_search_options", "mm_processor_kwargs", "media_io_kwargs"), OFF),
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids", "return_prompt_text"), OFF),
    **dict.fromkeys(("return_token_offsets", "return_hidden_states", "cache_salt", "vllm_xargs"), OFF),
    **dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "request_id", "session_id", "stream_interval"), OFF),
    "function_call": (*OFF, "none", "auto"),
    "add_generation_prompt": (None, True),
    "spaces_between_special_tokens": (None, True),
    "include_reasoning": (None, True),
    "reasoning_effort": (None, "none"),
    "thinking_token_budget": (None, -1),
    "verbosity": (None, "medium"),
    "modalities": (None, [], ["text"]),
    "length_penalty": (None, 1, 1.0),
    "priority": (None, 0),
}
INSTEAD = {
    "request_id": "use the header x-request-id",
    "session_id": "use the header x-diptych-session",
    "priority": "use the header x-diptych-slo-class: a class has a priority",
    **dict.fromkeys(("regex", "ebnf", "json_schema"), "use structured_outputs"),
}
MESSAGE_FIELDS = (*("function_call", "refusal", "annotations", "audio", "reasoning"),)
STREAM_FIELDS = ("include_obfuscation",)
HARMLESS = "Accepted with any value; does not influence the answer."
REFUSED = "Not supported: only these values pass."
NUMBERS = ("integer", "number")
# Fields that mean what `SamplingParams` calls otherwise.
SAMPLING_NAMES = {
    **{name: name for name in BOUNDS},
    **{"max_completion_tokens": "max_tokens", "max_output_tokens": "max_tokens", "top_logprobs": "logprobs"},
}
Schema = dict[str, Any]


def check_supported(body: Mapping[object, object], known: Collection[str]) -> None:
    """Raises `InvalidRequest` for the first field that is not supported. `known`: the supported ones."""
    for name, value in body.items():
        if name in known or name in IGNORED or value is None:
            continue
        if name not in FIELDS:
            raise _unknown(str(name), (*known, *FIELDS, *IGNORED))
        if not _is_one_of(value, FIELDS[str(name)]):
            raise InvalidRequest(str(name), f"is not supported; {INSTEAD.get(str(name), 'leave it out')}")


def check_off(where: str, given: Mapping[str, object], names: Collection[str]) -> None:
    """Like `check_supported`, for the further fields of an object of a body: `names` may request nothing."""
    for name, value in given.items():
        path = f"{where}.{name[:MAX_NAME_CHARS]}"
        if name not in names:
            raise _unknown(path)
        if not _is_one_of(value, OFF):
            raise InvalidRequest(path, "is not supported; leave it out")


def refuse_others(where: str, given: Mapping[str, object], known: Collection[str]) -> None:
    """Raises `InvalidRequest` for the first field of an object that is not supported."""
    for name, value in given.items():
        if name not in known and value is not None:
            raise InvalidRequest(f"{where}.{name[:MAX_NAME_CHARS]}", "is not supported; leave it out")


def _unknown(name: str, known: Collection[str] = ()) -> InvalidRequest:
    shown = name[:MAX_NAME_CHARS].encode(errors="replace").decode()
    near = difflib.get_close_matches(shown, known, 1)
    return InvalidRequest(shown, f"is unknown; {f'did you mean {near[0]!r}?' if near else 'leave it out'}")


def _is_one_of(value: object, passing: tuple[object, ...]) -> bool:
    """Compares types, too: 0 is not false."""
    return any(type(value) is type(each) and value == each for each in passing)


def complete(
    schema: Schema,
    known: Collection[str],
    *,
    harmless: str = HARMLESS,
    least: Mapping[str, float],
    limited: Mapping[str, Any],
) -> Schema:
    """A body's schema with all its fields.

    `known`: fields that are not refused; pydantic's schema has those that are read, and `harmless` is said of the
    others. `least`: lowest values that differ from those of `BOUNDS`. `limited`: the only values besides null of fields
    that are read.
    """
    properties = schema.setdefault("properties", {})
    for name, described in properties.items():
        described.pop("title", None)
        _add_bounds(name, described, least)
    for name, value in limited.items():
        properties[name] = {"enum": [None, value], "description": REFUSED}
    for name in sorted({*known, *IGNORED} - properties.keys()):
        properties[name] = {"description": harmless if name in known else HARMLESS}
    for name in sorted(FIELDS.keys() - properties.keys()):
        instead = f" {INSTEAD[name][0].upper()}{INSTEAD[name][1:]}." if name in INSTEAD else ""
        properties[name] = {"enum": list(FIELDS[name]), "description": REFUSED + instead}
    schema["additionalProperties"] = False
    return schema


def complete_object(schema: Schema, off: Collection[str]) -> Schema:
    """The schema of an object in a body; of the fields `off` only the values `OFF` pass."""
    for name in off:
        schema["properties"][name] = {"enum": list(OFF), "description": REFUSED}
    schema["additionalProperties"] = False
    return schema


def _add_bounds(name: str, described: Schema, least: Mapping[str, float]) -> None:
    bound = BOUNDS.get(SAMPLING_NAMES.get(name, ""))
    for each in described.get("anyOf", [described]):
        if bound is None or each.get("type") not in NUMBERS:
            continue
        each["exclusiveMinimum" if bound.is_open else "minimum"] = least.get(name, bound.least)
        if bound.most < math.inf:
            each["maximum"] = bound.most
