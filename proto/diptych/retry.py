"""Retries: which errors, after which wait, and how a broken stream continues without a lost or repeated token.

Prompt, sampling and seed determine an answer. So the client requests a broken stream again, compares its beginning with
what the caller has, and skips that. Knows no wire format and no clock.
"""

import random
from dataclasses import dataclass, replace

from diptych.errors import NO_HANDSHAKE, DiptychError
from diptych.events import TextDelta


@dataclass(frozen=True, slots=True)
class Retry:
    """The client retries for `patience_s` after the first of consecutive failures.

    Waits double from `wait_s` to `max_wait_s`, with jitter, so that clients do not all return at once. They are at
    least as long as the server's `retry_after_s`.
    """

    patience_s: float = 60.0
    wait_s: float = 0.1
    max_wait_s: float = 5.0

    def __post_init__(self) -> None:
        if not 0.0 < self.wait_s <= self.max_wait_s or not self.patience_s > 0.0:
            raise ValueError(f"{self} cannot be: patience_s is above 0, and 0 < wait_s <= max_wait_s")


class Tries:
    """The tries of one call. All times, including `deadline_s`, are those of its owner's clock."""

    def __init__(self, retry: Retry | None, deadline_s: float | None) -> None:
        self._retry = retry
        self._deadline_s = deadline_s
        self._failed = 0  # in a row
        self._failing_since_s: float | None = None

    def left_s(self, now_s: float) -> float | None:
        """The time limit of the next try. None: no limit."""
        return None if self._deadline_s is None else self._deadline_s - now_s

    def progressed(self) -> None:
        """The caller got something new: reset the count of failures."""
        self._failed, self._failing_since_s = 0, None

    def wait_s(self, failure: DiptychError, now_s: float) -> float:
        """The wait before the next try. Raises the failure if there is no next try."""
        retry, since_s = self._retry, now_s if self._failing_since_s is None else self._failing_since_s
        if retry is None or not is_temporary(failure):
            raise failure
        self._failed, self._failing_since_s = self._failed + 1, since_s
        jittered_s = min(retry.max_wait_s, retry.wait_s * 2.0 ** min(self._failed - 1, 30)) * random.uniform(0.5, 1.0)
        wait_s = max(jittered_s, failure.retry_after_s or 0.0)
        ends_s = since_s + retry.patience_s
        if now_s + wait_s > (ends_s if self._deadline_s is None else min(ends_s, self._deadline_s)):
            raise failure
        return wait_s


def is_temporary(failure: DiptychError) -> bool:
    """Whether the same call may work later. A message that is too large is RESOURCE_EXHAUSTED without a retry time."""
    if failure.code == "UNAVAILABLE":
        return failure.reason != NO_HANDSHAKE
    return failure.code == "RESOURCE_EXHAUSTED" and failure.retry_after_s is not None


class Received:
    """What the caller has of each answer of one request. Owned by the stream, which calls `begin` before each try."""

    def __init__(self) -> None:
        self._answers: dict[int, _Received] = {}

    def begin(self) -> None:
        for answer in self._answers.values():
            answer.seen_chars = 0

    def new(self, delta: TextDelta) -> TextDelta | None:
        """The part of the delta that the caller does not have yet; None if it has all of it.

        Raises `DiptychError` with the reason ANSWER_CHANGED if the answer differs from the previous try's.
        """
        return self._answers.setdefault(delta.index, _Received()).new(delta)


class _Received:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self.seen_chars = 0  # of this try

    def new(self, delta: TextDelta) -> TextDelta | None:
        known = self.tokens[delta.first_position : delta.first_position + len(delta.tokens)]
        part = self.text[self.seen_chars : self.seen_chars + len(delta.text)]
        self.seen_chars += len(delta.text)
        is_gap = delta.first_position > len(self.tokens)
        if is_gap or tuple(known) != delta.tokens[: len(known)] or not delta.text.startswith(part):
            message = f"the stream broke after {len(self.tokens)} tokens, and the retry's answer differs; ask again"
            raise DiptychError("DATA_LOSS", message, reason="ANSWER_CHANGED")
        self.tokens += delta.tokens[len(known) :]
        self.text += delta.text[len(part) :]
        if not known and not part:
            return delta
        fresh = replace(
            delta,
            text=delta.text[len(part) :],
            tokens=delta.tokens[len(known) :],
            first_position=delta.first_position + len(known),
            logprobs=delta.logprobs[len(known) :],
            prompt_logprobs=(),
        )
        return fresh if fresh.tokens or fresh.text else None
