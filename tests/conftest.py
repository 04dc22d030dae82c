"""Selection, order and environment of the tests.

    make quick      some folders (QUICK in the Makefile), without Ray and without a model
    make test       everything except tests marked `full`; run it for every change
    make test-all   everything; CI runs it

Marks, on a test or as a file's `pytestmark`, select:

    full        only `make test-all` runs it
    campaign    a small run of a benchmark or a search; implies `full`
    grid        of a parametrized test, `make test` runs one instance; grid(keep=4): four, evenly spaced
    ray, model  starts Ray; needs the model file; `make quick` skips them

`pytest tests/some/test_x.py` runs everything in the file.

Property tests use the same examples every time, so a run is reproducible. `make fuzz` uses new ones; an example that
fails becomes an `@example`. Examples have no deadline, so a busy machine fails none. Of the slow tests' examples
(tests/examples.py) `make test` draws a third.

The tests run on three processes, a file at a time. The tests in tests/ray are one unit, which runs first: it takes
longest, and two Ray clusters would slow each other down. Those of all sources, tests/test_*.py, are another.
"""

import atexit
import gc
import os
import signal
import sys
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import examples

RAY, SOURCES = "tests/ray/", "tests/test_*.py"
FIRST = RAY, SOURCES  # the units that take longest

if os.environ.get("DIPTYCH_TEST_DEVICE", "cpu") == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before any test loads Triton
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # waiting OpenMP threads that spin would block the cores

gc.disable()  # imports create millions of objects and little garbage; pytest_collection_finish enables it again

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a background job of a script; children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

CALM: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("everyday", derandomize=True, **CALM)
settings.register_profile("fuzz", derandomize=False, print_blob=True, **CALM)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "everyday"))


def pytest_configure(config: pytest.Config) -> None:
    examples.is_fast = "not full" in config.option.markexpr


def unit(nodeid: str) -> str:
    """The unit that one process runs: a file, so that its shared fixtures are created once. Those that parse all our
    sources are one.
    """
    path = nodeid.partition("::")[0]
    return RAY if path.startswith(RAY) else SOURCES if path.count("/") == 1 else path


def grids(items: list[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """The instances of each parametrized test that is marked `grid`, in order."""
    found: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("grid") and hasattr(item, "callspec"):
            found.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return found


def left_out(instances: list[pytest.Item]) -> list[pytest.Item]:
    """The instances that `make test` skips: all but `keep`, evenly spaced."""
    marker = instances[0].get_closest_marker("grid")
    keep = marker.kwargs.get("keep", 1) if marker else len(instances)
    kept = {number * len(instances) // keep for number in range(keep)}
    return [item for number, item in enumerate(instances) if number not in kept]


@pytest.hookimpl(tryfirst=True)  # before pytest selects by -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("campaign"):
            item.add_marker(pytest.mark.full)
    for instances in grids(items).values():
        for item in left_out(instances):
            item.add_marker(pytest.mark.full)
    rank = {name: number for number, name in enumerate(FIRST)}
    items.sort(key=lambda item: rank.get(unit(item.nodeid), len(FIRST)))


def pytest_collection_finish() -> None:
    """Exclude modules and tests from garbage collection: they live until the end."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # after pytest's last collections; extensions warn about leftover objects


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Free a real model after its test: FastAPI's caches keep the handlers of closed servers, and these the workers."""
    models = sys.modules.get("fastapi.dependencies.models")
    caches = [] if models is None else [each for each in vars(models).values() if hasattr(each, "cache_clear")]
    if item.get_closest_marker("model") and any(each.cache_info().currsize for each in caches):
        for each in caches:
            each.cache_clear()
        gc.collect()  # takes seconds


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Restore signal handlers after each test: commands replace them for the rest of the process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    outcome = yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    return outcome


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Units(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit(nodeid)

    return Units(config, log)
