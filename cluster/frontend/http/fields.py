"""The fields of request bodies as a JSON schema, from what the parsers check: for `/openapi.json`. Pure.

pydantic knows the types of the fields that are read. This adds their bounds, the fields that change nothing, and those
that are refused, with the values that pass.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

from cluster.frontend.http.unsupported import FIELDS, IGNORED, INSTEAD
from workers.request import BOUNDS

HARMLESS = "Accepted with any value; does not influence the answer."
REFUSED = "Not supported: only these values pass."
NUMBERS = ("integer", "number")
# Fields that mean what `SamplingParams` calls otherwise.
SAMPLING_NAMES = {
    **{name: name for name in BOUNDS},
    **{"max_completion_tokens": "max_tokens", "max_output_tokens": "max_tokens", "top_logprobs": "logprobs"},
}
Schema = dict[str, Any]


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


def complete_object(schema: Schema, off: Collection[str], passing: Collection[object]) -> Schema:
    """The schema of an object in a body; of the fields `off` only the values `passing` pass."""
    for name in off:
        schema["properties"][name] = {"enum": list(passing), "description": REFUSED}
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
