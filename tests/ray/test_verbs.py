"""A handle to a worker on Ray has every method of a worker."""

import pickle

import pytest

from cluster.runtime.interface import WorkerHandle
from cluster.runtime.ray import RayWorker

VERBS = [name for name, verb in vars(WorkerHandle).items() if callable(verb) and not name.startswith("_")]


@pytest.mark.parametrize("verb", VERBS)
def test_a_ray_worker_has_every_method(verb: str) -> None:
    assert callable(getattr(RayWorker("worker", None, 1.0), verb))


def test_a_ray_worker_has_no_other_method_and_is_picklable() -> None:
    worker = RayWorker("worker", None, 1.0)
    with pytest.raises(AttributeError, match="no method 'shout'"):
        worker.shout  # noqa: B018
    assert pickle.loads(pickle.dumps(worker)) == worker
