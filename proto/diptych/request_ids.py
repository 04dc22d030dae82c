"""Request ids: their valid characters, and new ids."""

import secrets

MAX_ID_CHARS = 128
PROFILE_PREFIX = "diptych-profile-"  # of the ids of requests that `diptych profile` sends; plans do not count them


def is_usable(letter: str) -> bool:
    """Whether an id may contain this character."""
    return " " < letter <= "~" and letter not in "/#"


def new_id() -> str:
    """A new, unique id."""
    return f"req-{secrets.token_hex(8)}"
