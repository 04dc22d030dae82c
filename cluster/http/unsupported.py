"""What others understand and would answer otherwise for: refused by name here, not dropped. Pure.

What asks for nothing passes: null, false, empty, and what is so anyway.
"""

from collections.abc import Mapping

from workers.errors import InvalidRequest

OFF: tuple[object, ...] = (None, False, "", [], {})
# The values that pass, by field.
FIELDS: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("suffix", "prompt_logprobs", "truncate_prompt_tokens", "prompt_embeds"), OFF),
    **dict.fromkeys(("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"), OFF),
    **dict.fromkeys(("bad_words", "allowed_token_ids", "logits_processors", "use_beam_search"), OFF),
    **dict.fromkeys(("chat_template", "chat_template_kwargs", "continue_final_message", "functions"), OFF),
    "function_call": (*OFF, "none", "auto"),
    "add_generation_prompt": (None, True),
}
MESSAGE_FIELDS = ("tool_calls", "tool_call_id", "function_call")


def check_supported(body: Mapping[object, object]) -> None:
    """Raises `InvalidRequest` naming the first field that asks for what is not done here."""
    for name, passing in FIELDS.items():
        if name in body and not _is_one_of(body[name], passing):
            raise InvalidRequest(name, "is not supported; leave it out")


def check_message(index: int, message: Mapping[str, object]) -> None:
    """As `check_supported`, for one message of a chat."""
    for name in MESSAGE_FIELDS:
        if not _is_one_of(message.get(name), OFF):
            why = "is not supported; a tool's call and its result can be told as content"
            raise InvalidRequest(f"messages[{index}].{name}", why)


def _is_one_of(value: object, passing: tuple[object, ...]) -> bool:
    """By type, too: 0 is not false here."""
    return any(type(value) is type(each) and value == each for each in passing)
