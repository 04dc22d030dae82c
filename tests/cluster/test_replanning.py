"""The load's shape shifts: the planner is asked once and roles go where it says. What goes wrong there is one line."""

import asyncio
import logging
from dataclasses import replace

import pytest
from local import Cluster, cluster, request, split_spec

from cluster.cli.shape import decision_words
from cluster.control.changes import Taken
from cluster.control.planner_process import ChildPlanner
from cluster.control.replanning import PlanFailed, Planned, Planner, Question, Replanner, counted, told
from cluster.control.supervised import Failures
from cluster.frontend.grpc.admin_messages import view_message
from cluster.offline.plan.inline import Inline
from cluster.offline.sim.clock import run
from cluster.offline.sim.cluster import NoPlanner, PoolModel, Surroundings
from cluster.offline.sim.run import Options, simulate
from cluster.offline.workload.arrivals import Arrival, Workload
from cluster.policy.scaling.evidence import Decision, Report, Sample
from cluster.spec import ClusterSpec, ElasticSpec, Role, SpecError, parse_spec
from diptych.status import decisions_from
from diptych.v1 import admin_pb2
from diptych.view import ClusterView, WorkerState, WorkerView
from workers.costs import LinearCost
from workers.request import SLO

# A prompt of 800 tokens takes 0.4 s; a step of n decodes (10 + n) ms.
COST = LinearCost(0.01, 0.0005, 0.0, 0.001, 0.0, 0.0001, 0.0)
ANSWERS = [(0.25, 20, 40)] * 100  # a pause, then a request of so many tokens in and out
PROMPTS = [(0.25, 800, 3)] * 140
PREFILL, DECODE = ("prefill", Role.PREFILL), ("decode", Role.DECODE)
LENT = ("decode", Role.PREFILL)


def spec(replan: str, **elastic: object) -> ClusterSpec:
    """Closed forms that take no step of their own: only a plan moves roles here."""
    like = split_spec(1, 3, backends=("modelled",), kv_blocks=1000, max_batch_tokens=512, max_running=64)
    known = {"window_s": 10.0, "cooldown_s": 1.0, "dwell_s": 1e6, "period_s": 0.5, "replan_after_s": 20.0} | elastic
    return replace(
        like,
        pools=tuple(replace(pool, cost=COST) for pool in like.pools),
        transfer=replace(like.transfer, digest=False, host="127.0.0.1"),
        gateway=replace(like.gateway, slo=SLO(1.0, 0.05), placement_timeout_s=60.0),
        elastic=ElasticSpec(mode="act", replan=replan, **known),  # type: ignore[arg-type]
    )


def named(like: ClusterSpec) -> ClusterSpec:
    """On hardware that has a name."""
    return replace(like, pools=tuple(replace(pool, hardware="a100-80gb") for pool in like.pools))


class Scripted:
    """Answers what it is told to, and keeps what it was asked."""

    def __init__(self, *answers: Planned | Exception, fleet: str | Exception = "") -> None:
        self.answers = list(answers)
        self.words = fleet
        self.asked: list[Question] = []
        self.asked_fleet = 0

    async def roles(self, question: Question) -> Planned:
        self.asked.append(question)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def fleet(self, question: Question) -> str:
        self.asked_fleet += 1
        if isinstance(self.words, Exception):
            raise self.words
        return self.words


async def served(subject: Cluster, *loads: list[tuple[float, int, int]]) -> None:
    streams = []
    for index, (pause_s, num_prompt, num_output) in enumerate(each for load in loads for each in load):
        await asyncio.sleep(pause_s)
        asked = request(f"r{index}", num_prompt, max_tokens=num_output, first=37 * index)
        streams.append(asyncio.ensure_future(subject.run(asked)))
    await asyncio.gather(*streams)
    await subject.settle()


async def shifted(planner: Planner) -> tuple[dict[tuple[str, Role], int], tuple[Taken, ...]]:
    """The roles at the end, and what was decided."""
    async with cluster(named(spec("act")), COST, planner=planner) as subject:
        await served(subject, ANSWERS, PROMPTS)
        return dict(counted(subject.controller.view())), await subject.controller.decisions()


def plans(taken: tuple[Taken, ...]) -> list[Taken]:
    return [each for each in taken if each.decision.kind == "plan"]


WANTED = Planned({PREFILL: 1, LENT: 2, DECODE: 1}, 0.94, 0.71, 1000)


def test_roles_end_where_the_planner_wants_them_and_it_is_asked_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cluster.control.replanning")
    planner = Scripted(WANTED, fleet="fewer GPUs would do: 3 instead of 4")
    counts, taken = run(shifted(planner))
    assert counts == WANTED.counts
    (asked,) = planner.asked
    assert asked.counts == {PREFILL: 1, DECODE: 3} and asked.slo == SLO(1.0, 0.05)
    assert asked.rate == pytest.approx(4.0, rel=0.15)
    assert {(each.prompt_tokens, each.output_tokens) for each in asked.requests} == {(800, 3)}
    gaps = [later.at_s - sooner.at_s for sooner, later in zip(asked.requests, asked.requests[1:], strict=False)]
    assert gaps == pytest.approx([0.25] * len(gaps), abs=1e-6), "at the times at which they came"
    plan, advice = plans(taken)
    assert plan.outcome == "done" and advice.outcome == "advised" and "fewer GPUs" in advice.decision.reason
    assert plan.decision.reason.startswith("prefill 3, decode 1, mixed 0 (prefill: 1 prefill; decode: 2 prefill, 1 dec")
    assert "would keep 94% instead of 71%" in plan.decision.reason
    flips = [each for each in taken if each.decision.kind == "flip"]
    assert len(flips) == 2 and all("as planned" in each.decision.reason for each in flips)
    said = [record.message for record in caplog.records if record.name == "cluster.control.replanning"]
    assert [line.partition(":")[0] for line in said] == [
        "the load has changed, and the planner is asked",
        "planned",
        "advised",
        "the roles are as planned",
    ]


def test_the_real_planner_finds_roles_that_keep_more() -> None:
    counts, taken = run(shifted(Inline()))
    (plan,) = plans(taken)
    assert plan.outcome == "done" and "would keep" in plan.decision.reason
    assert counts != {PREFILL: 1, DECODE: 3} and sum(counts.values()) == 4
    assert sum(count for (_, role), count in counts.items() if role is not Role.DECODE) > 1


# ---- the shell alone ---------------------------------------------------------------------------------------------


def view(prefill: int, decode: int) -> ClusterView:
    names = [("prefill", Role.PREFILL, n) for n in range(prefill)] + [("decode", Role.DECODE, n) for n in range(decode)]
    workers = [WorkerView(f"{pool}-{n}", pool, role, WorkerState.READY) for pool, role, n in names]
    return ClusterView(1, "c", None, tuple(workers))


class Steps:
    """An elastic rule that only notes its aims."""

    def __init__(self) -> None:
        self.given: list[object] = []

    @property
    def aims(self) -> bool:
        return bool(self.given and self.given[-1])

    def aim(self, counts: object, reason: str) -> None:
        self.given.append(counts)


async def alone(
    planner: Scripted, *samples: tuple[int, Sample], like: ClusterSpec | None = None, acts: bool = True
) -> tuple[list[object], list[str]]:
    """For each pair so many seconds with five such requests; the aims that were given, and what became of plans."""
    steps, looks = Steps(), view(1, 3)
    subject = Replanner(like or spec("act", period_s=1.0), planner, lambda: looks, steps if acts else None)
    subject.begin(Failures())
    try:
        for seconds, sample in samples:
            for _ in range(seconds):
                await asyncio.sleep(1.0)
                aged = tuple(replace_age(sample, 0.2 * index) for index in range(5))
                subject.told(Report("g", 1.0, 5, 5 * sample.prompt_tokens, samples=aged))
        return steps.given, [each.outcome for each in subject.taken()]
    finally:
        subject.close()


def replace_age(sample: Sample, age_s: float) -> Sample:
    from msgspec import structs

    return structs.replace(sample, age_s=age_s)


def test_advice_moves_nobody() -> None:
    planner = Scripted(WANTED)
    assert run(alone(planner, (30, SHORT), (40, LONG), acts=False)) == ([], ["advised"])
    assert len(planner.asked) == 1 and not planner.asked_fleet, "nobody named the hardware"


class Silent(Scripted):
    async def roles(self, question: Question) -> Planned:
        self.asked.append(question)
        await asyncio.get_running_loop().create_future()
        raise AssertionError("nobody answers")


@pytest.mark.parametrize(
    ("planner", "line"),
    [
        (Scripted(PlanFailed("it ended by signal 9"), WANTED), "it ended by signal 9"),
        (Scripted(ZeroDivisionError("no seeds"), WANTED), "ZeroDivisionError: no seeds"),
        (Silent(), "the planner did not answer within 20 s"),
        (
            Scripted(replace(WANTED, counts={PREFILL: 1, DECODE: 4}), WANTED),
            "4 workers of pool decode",
        ),
        (Scripted(replace(WANTED, counts={PREFILL: 1, ("old", Role.DECODE): 3}), WANTED), "3 workers of pool old"),
    ],
    ids=["crash", "error", "silence", "gone", "unknown"],
)
def test_without_a_plan_there_is_no_aim_but_one_line(
    planner: Scripted, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "cluster.control.replanning")
    given, (outcome,) = run(alone(planner, (30, SHORT), (45 if isinstance(planner, Silent) else 38, LONG)))
    assert given == [None] and outcome.startswith("failed: ") and line in outcome
    (said,) = [record for record in caplog.records if record.name == "cluster.control.replanning"]
    assert line in said.message and not said.exc_info and "\n" not in said.message


def test_after_a_failure_it_is_asked_again_when_it_has_rested() -> None:
    planner = Scripted(PlanFailed("it ended by signal 9"), WANTED)
    given, outcomes = run(alone(planner, (30, SHORT), (60, LONG)))
    assert given == [None, None, WANTED.counts] and outcomes == ["failed: it ended by signal 9", "under way"]


def test_a_load_that_was_promised_nothing_is_not_planned_for() -> None:
    planner = Scripted(WANTED)
    without = replace(spec("act", period_s=1.0), gateway=replace(spec("act").gateway, slo=SLO()))
    given, outcomes = run(alone(planner, (30, UNPROMISED[0]), (40, UNPROMISED[1]), like=without))
    assert given == [None] and not planner.asked and "promised nothing; set gateway.slo" in outcomes[0]


SHORT, LONG = Sample(50, 50, 200, 0.1, 0.02, 1.0, 0.05), Sample(2000, 400, 5, 0.4, 0.02, 1.0, 0.05)
UNPROMISED = Sample(50, 50, 200), Sample(2000, 400, 5)


def test_a_new_drift_gives_the_last_plan_up() -> None:
    planner = Scripted(WANTED, WANTED)
    given, outcomes = run(alone(planner, (30, SHORT), (40, LONG), (40, SHORT)))
    assert given == [None, WANTED.counts, None, WANTED.counts]
    assert outcomes == ["failed: the load changed again", "under way"]


def test_with_an_empty_history_nothing_is_asked() -> None:
    planner = Scripted()
    given, outcomes = run(alone(planner, (60, SHORT)))
    assert not given and not outcomes and not planner.asked


def test_cached_tokens_are_asked_about_as_they_were_seen() -> None:
    planner = Scripted(WANTED)
    run(alone(planner, (30, SHORT), (30, LONG)))
    assert {each.computed_tokens for each in planner.asked[0].requests} == {400}


def test_who_was_turned_away_is_planned_for_like_the_others() -> None:
    planner = Scripted(WANTED)
    refused = Sample(4000, 0, 0, None, None, 1.0, 0.05, refused=True)
    run(alone(planner, (30, SHORT), (30, LONG), (4, refused)))
    asked = {(each.prompt_tokens, each.computed_tokens, each.output_tokens) for each in planner.asked[0].requests}
    assert asked <= {(2000, 400, 5), (4000, 800, 5)}


def test_advice_on_the_fleet_that_fails_leaves_the_plan_alone() -> None:
    planner = Scripted(WANTED, fleet=ValueError("no such GPU"))
    like = named(spec("act", period_s=1.0))
    given, outcomes = run(alone(planner, (30, SHORT), (30, LONG), like=like))
    assert given == [None, WANTED.counts] and outcomes == ["under way"] and planner.asked_fleet == 1


def test_words_say_the_figures() -> None:
    one = Planned({("all", Role.PREFILL): 2, ("all", Role.DECODE): 1}, 0.94, 0.71, 10)
    assert told(one, {("all", Role.MIXED): 3}) == "prefill 2, decode 1, mixed 0 would keep 94% instead of 71%"
    assert told(one, one.counts) == "prefill 2, decode 1, mixed 0, as it is, keeps 94%"


def test_a_plan_reaches_clients_and_terminals_as_a_decision() -> None:
    plan = Taken(Decision("plan", "prefill 2, decode 1, mixed 0 would keep 94% instead of 71%"), 3.0, "under way")
    (told_of,) = decisions_from(view_message(view(1, 3), admin_pb2.Gateway(), [plan]))
    assert told_of == plan and decision_words(told_of.decision) == "plan"


def test_in_a_simulation_nobody_plans_unless_a_planner_is_given() -> None:
    with pytest.raises(PlanFailed, match="nobody plans in this simulation"):
        run(NoPlanner().roles(Question(spec("act"), {}, {}, (), 1.0, SLO())))
    planner = Scripted(WANTED)
    load = [Arrival(0.1 * index, 20, 20) for index in range(250)]
    load += [Arrival(25.0 + 0.1 * index, 200, 3) for index in range(350)]
    like, models = spec("advise"), {"prefill": PoolModel(COST), "decode": PoolModel(COST)}
    simulate(like, models, Workload("shift", tuple(load)), Options(around=Surroundings(planner=planner)))
    assert len(planner.asked) == 1 and planner.asked[0].rate == pytest.approx(10.0, rel=0.1)


# ---- the specification -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("elastic", "line"),
    [
        ({"mode": "advise", "replan": "act"}, "elastic: replan is act and mode advise, which allows less; raise mode"),
        ({"replan": "advise"}, "elastic: replan is advise and mode off, which allows less; raise mode"),
        ({"mode": "act", "replan": "yes"}, "elastic: replan 'yes' is not one of off, advise, act"),
        (
            {"mode": "act", "replan": "act", "window_s": 60, "replan_after_s": 30},
            "elastic: replan_after_s is 30.0; it must be at least window_s (60.0)",
        ),
        ({"replan_after_s": 0}, "elastic: replan_after_s is 0.0; it must be above 0 seconds"),
        ({"mode": "act", "replan_after": 9}, "elastic.replan_after: unknown key; did you mean 'replan_after_s'?"),
    ],
)
def test_contradictions_are_refused_in_one_line(elastic: dict[str, object], line: str) -> None:
    pools = [{"name": "mixed", "role": "mixed"}]
    with pytest.raises(SpecError) as refused:
        parse_spec({"model": "m", "pools": pools, "elastic": elastic})
    assert str(refused.value) == line


def test_a_bare_off_is_off() -> None:
    pools = [{"name": "mixed", "role": "mixed"}]
    found = parse_spec({"model": "m", "pools": pools, "elastic": {"mode": "act", "replan": False}})
    assert found.elastic.replan == "off"


# ---- the process -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def question() -> Question:
    planner = Scripted(WANTED)
    run(alone(planner, (30, SHORT), (30, LONG)))
    return replace(planner.asked[0], requests=planner.asked[0].requests[:20])


async def test_a_process_answers_as_the_search_itself(question: Question) -> None:
    found = await ChildPlanner(limit_s=600.0, niceness=0).roles(question)
    assert found == await Inline().roles(question)
    assert sum(found.counts.values()) == 4 and found.simulated >= 40


async def test_a_process_that_cannot_says_why(question: Question) -> None:
    nameless = replace(question.spec, pools=tuple(replace(pool, cost=None) for pool in question.spec.pools))
    with pytest.raises(PlanFailed, match="pool prefill has neither cost"):
        await ChildPlanner(limit_s=600.0, niceness=0).roles(replace(question, spec=nameless))


async def test_a_process_that_dies_is_a_plan_that_failed(question: Question) -> None:
    with pytest.raises(PlanFailed, match="ended with status 1 and without an answer"):
        await ChildPlanner(module="cluster.offline.plan.nowhere").roles(question)
    with pytest.raises(PlanFailed) as failed:
        await ChildPlanner(memory_bytes=64 << 20, limit_s=600.0, niceness=0).roles(question)
    assert "\n" not in str(failed.value) and len(str(failed.value)) < 400


async def test_a_call_that_is_cancelled_ends_its_process(question: Question, monkeypatch: pytest.MonkeyPatch) -> None:
    started: asyncio.Future[asyncio.subprocess.Process] = asyncio.get_running_loop().create_future()
    create = asyncio.create_subprocess_exec

    async def noted(*args: str, **options: object) -> asyncio.subprocess.Process:
        process = await create(*args, **options)  # type: ignore[arg-type]
        started.set_result(process)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)
    asking = asyncio.ensure_future(ChildPlanner().roles(question))
    process = await started
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert process.returncode == -9
