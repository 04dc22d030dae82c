"""Where Ray may put a worker's ranks: what they need, which nodes have it, and what to say when none has. Pure.

Knows labels as Ray does: a node has some, a pool asks for them by selectors (`Resources.labels`).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cluster.runtime.errors import RuntimeUnavailable
from cluster.spec import ClusterSpec, Resources
from workers.config import ParallelConfig

RESERVED = "ray.io/"  # labels that Ray itself gives nodes, such as ray.io/accelerator-type
_UNTOLD = ("ray.io/node-id", "ray.io/node-group")
_MOST_KINDS = 6


@dataclass(frozen=True, slots=True)
class Node:
    """What a node has when it is empty, and its labels."""

    resources: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)


def bundle(resources: Resources) -> dict[str, float]:
    """What one rank needs, as Ray counts it."""
    wanted = {"CPU": resources.cpu, "GPU": resources.gpu, **resources.custom}
    return {kind: amount for kind, amount in wanted.items() if amount} or {"CPU": 0.001}


def selectors(resources: Resources, parallel: ParallelConfig) -> list[dict[str, str]] | None:
    """The labels of the node that each rank goes to; None: any node will do."""
    return [dict(resources.labels)] * parallel.world_size if resources.labels else None


def has_labels(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Whether a node with these labels is one of those that are wanted."""
    return all((labels.get(key) in _values(each)) is not each.startswith("!") for key, each in wanted.items())


def _values(selector: str) -> list[str]:
    """Of `value`, `in(value, value)`, and of what they exclude behind `!`."""
    inner = selector.removeprefix("!")
    return [each.strip() for each in inner[3:-1].split(",")] if inner.startswith("in(") else [inner]


def own_resources(spec: ClusterSpec) -> dict[str, float]:
    """Custom resources of a Ray that we start ourselves: as much as the pools may ever ask for."""
    totals: dict[str, float] = {}
    for pool in spec.pools:
        for kind, amount in pool.resources.custom.items():
            totals[kind] = totals.get(kind, 0.0) + amount * pool.most_ranks
    return totals


def own_labels(spec: ClusterSpec) -> dict[str, str]:
    """Labels of its only node, such that every pool may lie there. Raises `RuntimeUnavailable` where none would do.

    Those that Ray reserves are found, and not given.
    """
    asked = [(pool.name, key, each) for pool in spec.pools for key, each in pool.resources.labels.items()]
    free = [(name, key, each) for name, key, each in asked if not key.startswith(RESERVED)]
    labels: dict[str, str] = {}
    for _, key, selector in free:
        if not selector.startswith("!"):
            labels.setdefault(key, _values(selector)[0])
    for name, key, selector in free:
        if not has_labels(labels, {key: selector}):
            raise RuntimeUnavailable(
                f"pool {name} wants nodes with {key}: {selector}, another pool {key}: {labels.get(key)}, and a Ray "
                "that is started here is one node; join one that has both kinds (RAY_ADDRESS)"
            )
    return labels


def needed(resources: Resources, parallel: ParallelConfig) -> str:
    """What a worker needs of nodes, in words."""
    count, strategy = parallel.world_size, parallel.placement
    needs = f"{{{listed(bundle(resources))}}}"
    if count > 1 and strategy == "strict_spread":
        needs += f" on each of {count} nodes"
    elif count > 1:
        needs += f" for each of {count} ranks{' on one node' * (strategy == 'strict_pack')}"
    return f"{needs}, labels {{{_told(resources.labels)}}}" if resources.labels else needs


def shortage(resources: Resources, parallel: ParallelConfig, nodes: Sequence[Node]) -> str:
    """What a worker needs, and whether these nodes would have it if they were empty."""
    count, strategy = parallel.world_size, parallel.placement
    needs = f"it needs {needed(resources, parallel)}"
    there = [node for node in nodes if has_labels(node.labels, resources.labels)]
    if resources.labels and not there:
        return f"{needs}; no node has these labels, there {_kinds(nodes)}"
    rooms = [_room(node, bundle(resources)) for node in there]
    with_these = " with these labels" if resources.labels else ""
    where = f"the only node{with_these}" if len(there) == 1 else f"the {len(there)} nodes{with_these}"
    if _fit(rooms, count, strategy):
        return f"{needs}, which others hold on {where}"
    held = ", ".join(map(str, sorted(rooms, reverse=True))) or "no"
    return f"{needs}; {where}, if empty, would hold {held} ranks"


def would_fit(resources: Resources, parallel: ParallelConfig, nodes: Sequence[Node]) -> bool:
    """Whether a worker would have room on these nodes if they were empty."""
    there = [node for node in nodes if has_labels(node.labels, resources.labels)]
    return _fit([_room(node, bundle(resources)) for node in there], parallel.world_size, parallel.placement)


def _fit(rooms: Sequence[int], count: int, strategy: str) -> bool:
    if strategy == "strict_spread":
        return sum(room > 0 for room in rooms) >= count
    if strategy == "strict_pack":
        return max(rooms, default=0) >= count
    return sum(rooms) >= count


def _room(node: Node, wanted: Mapping[str, float]) -> int:
    """Ranks that fit on it."""
    return min(int(node.resources.get(kind, 0) / amount + 1e-9) for kind, amount in wanted.items())


def _kinds(nodes: Sequence[Node]) -> str:
    """The labels that there are, by how many nodes have them."""
    if not nodes:
        return "are no nodes"
    counts = Counter(
        _told({key: value for key, value in node.labels.items() if key not in _UNTOLD}) for node in nodes
    ).most_common()
    told = [f"{number} with {f'{{{labels}}}' if labels else 'none'}" for labels, number in counts[:_MOST_KINDS]]
    more = [f"{len(counts) - _MOST_KINDS} kinds more"] if len(counts) > _MOST_KINDS else []
    return f"{'is' if len(nodes) == 1 else 'are'} {', '.join(told + more)}"


def _told(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in sorted(labels.items()))


def listed(resources: Mapping[str, float]) -> str:
    """Without what Ray adds: a resource for each node, and for each bundle of a placement group."""
    return ", ".join(
        f"{kind}: {amount:g}"
        for kind, amount in sorted(resources.items())
        if not kind.startswith(("node:", "bundle_group")) and "_group_" not in kind
    )
