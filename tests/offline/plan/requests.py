"""Small loads and plan requests for tests of the planner."""

from typing import Any

from cluster.offline.plan.load import PlanLoad
from cluster.offline.plan.request import PlanRequest
from cluster.offline.workload.load import load_workload
from workers.request import SLO

A100, H100, L4 = "a100-80gb", "h100-80gb", "l4"


def load(lengths: str = "200-600/5-15", own_times: bool = False) -> PlanLoad:
    return PlanLoad.of(load_workload(f"poisson:rate=4,lengths={lengths},count=200"), own_times)


def plan_request(**changed: Any) -> PlanRequest:
    """Llama-3-8B on a few small GPUs: low rates, so runs are short."""
    terms: dict[str, Any] = {
        "model": "llama-3-8b",
        "hardware": (L4,),
        "gpus": 2,
        "load": load(),
        "slo": SLO(0.4, 0.1),
        "requests": 24,
        "seeds": (0,),
        "tolerance": 0.2,
        "source": "roofline",
    }
    return PlanRequest(**(terms | changed))
