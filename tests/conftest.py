"""Property tests draw the same examples every time, so that a run proves a commit and not its luck.

`make fuzz` draws new ones: what it finds becomes an `@example`. No clock decides: a busy machine fails no example.

`make test` runs on two processes, a file at a time. The longest come first; what starts Ray is one unit, because it
waits for processes most of the time, while the other process computes. Campaigns, small as they are here, are
`make campaigns`.
"""

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

RAY, LONGEST = "tests/ray/", "tests/ray/test_exactness.py"

if os.environ.get("DIPTYCH_TEST_DEVICE", "cpu") == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when it is loaded, by whichever test comes first
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # teams that spin while they wait take the cores from the others

CALM: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("everyday", derandomize=True, **CALM)
settings.register_profile("fuzz", derandomize=False, print_blob=True, **CALM)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "everyday"))


def unit(nodeid: str) -> str:
    """What one process runs as a whole: a file, so that what its tests share is made once."""
    path = nodeid.partition("::")[0]
    return RAY if path.startswith(RAY) and path != LONGEST else path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "DIPTYCH_CAMPAIGNS" not in os.environ:
        for item in items:
            if item.get_closest_marker("campaign"):
                item.add_marker(pytest.mark.skip(reason="a small campaign: make campaigns"))
    first = (RAY, LONGEST)
    items.sort(key=lambda item: first.index(unit(item.nodeid)) if unit(item.nodeid) in first else len(first))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Units(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit(nodeid)

    return Units(config, log)
