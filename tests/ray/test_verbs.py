"""A handle to a worker on Ray crosses processes; its stub has every method of a worker, with the worker's types."""

import inspect
import pickle
from typing import Any, cast, get_type_hints

import msgspec
import pytest

from cluster.runtime.interface import WorkerStub
from cluster.runtime.ray import RayWorker
from workers.rpc import CALLS, METHODS
from workers.worker import Worker

VERBS = [name for name, verb in vars(WorkerStub).items() if callable(verb) and not name.startswith("_")]


@pytest.mark.parametrize("verb", VERBS)
def test_a_stub_has_every_verb(verb: str) -> None:
    assert callable(getattr(RayWorker("worker", None, 1.0).at("one"), verb))


def test_a_stub_has_no_other_verb_and_its_handle_crosses_processes() -> None:
    worker = RayWorker("worker", None, 1.0)
    with pytest.raises(AttributeError, match="no method 'shout'"):
        cast(Any, worker.at("one")).shout  # noqa: B018
    assert pickle.loads(pickle.dumps(worker)) == worker


@pytest.mark.parametrize("name", METHODS)
def test_a_method_on_the_wire_has_the_types_and_defaults_of_the_worker(name: str) -> None:
    method, (fields, result) = getattr(Worker, name), METHODS[name]
    hints = get_type_hints(method)
    _, *parameters = inspect.signature(method).parameters.values()
    if name == "subscribe":  # the server gives the callbacks
        parameters = [each for each in parameters if each.name not in ("on_outputs", "room", "deferred")]
        del hints["on_outputs"], hints["room"], hints["deferred"]
    assert {**fields, "return": result or type(None)} == hints
    assert list(fields) == [each.name for each in parameters]
    defaults = [each.default for each in msgspec.structs.fields(CALLS[name])]
    assert [msgspec.NODEFAULT if each.default is each.empty else each.default for each in parameters] == defaults
