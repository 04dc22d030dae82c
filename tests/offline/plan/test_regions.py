"""Which system wins depends on the SLO: two instances of Llama-2-70B, TP 4 on A100s, prompts of 1,000 to 3,000 tokens
and answers of 100 to 300, step times of Splitwise's table.

The three SLOs are TaiChi's: loose TTFT and tight TPOT, the reverse, and both balanced. TaiChi's third is (6 s, 100 ms);
Diptych's chunks shrink to meet TPOT, so colocated holds for longer, and the region where neither pure system does well
is at 75 ms.
"""

from dataclasses import replace

import pytest

from cluster.offline.plan.deploy import Layout, WorkerGroup
from cluster.offline.plan.load import PlanLoad
from cluster.offline.plan.trial import full_trial
from cluster.offline.workload.load import load_workload
from cluster.spec import Role
from tests.offline.plan.requests import A100, plan_request
from workers.request import SLO

LOAD = PlanLoad.of(load_workload("poisson:rate=1,lengths=1000-3000/100-300,count=400"))
PAIR = (WorkerGroup(Role.PREFILL, A100, 4), WorkerGroup(Role.DECODE, A100, 4, batch_tokens=512))
LAYOUTS = {
    "colocated": Layout("colocated", (WorkerGroup(Role.MIXED, A100, 4, replicas=2),)),
    "split": Layout("split", PAIR),
    "hybrid": Layout("hybrid", PAIR, "splitwise"),
}


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("slo", "rate", "winners"),
    [
        (SLO(16.0, 0.06), 1.6, {"split", "hybrid"}),  # decodes must not be disturbed; prompts can wait
        (SLO(5.0, 0.25), 3.2, {"colocated"}),  # prompts need both instances
        (SLO(6.0, 0.075), 2.3, {"hybrid"}),  # one instance is too few for prompts, two disturb too many decodes
    ],
)
def test_the_slo_decides_which_system_meets_it(slo: SLO, rate: float, winners: set[str]) -> None:
    question = plan_request(
        model="llama-2-70b", hardware=(A100,), gpus=8, load=LOAD, slo=slo, source="splitwise", requests=90
    )
    trials = {kind: replace(full_trial(question, layout), give_up=0.9) for kind, layout in LAYOUTS.items()}
    assert {kind for kind, trial in trials.items() if trial(rate, 0).both >= 0.9} == winners
