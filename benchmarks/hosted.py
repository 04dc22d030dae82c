"""Clusters to be measured, in a process of their own, so that the load generator's time is not counted as theirs."""

import pickle
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.offline.load.processes import Child
from cluster.spec import ClusterSpec, GatewaySpec, HealthSpec, PoolSpec, Resources, Role
from workers.config import EngineConfig

MODEL = "smollm2-135m"
START_TIMEOUT_S = 300.0
ENGINE = EngineConfig(kv_blocks=384, max_batch_tokens=256, threads=1)
SHARE = Resources(cpu=0.5)  # for Ray's accounting: two clusters fit on two cores
# A slow worker on a busy machine must not count as dead.
PATIENT = HealthSpec(heartbeat_s=0.25, dead_after_s=20.0)


@dataclass(frozen=True, slots=True)
class Hosted:
    """Running clusters: their endpoints by name, and their parent process."""

    child: Child
    endpoints: dict[str, str]


def split_spec(name: str = "split", executor: str = "torch") -> ClusterSpec:
    """One prefill and one decode worker with one thread each."""
    pools = (
        PoolSpec("prefill", Role.PREFILL, engine=ENGINE, resources=SHARE),
        PoolSpec("decode", Role.DECODE, engine=replace(ENGINE, kv_blocks=768), resources=SHARE),
    )
    return ClusterSpec(MODEL, pools, name, gateway=GatewaySpec(grpc_port=0), health=PATIENT, executor=executor)


def mixed_spec(name: str = "colocated") -> ClusterSpec:
    """One mixed worker with one thread."""
    pool = PoolSpec("mixed", Role.MIXED, engine=replace(ENGINE, kv_blocks=768), resources=SHARE)
    return ClusterSpec(MODEL, (pool,), name, gateway=GatewaySpec(grpc_port=0), health=PATIENT)


def refuse_foreign_ray(environment: dict[str, str]) -> None:
    """Raises ValueError if RAY_ADDRESS is set: processes and memory of a shared Ray cannot be attributed."""
    if "RAY_ADDRESS" in environment:
        raise ValueError("RAY_ADDRESS is set; the benchmark starts a Ray of its own: unset it")


@contextmanager
def hosted(specs: Sequence[ClusterSpec], runtime: str = "ray") -> Iterator[Hosted]:
    """Start the clusters; stop them on exit. Raises `ProcessFailed` when they do not start."""
    with tempfile.TemporaryDirectory(prefix="diptych-bench-") as folder:
        options = Path(folder) / "options.pickle"
        options.write_bytes(pickle.dumps((runtime, list(specs))))
        with Child([sys.executable, "-m", "benchmarks.cluster_host", str(options)]) as child:
            endpoints = {}
            for spec in specs:
                line = child.wait_line(f"open {spec.name} ", START_TIMEOUT_S)
                endpoints[spec.name] = line.text.rpartition(" ")[2]
            child.wait_line("all open", START_TIMEOUT_S)
            yield Hosted(child, endpoints)


def model_folder() -> Path:
    """The model in hub layout; fetches and converts it on first use. Raises `ModelError`."""
    from workers.model.store import resolve

    return resolve(MODEL).path
