"""DistServe's case in DistServe's own simulator and in Diptych's: goodput by layout, on the same requests and costs.

OPT-13B on A100 with 80 GB, 90 % of the requests within 200 ms and 100 ms, ShareGPT-like lengths, Poisson arrivals.
Both get the same requests at the same times, DistServe's fits of the same engine, and the same search; only the
simulator differs. Costs of "vllm" are its fits of vLLM, with which its search for vLLM runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from benchmarks.figures import BenchmarkPart, Figure, Progress, spread
from benchmarks.peer_simulators import sharegpt
from benchmarks.peer_simulators.process import PeerSimulator, started
from benchmarks.peer_simulators.sources import DISTSERVE
from cluster.offline.plan.deploy import Layout, WorkerGroup
from cluster.offline.plan.load import PlanLoad
from cluster.offline.plan.request import PlanRequest
from cluster.offline.plan.trial import Trial, full_trial
from cluster.offline.scoring.figures import Attainment
from cluster.offline.scoring.goodput import Goodput, Probes, Search, goodput, half_width
from cluster.spec import Role
from workers.profiles.sources import INTRA_NODE
from workers.request import SLO

GPU, MODEL, TARGET, CASE_SLO = "a100-80gb", "opt-13b", 0.9, SLO(0.2, 0.1)
ROUNDS = 3  # seeds
QUICK_REQUESTS, REQUESTS = 30, 300  # of a run, as in DistServe's simulator
SOURCES = {"distserve": "distserve", "vllm": "distserve-vllm"}
OURS, THEIRS, THEIR_RULE = "Diptych", "DistServe's simulator", "DistServe's simulator, each SLO alone"


@dataclass(frozen=True, slots=True)
class PlacementCase:
    """`tensors`: of the colocated instance, or of the prefill and the decode instance. `engine`: whose fits."""

    tensors: tuple[int, ...]
    engine: str = "distserve"

    @property
    def name(self) -> str:
        layout = "colocated TP {}" if len(self.tensors) == 1 else "split, prefill TP {}, decode TP {}"
        fits = "" if self.engine == "distserve" else ", fits of vLLM"
        return layout.format(*self.tensors) + fits

    @property
    def layout(self) -> Layout:
        if len(self.tensors) == 1:
            return Layout("colocated", (WorkerGroup(Role.MIXED, GPU, *self.tensors, batching="prefill-first"),))
        groups = zip((Role.PREFILL, Role.DECODE), self.tensors, strict=True)
        return Layout("split", tuple(WorkerGroup(role, GPU, tensor) for role, tensor in groups))


SPLIT, COLOCATED = PlacementCase((2, 1)), PlacementCase((4,))  # DistServe's choice and ours
CASES = (SPLIT, *(PlacementCase((tensor,)) for tensor in (1, 2)), COLOCATED, PlacementCase((4,), "vllm"))
QUICK_CASES = (SPLIT, COLOCATED)


def trial(case: PlacementCase, requests: int) -> Trial:
    """Raises `PlanError`, `ProfileError` and `DoesNotFit`."""
    load = PlanLoad.of(sharegpt.workload())
    request = PlanRequest(
        MODEL, (GPU,), 4, load, CASE_SLO, nodes=1, kv_link=INTRA_NODE, requests=requests, source=SOURCES[case.engine]
    )
    return full_trial(request, case.layout)


class TheirTrial:
    """Attainment in DistServe's simulator of the requests that a `Trial` of ours would simulate."""

    def __init__(self, peer: PeerSimulator, case: PlacementCase, ours: Trial, each_alone: bool = False) -> None:
        self._peer, self._case, self._ours, self._each_alone = peer, case, ours, each_alone

    def __call__(self, rate: float, seed: int) -> Attainment:
        workload = self._ours.load.at(rate, seed, self._ours.count(rate))
        answer = self._peer(
            {
                "engine": self._case.engine,
                "model": f"facebook/{MODEL}",
                "groups": [[1, tensor] for tensor in self._case.tensors],
                "requests": [(each.at_s, each.prompt_tokens, each.output_tokens) for each in workload.arrivals],
            }
        )
        return attained(answer["ttft_s"], answer["tpot_s"], self._each_alone)


def attained(ttft_s: Sequence[float], tpot_s: Sequence[float], each_alone: bool) -> Attainment:
    """`each_alone`: `both` is the lower of the two shares, which is how DistServe's search decides."""
    fast = [one <= (CASE_SLO.ttft_s or 0.0) for one in ttft_s]
    steady = [one <= (CASE_SLO.tpot_s or 0.0) for one in tpot_s]
    ttft, tpot = sum(fast) / len(fast), sum(steady) / len(steady)
    both = sum(map(all, zip(fast, steady, strict=True))) / len(fast)
    return Attainment(ttft, tpot, min(ttft, tpot) if each_alone else both, 1.0)


def searched(attain: Trial | TheirTrial, ours: Trial, seeds: Sequence[int]) -> Goodput:
    """The planner's search; the cap is no bound of either simulator, since that of the closed forms is for the mean."""
    start = ours.estimate / 2.0
    search = Search(start, start / 16.0, 64.0 * start, tolerance=0.03)
    return goodput(Probes(attain), search, CASE_SLO, target=TARGET, seeds=seeds, gpus=ours.gpus)


def measure(rounds: int, quick: bool, progress: Progress) -> BenchmarkPart:
    """Skipped without DistServe's checkout. A round is a seed. Raises `PeerFailed`."""
    if reason := DISTSERVE.missing():
        return BenchmarkPart("peer-placement", skipped=reason)
    figures, by_seed = [], {}
    with started(DISTSERVE) as peer:
        for case in QUICK_CASES if quick else CASES:
            ours = trial(case, QUICK_REQUESTS if quick else REQUESTS)
            columns: dict[str, Trial | TheirTrial] = {
                THEIRS: TheirTrial(peer, case, ours),
                THEIR_RULE: TheirTrial(peer, case, ours, each_alone=True),
                OURS: replace(ours, give_up=TARGET),
            }
            for column, attain in columns.items():
                found = searched(attain, ours, range(rounds))
                per_gpu = by_seed[case, column] = [each / ours.gpus for each in found.by_seed]
                figures.append(Figure("Requests/s per GPU", case.name, column, "req/s", spread(per_gpu)))
                interval = f"{found.low / ours.gpus:.2f} to {found.high / ours.gpus:.2f}"
                progress(f"{case.name}, {column}: {found.per_gpu:.2f} ({interval}, 95 %)")
    gains = {column: gain(by_seed[SPLIT, column], by_seed[COLOCATED, column]) for column in columns}
    more = f"{COLOCATED.name} serves {{}} requests/s per GPU more than {SPLIT.name}."
    notes = tuple(f"{column}: {more.format(each)}" for column, each in gains.items())
    return BenchmarkPart("peer-placement", tuple(figures), notes=notes)


def gain(before: Sequence[float], after: Sequence[float]) -> str:
    """The mean difference seed by seed with its 95 % interval, as the planner's verdict compares."""
    more = [other - one for one, other in zip(before, after, strict=True)]
    mean, off = fmean(more), half_width(more)
    return f"{mean:.2f} ({mean - off:.2f} to {mean + off:.2f})"
