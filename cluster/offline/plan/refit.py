"""Whether another fleet would serve a load that was seen: other cuts of the model, fewer or more GPUs. Words only.

Asks the placement search (`diptych plan`) for the least GPUs of the kind there is that serve the rate, among at most
twice as many as there are.
"""

from collections.abc import Sequence

from cluster.control.replanning import PlanFailed, Question
from cluster.offline.plan.asked import Asked, PlanError
from cluster.offline.plan.load import Load
from cluster.offline.plan.placement import Placement
from cluster.offline.plan.roles import load_of
from cluster.offline.plan.verdict import judged
from cluster.spec import PoolSpec
from workers.profiles.errors import ProfileError

REQUESTS = 150  # of one run
MOST_REQUESTS = 60_000  # of the whole search
TARGET = 0.9


def refitted(question: Question) -> str:
    """Empty: it would not, or nobody knows. Nothing is cached here: a load with prefixes looks too heavy.

    Raises `PlanFailed` for models and hardware that are not known.
    """
    pools = [pool for pool in question.spec.pools if _workers(question, pool)]
    hardware = {pool.hardware for pool in pools}
    if len(hardware) != 1 or not min(hardware) or question.slo.ttft_s is None or question.slo.tpot_s is None:
        return ""
    gpus = sum(_workers(question, pool) * pool.parallel.world_size for pool in pools)
    try:
        asked = Asked(
            model=question.spec.model,
            hardware=(min(hardware),),
            gpus=2 * gpus,
            load=Load.of(load_of(question).source),
            slo=question.slo,
            rate=question.rate,
            target=TARGET,
            requests=REQUESTS,
            seeds=(0,),
            tolerance=0.1,
            most_requests=MOST_REQUESTS,
        )
        layout = judged(asked, Placement(asked).search().options).chosen.layout
    except PlanError as error:
        return f"{gpus} {min(hardware)} and twice as many: {error}"
    except ProfileError as error:
        raise PlanFailed(str(error)) from None
    if layout.gpus == gpus and _cuts(pools) == {(group.tensor, group.pipeline) for group in layout.groups}:
        return ""
    few = "fewer GPUs would do" if layout.gpus < gpus else "more GPUs are needed"
    what = few if layout.gpus != gpus else "as many GPUs, cut in another way, would do"
    return (
        f"{what}: {layout.gpus} instead of {gpus} {min(hardware)} serve {question.rate:.3g} requests/s for "
        f"{TARGET:.0%} of requests as {layout.told}"
    )


def _workers(question: Question, pool: PoolSpec) -> int:
    return sum(count for (name, _), count in question.counts.items() if name == pool.name)


def _cuts(pools: Sequence[PoolSpec]) -> set[tuple[int, int]]:
    return {(pool.parallel.tensor, pool.parallel.pipeline) for pool in pools}
