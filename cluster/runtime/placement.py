"""Placement of a worker's ranks on Ray nodes: resources, label selectors, and the error if there is no room. Pure.

Labels are Ray's: nodes have labels, and pools select nodes by them (`Resources.labels`).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cluster.runtime.runtime_errors import RuntimeUnavailable
from cluster.spec import ClusterSpec, Resources
from workers.config import ParallelConfig

RESERVED = "ray.io/"  # labels that Ray sets itself, such as ray.io/accelerator-type
_HIDDEN = ("ray.io/node-id", "ray.io/node-group")
_MAX_KINDS = 6


@dataclass(frozen=True, slots=True)
class Node:
    """A node's total resources, and its labels."""

    resources: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)


def bundle(resources: Resources) -> dict[str, float]:
    """Resources of one rank, as Ray counts them."""
    wanted = {"CPU": resources.cpu, "GPU": resources.gpu, **resources.custom}
    return {kind: amount for kind, amount in wanted.items() if amount} or {"CPU": 0.001}


def selectors(resources: Resources, parallel: ParallelConfig) -> list[dict[str, str]] | None:
    """Label selectors of each rank; None: any node."""
    return [dict(resources.labels)] * parallel.world_size if resources.labels else None


def has_labels(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Whether a node's labels match the selectors `wanted`."""
    return all((labels.get(key) in _values(each)) is not each.startswith("!") for key, each in wanted.items())


def _values(selector: str) -> list[str]:
    """The values of `value`, `in(value, value)`, `!value` or `!in(value, value)`."""
    inner = selector.removeprefix("!")
    return [each.strip() for each in inner[3:-1].split(",")] if inner.startswith("in(") else [inner]


def own_resources(spec: ClusterSpec) -> dict[str, float]:
    """Custom resources of a Ray that we start: the pools' maximum."""
    totals: dict[str, float] = {}
    for pool in spec.pools:
        for kind, amount in pool.resources.custom.items():
            totals[kind] = totals.get(kind, 0.0) + amount * pool.max_ranks
    return totals


def own_labels(spec: ClusterSpec) -> dict[str, str]:
    """Labels for the one node of a Ray that we start, to match every pool. Raises `RuntimeUnavailable` if none can.

    Leaves out labels that Ray sets itself.
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
    """A worker's needs, as text."""
    count, strategy = parallel.world_size, parallel.placement
    needs = f"{{{listed(bundle(resources))}}}"
    if count > 1 and strategy == "strict_spread":
        needs += f" on each of {count} nodes"
    elif count > 1:
        needs += f" for each of {count} ranks{' on one node' * (strategy == 'strict_pack')}"
    return f"{needs}, labels {{{_label_text(resources.labels)}}}" if resources.labels else needs


def shortage(resources: Resources, parallel: ParallelConfig, nodes: Sequence[Node]) -> str:
    """The reason why a worker does not fit on these nodes, as text."""
    count, strategy = parallel.world_size, parallel.placement
    needs = f"it needs {needed(resources, parallel)}"
    matching = _matching(resources, nodes)
    if resources.labels and not matching:
        return f"{needs}; no node has these labels, there {_kinds(nodes)}"
    counts = [_num_ranks(node, bundle(resources)) for node in matching]
    with_these = " with these labels" if resources.labels else ""
    where = f"the only node{with_these}" if len(matching) == 1 else f"the {len(matching)} nodes{with_these}"
    if _fit(counts, count, strategy):
        return f"{needs}, which others hold on {where}"
    held = ", ".join(map(str, sorted(counts, reverse=True))) or "no"
    return f"{needs}; {where}, if empty, would hold {held} ranks"


def would_fit(resources: Resources, parallel: ParallelConfig, nodes: Sequence[Node]) -> bool:
    """Whether a worker would fit on these nodes if they were empty."""
    counts = [_num_ranks(node, bundle(resources)) for node in _matching(resources, nodes)]
    return _fit(counts, parallel.world_size, parallel.placement)


def _matching(resources: Resources, nodes: Sequence[Node]) -> list[Node]:
    return [node for node in nodes if has_labels(node.labels, resources.labels)]


def _fit(counts: Sequence[int], count: int, strategy: str) -> bool:
    if strategy == "strict_spread":
        return sum(each > 0 for each in counts) >= count
    if strategy == "strict_pack":
        return max(counts, default=0) >= count
    return sum(counts) >= count


def _num_ranks(node: Node, wanted: Mapping[str, float]) -> int:
    """Number of ranks that fit on an empty node."""
    return min(int(node.resources.get(kind, 0) / amount + 1e-9) for kind, amount in wanted.items())


def _kinds(nodes: Sequence[Node]) -> str:
    """The sets of labels, with their numbers of nodes, as text."""
    if not nodes:
        return "are no nodes"
    counts = Counter(
        _label_text({key: value for key, value in node.labels.items() if key not in _HIDDEN}) for node in nodes
    ).most_common()
    kinds = [f"{number} with {f'{{{labels}}}' if labels else 'none'}" for labels, number in counts[:_MAX_KINDS]]
    more = [f"{len(counts) - _MAX_KINDS} kinds more"] if len(counts) > _MAX_KINDS else []
    return f"{'is' if len(nodes) == 1 else 'are'} {', '.join(kinds + more)}"


def _label_text(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in sorted(labels.items()))


def listed(resources: Mapping[str, float]) -> str:
    """Resources as text, without those that Ray adds for nodes and placement groups."""
    return ", ".join(
        f"{kind}: {amount:g}"
        for kind, amount in sorted(resources.items())
        if not kind.startswith(("node:", "bundle_group")) and "_group_" not in kind
    )
