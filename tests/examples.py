"""How many examples a slow property test draws: all of them in `make test-all`, a third in `make test`."""

from typing import Any

from hypothesis import settings

is_fast = False  # conftest.py sets it before it imports the tests


def examples(most: int, **more: Any) -> settings:
    """Settings with `most` examples, or a third of them."""
    return settings(max_examples=most // 3 if is_fast else most, deadline=None, **more)
