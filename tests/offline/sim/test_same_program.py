"""The simulator is the production program: other executors and transports, no other branch."""

import ast
import gc
from pathlib import Path

from cluster.offline.sim import clock
from cluster.offline.sim.cluster import SimCluster, open_cluster
from tests.offline.sim.cases import models, split

ROOT = Path(__file__).resolve().parents[3]
ABOVE = (
    "sim",
    "plan",
    "report",
    "bench",
    "cli",
    "profile",
)  # packages that may know the simulator
WORDS = ("simulat", "virtual")
# Where an executor or a transport is chosen by its name, and where names are checked.
CHOOSERS = {
    "cluster/spec.py",
    "kvtransfer/open.py",
    "workers/build.py",
    "workers/config.py",
    "workers/executor/simulated.py",
}
# The name of that executor and of that transport, and the executor's default sizes.
CHOICES = ("'simulated'", "simulatedmodel(")


def production() -> list[Path]:
    found = []
    for package in ("cluster", "workers", "kvtransfer"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).parts
            room = parts[2] if parts[1] == "offline" else parts[1]
            if not (parts[0] == "cluster" and room.removesuffix(".py") in ABOVE):
                found.append(path)
    return found


def conditions(tree: ast.AST) -> list[str]:
    """The source of every condition."""
    found: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
            found.append(node.test)
        elif isinstance(node, ast.Match):
            found += [node.subject, *node.cases]
        elif isinstance(node, ast.Compare | ast.BoolOp):
            found.append(node)
        elif isinstance(node, ast.comprehension):
            found += node.ifs
    return [ast.unparse(node).lower() for node in found]


def test_no_production_module_branches_on_being_simulated() -> None:
    for path in production():
        text, name = path.read_text(), str(path.relative_to(ROOT))
        if not any(word in text.lower() for word in (*WORDS, "cluster.offline.sim")):
            continue
        tree = ast.parse(text)
        for condition in conditions(tree):
            asked = condition
            for choice in CHOICES if name in CHOOSERS else ():
                asked = asked.replace(choice, "")
            assert not any(word in asked for word in WORDS), f"{name} asks {condition!r}"
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert "cluster.offline.sim" not in ast.unparse(node), f"{name} imports the simulator"


LEAVES = {
    "cluster.offline.sim.clock.VirtualLoop",
    "cluster.offline.sim.clock._Handle",
    "cluster.offline.sim.network.Network",
    "cluster.offline.sim.network.VirtualListener",
    "cluster.offline.sim.network.Pipe",
    "cluster.offline.sim.cluster.SimRuntime",
    "cluster.offline.sim.cluster.SimCluster",
    "cluster.offline.sim.case.PoolModel",
    "cluster.offline.sim.cluster.Environment",
    "cluster.offline.sim.cluster.Meter",
    "cluster.offline.sim.cluster._NoServer",
}
PRODUCTION = {
    "cluster.control.controller.Controller",
    "cluster.dispatch.dispatcher.Dispatcher",
    "cluster.dispatch.worker_client.WorkerClient",
    "cluster.policy.policy.Policy",
    "cluster.control.replicas.ReplicaManager",
    "cluster.serving.GatewayService",
    "kvtransfer.control.ControlClient",
    "kvtransfer.control.ControlServer",
    "kvtransfer.links.TransportSet",
    "workers.engine.blocks.BlockPool",
    "workers.engine.engine.Engine",
    "workers.engine.leases.LeaseManager",
    "workers.engine.engine_loop.EngineLoop",
    "workers.engine.scheduler.Scheduler",
    "workers.executor.simulated.SimulatedExecutor",
    "workers.mailbox.Mailbox",
    "workers.worker.Worker",
}


def test_a_simulated_cluster_is_made_of_production_objects() -> None:
    async def classes() -> set[str]:
        spec = split(2, 2)
        async with open_cluster(spec, models(spec)) as cluster:
            return reachable(cluster)

    found = clock.run(classes())
    assert found >= PRODUCTION
    assert {name for name in found if name.startswith("cluster.offline.sim")} <= LEAVES


def reachable(root: SimCluster) -> set[str]:
    """The names of our classes among all objects that can be reached from the cluster and its loop's tasks."""
    seen: set[int] = set()
    found: set[str] = set()
    import asyncio

    ahead: list[object] = [root, asyncio.get_running_loop(), *asyncio.all_tasks()]
    while ahead:
        each = ahead.pop()
        if id(each) in seen or isinstance(each, type) or type(each).__name__ == "module":
            continue
        seen.add(id(each))
        kind = type(each)
        if kind.__module__.split(".")[0] in ("cluster", "workers", "kvtransfer"):
            found.add(f"{kind.__module__}.{kind.__qualname__}")
        ahead += [near for near in gc.get_referents(each) if not _is_globals(near)]
    return found


def _is_globals(near: object) -> bool:
    return isinstance(near, dict) and "__builtins__" in near
