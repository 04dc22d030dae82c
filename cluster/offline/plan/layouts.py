"""Layouts worth simulating: the instances that fit, ranked, then as many of each as the rate needs or the GPUs allow.

The caller ranks the instances: by simulation (`placement`) or by closed forms (`estimate`).
Source: Zhong et al., DistServe (OSDI'24), algorithms 1 and 2, and its repository's test of which pairs keep KV inside
nodes. Pure.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import ceil

from cluster.offline.plan.deploy import Layout, WorkerGroup
from cluster.offline.plan.request import PlanError, PlanRequest
from cluster.offline.plan.trial import Trial, decode_trial, full_trial, prefill_trial
from cluster.offline.sim.systems import PROMPT_BATCH
from cluster.spec import Role
from workers.profiles.capacity import kv_capacity_tokens, min_gpus
from workers.profiles.hardware import Hardware
from workers.profiles.profile_errors import ProfileError
from workers.profiles.sources import INTRA_NODE, profile_of

COMBINED = 3  # instances of each phase that are combined
VERIFIED = 2  # combinations that are simulated whole

Rated = list[tuple[Trial, float]]  # with the requests/s each serves, the most valuable first
Rank = Callable[[str, Sequence[Trial], int], Rated]  # what the trials are, the trials, how many to keep
OnNearMiss = Callable[[float, str], None]  # attained share, description
CHUNKS = (128, 256, 512, 1024, 2048)
PROMPT_STEPS = (512, PROMPT_BATCH)
MAX_STAGES = 8


class Layouts:
    """The layouts of one request."""

    def __init__(
        self, request: PlanRequest, rank: Rank, on_near_miss: OnNearMiss = lambda attained, description: None
    ) -> None:
        self._request = request
        self._rank = rank
        self._on_near_miss = on_near_miss

    def colocated(self, shapes: Sequence[WorkerGroup]) -> Rated:
        """The best instance over all shapes, chunk sizes, and prefill-first batching."""
        trials = [full_trial(self._request, Layout("colocated", (group,))) for group in colocated(shapes)]
        return self._rank("colocated instances", trials, 1)

    def split(self, shapes: Sequence[WorkerGroup], grain: float = 0.01) -> list[Layout]:
        """The `VERIFIED` most valuable, the smallest first of those that are this share from the best."""
        request = self._request
        sized = self._close(shapes) if request.kv_link == INTRA_NODE else self._phases(shapes)

        def weight(layout: Layout) -> float:
            return sum(group.gpus * request.weight(group.hardware) for group in layout.groups)

        best = max((rate / weight(layout) for rate, layout in sized), default=0.0)

        def rank(each: tuple[float, Layout]) -> tuple[float, float]:
            rate, layout = each
            if request.rate is not None:
                return weight(layout), -rate
            if request.objective == "throughput":
                return -rate, weight(layout)
            value = rate / weight(layout)
            return (-best, weight(layout)) if value >= best * (1.0 - grain) else (-value, weight(layout))

        return [layout for _, layout in sorted(sized, key=rank)[:VERIFIED]]

    def filled(self, best: Rated, room: int) -> list[Layout]:
        """As many of the best colocated instance as the rate needs; without a rate, as `room` or all GPUs allow."""
        if not best:
            return []
        request, (trial, rate) = self._request, best[0]
        if request.rate is not None:
            return [layout for _, layout in self._sized(trial.layout, rate)]
        room = request.gpus if request.objective == "throughput" else room
        return [trial.layout.times(max(1, room // trial.layout.gpus))]

    def _phases(self, shapes: Sequence[WorkerGroup]) -> list[tuple[float, Layout]]:
        """Algorithm 1: rank prefill and decode instances independently, then combine them."""
        request = self._request
        small = [shape for shape in shapes if shape.gpus_each < request.gpus]
        prompts = self._rank(
            "prefill instances", [prefill_trial(request, group) for group in prefills(small)], COMBINED
        )
        answers = self._rank("decode instances", [decode_trial(request, group) for group in decodes(small)], COMBINED)
        sized = []
        for (one, one_rate), (two, two_rate) in product(prompts, answers):
            pair = Layout("split", (one.layout.groups[0], two.layout.groups[0]))
            sized += self._sized(pair, one_rate, two_rate)
        return sized

    def _close(self, shapes: Sequence[WorkerGroup]) -> list[tuple[float, Layout]]:
        """Algorithm 2: the phases of a pair share nodes, so pairs are ranked whole."""
        pairs = [full_trial(self._request, Layout("split", pair)) for pair in close_pairs(self._request, shapes)]
        ranked = self._rank("pairs inside nodes", pairs, VERIFIED)
        return [sized for trial, rate in ranked for sized in self._sized(trial.layout, rate)]

    def _sized(self, layout: Layout, *rates: float) -> list[tuple[float, Layout]]:
        """The layout with as many instances as the rate needs or the GPUs allow, and what each should serve.

        `rates`: of one instance of each group, or one rate for a unit with one instance of each.
        """
        request = self._request
        each = rates * len(layout.groups) if len(rates) == 1 else rates
        if request.rate is not None:
            counts = [tuple(ceil(request.rate / rate) for rate in each)]
        else:
            limits = [request.gpus // group.gpus_each for group in layout.groups]
            if len(rates) > 1:
                counts = _balanced_counts(limits, each)
            else:
                counts = [(count,) * len(limits) for count in range(1, min(limits) + 1)]
        sized = [(count, layout.times(*count)) for count in counts]
        fitting = [
            (min(n * rate for n, rate in zip(count, each, strict=True)), layout)
            for count, layout in sized
            if layout.gpus <= request.gpus
        ]
        if not fitting and request.rate is not None:
            serves = min(each)
            self._on_near_miss(
                min(0.5, serves / request.rate),
                f"{layout.description} meets the SLO up to {serves:.4g} requests/s, and {sized[0][1].gpus} GPUs would "
                "be needed",
            )
        return fitting


def _balanced_counts(limits: Sequence[int], rates: Sequence[float]) -> list[tuple[int, ...]]:
    """For each number of one group, the fewest of the other that keep up, and one less."""
    counts = set()
    for first in range(1, limits[0] + 1):
        needed = ceil(first * rates[0] / rates[1])
        counts |= {(first, count) for count in (needed, needed - 1) if count >= 1}
    for second in range(1, limits[1] + 1):
        needed = ceil(second * rates[1] / rates[0])
        counts |= {(count, second) for count in (needed, needed - 1) if count >= 1}
    return sorted(counts)


def instances(request: PlanRequest) -> list[WorkerGroup]:
    """All shapes that fit on at most `request.gpus` GPUs of each kind. Raises `PlanError` when there is none.

    A tensor group stays in a node. Stages divide the layers evenly, if any number of them does.
    """
    found, refused = [], None
    for name, sheet in request.sheets.items():
        for tensor, pipeline in _fitting(request, sheet):
            try:
                profile_of(request.shape, sheet, tensor, pipeline, request.sources[name])
            except ProfileError as error:
                refused = error
                continue
            found.append(WorkerGroup(Role.MIXED, name, tensor, pipeline))
    if not found and refused is not None:
        raise PlanError(str(refused))
    if not found:
        raise PlanError(f"{request.shape.name} does not fit: {_needs(request)}; {request.gpus} were given")
    return found


def _fitting(request: PlanRequest, sheet: Hardware) -> Iterator[tuple[int, int]]:
    """(tensor, pipeline) with room for weights and a block of KV."""
    layers = request.shape.layers
    is_prime = all(layers % stages for stages in range(2, MAX_STAGES + 1))  # up to these
    for tensor in range(1, min(sheet.gpus_per_node, request.gpus) + 1):
        for pipeline in range(1, min(MAX_STAGES, request.gpus // tensor) + 1):
            try:
                fits = kv_capacity_tokens(request.shape, sheet, tensor, pipeline) >= request.shape.block_size
            except ProfileError:
                continue
            if fits and (is_prime or layers % pipeline == 0):
                yield tensor, pipeline


def _needs(request: PlanRequest) -> str:
    def needed(name: str, sheet: Hardware) -> str:
        try:
            gpus, (tensor, pipeline) = min_gpus(request.shape, sheet)
        except ProfileError:
            return f"no number of {name} holds it"
        most = f", but a plan has at most {MAX_STAGES} stages" if pipeline > MAX_STAGES else ""
        return f"it needs {gpus} {name} at least, as TP {tensor}, PP {pipeline}{most}"

    return "; ".join(needed(name, sheet) for name, sheet in request.sheets.items())


def colocated(shapes: Sequence[WorkerGroup]) -> list[WorkerGroup]:
    """Every shape with every chunk size, and prefill-first."""
    chunked = [replace(shape, batch_tokens=chunk) for shape in shapes for chunk in CHUNKS]
    return chunked + [replace(shape, batching="prefill-first", batch_tokens=PROMPT_BATCH) for shape in shapes]


def prefills(shapes: Sequence[WorkerGroup]) -> list[WorkerGroup]:
    return [replace(shape, role=Role.PREFILL, batch_tokens=size) for shape in shapes for size in PROMPT_STEPS]


def decodes(shapes: Sequence[WorkerGroup]) -> list[WorkerGroup]:
    return [replace(shape, role=Role.DECODE) for shape in shapes]


def close_pairs(request: PlanRequest, shapes: Sequence[WorkerGroup]) -> list[tuple[WorkerGroup, WorkerGroup]]:
    """Prefill and decode instances whose KV can stay inside nodes.

    Both are divided into the same number of segments of pipeline stages, and segments with the same layers share a
    node.
    """
    return [
        (one, two)
        for one in prefills(shapes)
        for two in decodes(shapes)
        if one.batch_tokens == PROMPT_BATCH and one.hardware == two.hardware and is_close(request, one, two)
    ]


def is_close(request: PlanRequest, prefill: WorkerGroup, decode: WorkerGroup) -> bool:
    sheet = request.sheets[prefill.hardware]
    nodes = request.nodes or -(-request.gpus // sheet.gpus_per_node)
    return prefill.gpus_each + decode.gpus_each <= request.gpus and any(
        prefill.pipeline % segments == 0
        and decode.pipeline % segments == 0
        and (prefill.gpus_each + decode.gpus_each) // segments <= sheet.gpus_per_node
        for segments in range(1, nodes + 1)
    )
