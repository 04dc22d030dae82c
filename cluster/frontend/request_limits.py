"""How long prompts and answers may be, how many answers a request may have, and which names it may give.

Bounded by the model's context and by what the pools can hold. Knows the latest view of the cluster.
"""

import secrets
from dataclasses import replace

from cluster.events import Unservable
from cluster.frontend.context import GatewayContext
from cluster.frontend.text import PromptBounds
from cluster.spec import Role
from workers.errors import InvalidRequest
from workers.request import SamplingParams

MAX_CLASS_CHARS = 64
MAX_STOP_CHARS = 1024  # the search for a partial stop string is quadratic in it


class RequestLimits:
    """Of one model. Owned by its gateway."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together: bounded by the model's context and by the pools' capacity."""
        capacity, context = self._context.dispatcher.capacity, self._context.model.context_length
        return min(context, capacity.prefill_tokens or context, capacity.decode_tokens or context)

    @property
    def bounds(self) -> PromptBounds:
        """The current bounds of prompts."""
        model, max_bytes = self._context.model, self._context.spec.gateway.max_prompt_bytes
        return PromptBounds(max_bytes, model.context_length, model.vocab_size, self.max_model_len)

    def check_answers(self, sampling: SamplingParams) -> None:
        """Refuse more answers than can ever run at once."""
        spec, count = self._context.spec, sampling.num_answers
        limit = min(spec.gateway.max_requests, self._context.dispatcher.capacity.decode_slots)
        if count > max(1, limit):
            field = "n" if sampling.best_of is None else "best_of"
            raise InvalidRequest(f"sampling.{field}", f"is {count}; this cluster runs at most {limit} answers at once")

    def resolve(self, sampling: SamplingParams, num_prompt: int) -> SamplingParams:
        """Fill in what the caller left out: the seed, and max_tokens as far as the context has room."""
        self.bounds.check_tokens("sampling.stop_token_ids", sampling.stop_token_ids)
        self.bounds.check_tokens("sampling.logit_bias", tuple(token for token, _ in sampling.logit_bias))
        if any(len(stop) > MAX_STOP_CHARS for stop in sampling.stop):
            raise InvalidRequest("sampling.stop", f"has a string of more than {MAX_STOP_CHARS} characters; shorten it")
        try:
            "".join(sampling.stop).encode()
        except UnicodeEncodeError:
            raise InvalidRequest("sampling.stop", "has half a surrogate pair; send whole characters") from None
        max_tokens = sampling.max_tokens
        limit, why = self.max_tokens(num_prompt, max_tokens or 1)
        room = limit - num_prompt
        if max_tokens is None:
            max_tokens = max(sampling.min_tokens, min(room, self._context.spec.gateway.default_max_tokens))
        if max_tokens > room:
            name = "min_tokens" if sampling.max_tokens is None else "max_tokens"
            raise _too_long(limit, why, num_prompt, max_tokens, f"sampling.{name}")
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        return replace(sampling, max_tokens=max_tokens, seed=seed)

    def max_tokens(self, num_prompt: int, num_output: int) -> tuple[int, str]:
        """Most tokens of this prompt and its answer, and the reason if the pools bound it rather than the context.

        Raises `Unservable` if the prompt leaves no room for one token.
        """
        limit, why = self._context.model.context_length, ""
        held = self._context.dispatcher.capacity
        for role, capacity, reserve in ((Role.PREFILL, held.prefill_tokens, 0), (Role.DECODE, held.decode_tokens, 1)):
            if capacity is None:
                continue
            bound = f" (as many as the {role.value} pools here can hold)" if capacity < limit else ""
            if num_prompt + reserve > capacity:
                raise _too_long(capacity, bound, num_prompt, num_output)
            if role is Role.DECODE and capacity < limit:
                limit, why = capacity, bound
        if num_prompt >= limit:
            raise _too_long(limit, why, num_prompt, num_output)
        return limit, why


def checked_name(field: str, name: str, max_chars: int, without: str = "") -> str:
    """The name, if it has visible ASCII characters only, none of `without`. Raises `InvalidRequest`."""
    if len(name) > max_chars or not all(" " < letter <= "~" and letter not in without for letter in name):
        rule = f"must be at most {max_chars} visible ASCII characters"
        rule += f" without {' and '.join(map(repr, without))}" if without else ""
        raise InvalidRequest(field, f"{name[:40]!r} cannot be used; it {rule}")
    return name


def _too_long(limit: int, why: str, num_prompt: int, num_output: int, field: str = "prompt") -> Unservable:
    """OpenAI's error message, which clients parse to shorten the prompt."""
    parts = f"{num_prompt} in the prompt, {num_output} in the completion"
    asked = f"you requested {num_prompt + num_output} tokens ({parts})"
    return Unservable(
        f"This model's maximum context length is {limit} tokens{why}. However, {asked}; shorten it", field
    )
