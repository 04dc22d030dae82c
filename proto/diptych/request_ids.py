"""Ids of requests: which can be used, and one for a request whose client gave none."""

import secrets

LONGEST_ID = 128


def is_usable(letter: str) -> bool:
    """Whether an id may have it."""
    return " " < letter <= "~" and letter not in "/#"


def made_id() -> str:
    """One that nobody has."""
    return f"req-{secrets.token_hex(8)}"
