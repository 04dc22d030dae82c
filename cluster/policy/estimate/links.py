"""Finds the measured link of a pair of workers, or else a typical one between their pools. Pure."""

from collections import defaultdict

from diptych.view import ClusterView, LinkReport

Ends = tuple[str, str]  # owner and reader, or their pools


class MeasuredLinks:
    """Owned by whoever estimates transfers. In a large cluster only a sample of the links is measured."""

    def __init__(self) -> None:
        self._links: tuple[LinkReport, ...] = ()
        self._pools: dict[str, str] = {}  # of each worker
        self._by_pair: dict[Ends, LinkReport] = {}
        self._by_pools: dict[Ends, LinkReport] = {}

    def between(self, view: ClusterView, owner: str, reader: str) -> LinkReport | None:
        """The pair's link, or else the one with the median bandwidth between its pools; None: none is measured."""
        if view.links is not self._links:
            self._learn(view)
        if (link := self._by_pair.get((owner, reader))) is not None or not self._by_pools:
            return link
        if owner not in self._pools or reader not in self._pools:
            self._pools = {worker.name: worker.pool for worker in view.workers}
        return self._by_pools.get((self._pools.get(owner, ""), self._pools.get(reader, "")))

    def _learn(self, view: ClusterView) -> None:
        self._links = view.links
        self._pools = {worker.name: worker.pool for worker in view.workers}
        measured = [link for link in view.links if link.bytes_per_s > 0.0]
        self._by_pair = {(link.owner, link.reader): link for link in measured}
        of_pools: defaultdict[Ends, list[LinkReport]] = defaultdict(list)
        for link in measured:
            of_pools[self._pools.get(link.owner, ""), self._pools.get(link.reader, "")].append(link)
        by_speed = {ends: sorted(links, key=lambda each: each.bytes_per_s) for ends, links in of_pools.items()}
        self._by_pools = {ends: links[len(links) // 2] for ends, links in by_speed.items()}
