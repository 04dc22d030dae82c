"""A load that shifts on a real cluster, once with fixed roles and once with roles that follow it.

python -m benchmarks.shift
python -m benchmarks.shift --simulated

Two SmolLM2 workers on this machine with one thread each, one for prefill and one for decode; more workers than cores
would slow each other down. Or four simulated workers: everything is real but the steps, which sleep as long as a device
would compute. The load is short prompts with long answers, then long prompts with short answers, then the first kind
again. The output is the SLO attainment before and after each shift, the controller's decisions, and whether every
answer has the same tokens in both runs. Different workers compute them, so `deterministic: true` makes them equal.
Simulated workers derive tokens from the request id.
"""

import asyncio
import os
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from statistics import median

import click

from benchmarks.hosted import ENGINE, MODEL, PATIENT, SHARE, hosted, refuse_foreign_ray
from cluster.events import Delta
from cluster.frontend.text import TextDelta
from cluster.offline.load.grpc_endpoint import through
from cluster.offline.load.sender import Ask, LoadOptions, ResponseEvent, drive
from cluster.offline.scoring.figures import attainment
from cluster.offline.scoring.records import RequestOutcome, Run
from cluster.offline.workload.arrivals import Workload
from cluster.offline.workload.load import load_workload
from cluster.spec import ClusterSpec, ElasticSpec, GatewaySpec, PoolSpec, Role
from diptych.client import AsyncClient
from diptych.shapes import Shape
from workers.costs import LinearCost
from workers.request import SLO, Request

NAME, WORKERS = "shift", ("prefill-0", "decode-0")
FIXED, ELASTIC = "fixed roles", "elastic roles"
ANSWERS, PROMPTS = "64-128/64-96", "700-900/6-10"
DEADLINE_S = 300.0
SLO_SCALE = 2.0  # the SLO over the time that the phase takes alone
PROBE_TOKENS, PROBE_BATCH, PROBE_CONTEXT = 256, 8, 128


@dataclass(frozen=True, slots=True)
class LoadPhase:
    name: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class ShiftRun:
    """One run: its requests, the tokens of each answer, and the controller's decisions."""

    run: Run
    tokens: dict[int, tuple[int, ...]]
    decisions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fleet:
    """Half of the `workers` start as prefill workers. `cost`: of a step; None: not measured yet."""

    workers: int
    executor: str
    cost: LinearCost | None

    def spec(self, slo: SLO, mode: str) -> ClusterSpec:
        engine = replace(ENGINE, kv_blocks=768, batching="adaptive", deterministic=True)
        engine = replace(engine, prompt_order="deadline", prompt_window=64)
        pools = tuple(
            PoolSpec(role.value, role, self.workers // 2, engine=engine, resources=SHARE, cost=self.cost)
            for role in (Role.PREFILL, Role.DECODE)
        )
        elastic = ElasticSpec(mode=mode, window_s=10.0, dwell_s=2.0, cooldown_s=5.0)
        gateway = GatewaySpec(grpc_port=0, routing="slo", rebalance=True, slo=slo)
        return ClusterSpec(MODEL, pools, NAME, gateway=gateway, health=PATIENT, elastic=elastic, executor=self.executor)


REAL = Fleet(2, "torch", None)
SIMULATED = Fleet(4, "simulated", LinearCost(0.02, 0.0005, 0.0, 0.002, 0.0, 0.0, 0.0, 0.0))


async def calibrated(endpoint: str) -> LinearCost:
    """The default costs, scaled by prompts and decode steps measured on both workers at the same time."""
    guess = LinearCost()
    prompt, decode = Shape(((PROBE_TOKENS, 0),), 0, 0), Shape((), PROBE_BATCH, PROBE_CONTEXT)
    async with AsyncClient(endpoint) as client:
        prompts = await asyncio.gather(*(client.measure(name, prompt, 5) for name in WORKERS))
        decodes = await asyncio.gather(*(client.measure(name, decode, 10) for name in WORKERS))
    prompt_s = median(second for each in prompts for second in each.seconds)
    decode_s = median(second for each in decodes for second in each.seconds)
    of_prompts = guess.scaled(prompt_s / guess.prefill_seconds(PROBE_TOKENS))
    of_decodes = guess.scaled(decode_s / guess.decode_seconds(PROBE_BATCH, PROBE_BATCH * PROBE_CONTEXT))
    return replace(of_decodes, prefill_token_s=of_prompts.prefill_token_s, prefill_pair_s=of_prompts.prefill_pair_s)


def slo_for(cost: LinearCost) -> SLO:
    """`SLO_SCALE` times a long prompt behind two others, and `SLO_SCALE` times a decode step of eight."""
    return SLO(
        round(SLO_SCALE * 3 * cost.prefill_seconds(900), 2), round(SLO_SCALE * cost.decode_seconds(8, 8 * 160), 3)
    )


def shifting(
    cost: LinearCost, workers: int, phase_s: float, load: float, seed: int
) -> tuple[Workload, tuple[LoadPhase, ...]]:
    """`load`: as a share of what all workers together could do in the phase that is in demand."""
    answers = load * workers * 16 / (80 * cost.decode_seconds(16, 16 * 140))
    prompts = load * workers / cost.prefill_seconds(800)
    parts = [(answers, ANSWERS), (prompts, PROMPTS), (answers, ANSWERS)]
    line = " + ".join(f"poisson:rate={rate:.3f},duration={phase_s:g},lengths={lengths}" for rate, lengths in parts)
    names = ("long answers", "long prompts", "long answers")
    phases = tuple(LoadPhase(name, index * phase_s, (index + 1) * phase_s) for index, name in enumerate(names))
    return load_workload(line, seed=seed), phases


def recording(ask: Ask, tokens: dict[str, list[int]]) -> Ask:
    """Wrap `ask` so that it records every answer's tokens by request id."""

    async def asked(request: Request) -> AsyncGenerator[ResponseEvent, None]:
        async with aclosing(ask(request)) as events:
            async for event in events:
                if isinstance(event, Delta | TextDelta):
                    tokens[request.id].extend(event.tokens)
                yield event

    return asked


async def run_load(endpoint: str, workload: Workload, slo: SLO, seed: int) -> ShiftRun:
    tokens: dict[str, list[int]] = defaultdict(list)
    async with AsyncClient(endpoint) as client:
        status = await client.status()
        assert status.view.model is not None, "a served cluster has a model"
        load = LoadOptions(status.view.model.vocab_size, DEADLINE_S, len(workload.arrivals), seed=seed, slo=slo)
        run = await drive(recording(through(client, DEADLINE_S, keep_ids=True), tokens), workload, load)
        taken = (await client.status()).decisions
    decisions = tuple(
        f"{each.decision.worker or each.decision.pool}: {each.decision.reason} ({each.outcome})" for each in taken
    )
    by_index = {int(name.partition("-")[2]): tuple(answer) for name, answer in tokens.items()}
    return ShiftRun(run, by_index, decisions)


def table(outcomes: dict[str, ShiftRun], phases: tuple[LoadPhase, ...], slo: SLO) -> str:
    lines = [f"TTFT <= {slo.ttft_s:g} s and TPOT <= {slo.tpot_s:g} s", ""]
    lines.append(f"{'SLO attainment by arrival':<34}" + "".join(f"{name:>16}" for name in outcomes))
    for number, phase in enumerate(phases):
        half_s = (phase.begin_s + phase.end_s) / 2
        for begin_s, end_s, part in ((phase.begin_s, half_s, "first half"), (half_s, phase.end_s, "second half")):
            cells = ""
            for outcome in outcomes.values():
                served = tuple(each for each in outcome.run.served if begin_s <= each.arrival_s < end_s)
                cells += (
                    f"{attainment(replace(outcome.run, served=served), slo).both:>15.0%} " if served else f"{'-':>16}"
                )
            lines.append(f"{number + 1}. {phase.name + ', ' + part:<31}{cells}")
    cells = "".join(f"{attainment(outcome.run, slo).both:>15.0%} " for outcome in outcomes.values())
    lines.append(f"{'all':<34}{cells}")
    return "\n".join(lines)


def lost(outcome: ShiftRun, workload: Workload) -> int:
    """Requests that failed or lack tokens."""
    return sum(
        each.outcome is not RequestOutcome.FINISHED or len(outcome.tokens[each.index]) != arrival.output_tokens
        for each, arrival in zip(outcome.run.served, workload.arrivals, strict=True)
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--phase", "phase_s", type=click.FloatRange(5.0, 600.0), default=30.0, show_default=True, help="Seconds.")
@click.option("--load", type=click.FloatRange(0.1, 2.0), default=0.4, show_default=True, help="Of all workers.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--simulated", is_flag=True, help="Four workers that sleep as long as a device would compute.")
def main(phase_s: float, load: float, seed: int, simulated: bool) -> None:
    """Run a shifting load with fixed and with elastic roles. About five minutes on two cores."""
    refuse_foreign_ray(dict(os.environ))
    fleet = SIMULATED if simulated else with_measured_cost(REAL)
    assert fleet.cost is not None, "given or measured"
    slo = slo_for(fleet.cost)
    workload, phases = shifting(fleet.cost, fleet.workers, phase_s, load, seed)
    click.echo(
        f"{len(workload.arrivals)} requests in {workload.duration_s:.0f} s; a prompt token takes "
        f"{fleet.cost.prefill_token_s * 1e3:.2f} ms, a step of eight {fleet.cost.decode_seconds(8, 1280) * 1e3:.0f} ms"
    )
    outcomes = {}
    for mode, name in (("off", FIXED), ("act", ELASTIC)):
        with hosted([fleet.spec(slo, mode)]) as system:
            outcomes[name] = asyncio.run(run_load(system.endpoints[NAME], workload, slo, seed))
    click.echo(table(outcomes, phases, slo))
    for line in outcomes[ELASTIC].decisions:
        click.echo(line)
    judge(outcomes[FIXED], outcomes[ELASTIC], workload)


def with_measured_cost(fleet: Fleet) -> Fleet:
    """The fleet with the costs of its own workers."""
    with hosted([fleet.spec(SLO(), "off")]) as system:
        return replace(fleet, cost=asyncio.run(calibrated(system.endpoints[NAME])))


def judge(fixed: ShiftRun, elastic: ShiftRun, workload: Workload) -> None:
    """Raises `ClickException` when elastic roles lose an answer or change its tokens."""
    differ = sum(fixed.tokens[index] != answer for index, answer in elastic.tokens.items())
    gone = lost(elastic, workload)
    click.echo(
        f"lost: {lost(fixed, workload)} with fixed roles, {gone} with elastic ones; "
        f"{differ} of {len(elastic.tokens)} answers differ"
    )
    if differ or gone:
        raise click.ClickException("an answer was lost or has other tokens")


if __name__ == "__main__":
    main()
