"""Imports only point down (the picture is in docs/design.md), and names are unique. The tests walk the syntax trees."""

import ast
import os
import subprocess
import sys
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("proto/diptych", "kvtransfer", "workers", "cluster", "benchmarks")

# Lowest first: a module may import from its own layer and from the layers below.
LAYERS = [
    ["diptych.errors", "diptych.clock", "diptych.watchdog", "diptych.background_tasks", "diptych.v1"],
    ["diptych.events", "diptych.request_ids"],
    ["diptych.view", "diptych.history", "diptych.slo", "diptych.options", "diptych.shapes"],
    ["diptych.codec", "diptych.wire", "diptych.access"],
    ["diptych.channel", "diptych.failures", "diptych.messages", "diptych.retry"],
    ["diptych.status"],
    ["diptych.aio", "diptych.blocking"],
    ["diptych.client"],
    ["kvtransfer.layout", "kvtransfer.errors"],
    ["kvtransfer.ticket", "kvtransfer.rpc"],
    ["kvtransfer.transport", "kvtransfer.host"],
    ["kvtransfer.copies", "kvtransfer.backends", "kvtransfer.digest"],
    ["kvtransfer.probe", "kvtransfer.piece_reader", "kvtransfer.links", "kvtransfer.control", "kvtransfer.pull"],
    ["kvtransfer.open", "kvtransfer.doctor"],
    ["workers.costs"],
    [
        "workers.config",
        "workers.errors",
        "workers.kv_events",
        "workers.log_fields",
        "workers.request",
        "workers.stats",
    ],
    ["workers.kv_store", "workers.ops", "workers.rpc"],
    ["workers.engine", "workers.model", "workers.profiles"],
    ["workers.mailbox", "workers.subscribers", "workers.transfer"],
    ["workers.executor", "workers.worker"],
    ["workers.rpc_server", "workers.server"],
    ["workers.build"],
    ["cluster.spec"],
    ["cluster.spec_file"],
    ["cluster.events", "cluster.precheck", "cluster.runtime"],
    ["cluster.policy"],
    ["cluster.control"],
    ["cluster.observe"],
    ["cluster.dispatch"],
    ["cluster.frontend"],
    ["cluster.serving"],
    ["cluster.join"],
    ["cluster.offline"],
    ["cluster.cli"],
    ["benchmarks"],
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
# What only some rooms may load, however deep inside a function.
HEAVY = {
    "torch": (
        *("workers.ops", "workers.model", "workers.executor", "kvtransfer.backends"),
        *("cluster.cli.doctor", "benchmarks.adapters", "benchmarks.engine.drivers", "benchmarks.gpu"),
    ),
    "ray": (
        *("cluster.runtime.ray", "cluster.runtime.ray_ranks"),
        "cluster.runtime.ray_nodes",
        "cluster.runtime.ray_start",
        "cluster.cli",
    ),
    "grpc": ("cluster.frontend.grpc", "benchmarks.bare_servers", "diptych.channel", "diptych.failures", "diptych.aio"),
    "fastapi": ("cluster.frontend.http", "benchmarks.bare_servers"),
    "starlette": ("cluster.frontend.http", "benchmarks.bare_servers"),
    "uvicorn": ("cluster.frontend.http", "benchmarks.bare_servers"),
    "pydantic": ("cluster.frontend.http", "benchmarks.clients.cases"),
    "opentelemetry": ("cluster.observe.otlp",),
    "nixl_cu12": ("kvtransfer.backends",),
}
CLIENT = {"diptych", "grpc", "grpc_health", "grpc_status", "google", "msgspec"}  # all that `diptych` may import
# All that `cluster` may import from `workers`; packages with what lies in them.
WAIST = (
    "workers.config",
    "workers.costs",
    "workers.errors",
    "workers.kv_events",
    "workers.kv_store.verify",
    "workers.log_fields",
    "workers.model.store",
    "workers.model.tokenizer",
    "workers.profiles",
    "workers.request",
    "workers.stats",
)
# Those who put workers together see the parts, too.
COMPOSERS = ("cluster.runtime", "cluster.offline.sim")
PARTS = (
    "workers.build",
    "workers.engine.step",
    "workers.executor.simulated",
    "workers.executor.rank_spec",
    "workers.rpc",
    "workers.rpc_server",
    "workers.server",
    "workers.worker",
)
# All that read the wall clock, which may jump: for times that people read, ids of files, and an API of Ray.
READS_WALL_CLOCK = (
    *("cluster.cli.local_servers", "cluster.cli.trace", "cluster.frontend.grpc.services", "cluster.frontend.http"),
    *("cluster.observe.otlp", "cluster.offline", "cluster.runtime.ray_nodes"),
    *("workers.kv_store.abandoned", "workers.model.chat_template", "benchmarks"),
)
WALL_CLOCK = {"time.time", "time.time_ns", "datetime.now"}
VALUES = (
    *("diptych.errors", "diptych.clock", "diptych.watchdog", "diptych.background_tasks"),
    *("diptych.events", "diptych.view", "diptych.options", "diptych.shapes"),
)
PURE = ("workers.engine", "workers.kv_store.slot_index", "cluster.policy", "cluster.control.autoscaler.pods")
IMPURE = {"time", "random", "secrets", "socket", "threading", "torch", "numpy"}
# Arithmetic on columns, a row for each of a thousand workers, which plain Python has no time for. No randomness.
COLUMNS = tuple(f"cluster.policy.routing.slo.{name}" for name in ("shortlist", "worker_table", "cost_tables"))


@cache
def modules() -> list[tuple[str, ast.Module]]:
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = list(path.relative_to((ROOT / package).parent).with_suffix("").parts)
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            if not name.startswith("diptych.v1"):  # generated
                found.append((name, ast.parse(path.read_text())))
    return found


@cache
def imports(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def room(name: str) -> str | None:
    """The layer entry that a dotted name falls under."""
    parts = name.split(".")
    return next((key for n in range(len(parts), 0, -1) if (key := ".".join(parts[:n])) in RANK), None)


def nearest(name: str, names: set[str]) -> str | None:
    """The module that a dotted name is, or lies in."""
    parts = name.split(".")
    return next((key for n in range(len(parts), 0, -1) if (key := ".".join(parts[:n])) in names), None)


def below(name: str, rooms: tuple[str, ...]) -> bool:
    return any(name == each or name.startswith(each + ".") for each in rooms)


def draws(tree: ast.Module) -> bool:
    """Whether it touches numpy.random, by whatever way of naming it."""
    named = any(isinstance(node, ast.Attribute) and node.attr == "random" for node in ast.walk(tree))
    return named or any(below(each, ("numpy.random",)) for each in imports(tree))


def test_imports_point_down() -> None:
    for name, tree in modules():
        if "." not in name and name not in RANK:
            assert not [each for each in imports(tree) if room(each)], f"the package {name} imports its own modules"
            continue
        here = room(name)
        assert here is not None, f"{name} has no place in LAYERS"
        for imported in imports(tree):
            there = room(imported)
            assert there is None or RANK[there] <= RANK[here], f"{name} imports {imported}, which lies above it"


def test_no_modules_import_each_other_in_a_circle() -> None:
    names = {name for name, _ in modules()}
    found = {
        name: {owner for each in imports(tree) if (owner := nearest(each, names)) and owner != name}
        for name, tree in modules()
    }
    TopologicalSorter(found).prepare()  # raises CycleError, which names them


def test_heavy_libraries_stay_in_their_rooms() -> None:
    for name, tree in modules():
        for imported in imports(tree):
            top = imported.split(".")[0]
            assert top not in HEAVY or below(name, HEAVY[top]), f"{name} imports {top}"
            if below(name, PURE):
                is_columns = name in COLUMNS and top == "numpy" and not draws(tree)
                assert top not in IMPURE or is_columns, f"{name} is pure but imports {imported}"


def test_cluster_imports_only_the_ticket_and_the_errors_of_kvtransfer() -> None:
    for name, tree in modules():
        if not name.startswith("cluster.") or below(name, ("cluster.cli",)):
            continue
        allowed = ("kvtransfer.ticket", "kvtransfer.errors")
        for imported in imports(tree):
            assert not imported.startswith("kvtransfer.") or below(imported, allowed), f"{name} imports {imported}"


def test_cluster_sees_of_workers_a_short_list() -> None:
    for name, tree in modules():
        if not name.startswith("cluster."):
            continue
        allowed = (*WAIST, *PARTS) if below(name, COMPOSERS) else WAIST
        for imported in imports(tree):
            assert not imported.startswith("workers.") or below(imported, allowed), f"{name} imports {imported}"


def test_only_what_people_read_is_by_the_wall_clock() -> None:
    """So deadlines, leases and heartbeats do not change when it jumps."""
    for name, tree in modules():
        read = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)} & WALL_CLOCK
        read |= {each for each in imports(tree) if each in WALL_CLOCK}
        assert not read or below(name, READS_WALL_CLOCK), f"{name} reads {read}; use diptych.clock or time.monotonic"


def test_only_the_request_runner_sees_request_states() -> None:
    for name, tree in modules():
        sees = any(below(each, ("cluster.dispatch.request_state",)) for each in imports(tree))
        assert not sees or name == "cluster.dispatch.request_runner", f"{name} imports the state of running requests"


def test_the_client_imports_no_serving_code() -> None:
    for name, tree in modules():
        tops = {imported.split(".")[0] for imported in imports(tree)}
        if name.startswith("diptych"):
            assert tops <= CLIENT | sys.stdlib_module_names, f"{name} imports {tops - CLIENT - sys.stdlib_module_names}"
        elif not name.startswith(("cluster", "benchmarks")):
            values = [each for each in imports(tree) if below(each, ("diptych",)) and not below(each, VALUES)]
            assert not values, f"{name} imports {values}; it may import values alone"


def test_no_two_public_classes_have_the_same_name() -> None:
    owners: dict[str, list[str]] = {}
    for name, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                owners.setdefault(node.name, []).append(name)
    assert not {name: found for name, found in owners.items() if len(found) > 1}


def test_no_four_modules_have_the_same_file_name() -> None:
    counts = Counter(path.name for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    del counts["__init__.py"], counts["__main__.py"]
    assert not {name: count for name, count in counts.items() if count > 3}


def test_proto_is_not_a_package() -> None:
    assert not (ROOT / "proto" / "__init__.py").exists(), "a package called proto would shadow proto-plus"


def test_importing_cluster_loads_nothing_heavy() -> None:
    probe = (
        "import sys, cluster, cluster.spec, diptych.view, cluster.policy.routing.router;"
        "print([name for name in ('torch', 'ray', 'grpc', 'numpy', 'transformers') if name in sys.modules])"
    )
    paths = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'proto'}"}
    out = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, env=paths, check=True)
    assert out.stdout.strip() == "[]"
