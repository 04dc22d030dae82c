"""Who may talk to a Ray that we start: settled before Ray is imported, because Ray reads it only then.

Left alone, a local Ray writes a token into the user's home and changes what every later Ray there expects.
"""

import os
import secrets


def settle_auth() -> None:
    """Give a Ray of our own a token of its own. A cluster that is there, or a mode that is set, is respected."""
    if "RAY_ADDRESS" not in os.environ and "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
