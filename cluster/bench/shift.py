"""A load that shifts on a real cluster, once with fixed roles and once with roles that follow it.

python -m cluster.bench.shift

Three workers of SmolLM2 on this machine, one of them there to prefill. First come short prompts with long answers, then
long prompts with short answers, then the first kind again. Printed are the promises kept before and after each shift,
the decisions of the controller, and whether every answer has the same tokens in both runs: they are computed by
different workers, so `deterministic: true` makes equality a matter of bits, not of luck.
"""

import asyncio
import os
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace

import click

from cluster.api.client import DiptychClient
from cluster.bench.hosted import ENGINE, MODEL, PATIENT, SHARE, hosted, refuse_foreign_ray
from cluster.events import Delta
from cluster.load.sending import Ask, Heard, Load, drive
from cluster.load.through_grpc import through
from cluster.scoring.figures import attainment
from cluster.scoring.records import Ending, Run
from cluster.spec import ClusterSpec, ElasticSpec, GatewaySpec, PoolSpec, Role
from cluster.text import TextDelta
from cluster.workload.arrivals import Workload
from cluster.workload.load import load_workload
from workers.costs import LinearCost
from workers.request import SLO, Request
from workers.shapes import Shape

ANSWERS, PROMPTS = "64-128/64-96", "700-900/6-10"
DEADLINE_S = 300.0
TIGHT = 2.0  # a promise is so many times what the phase takes alone
PROBE_TOKENS, PROBE_BATCH, PROBE_CONTEXT = 256, 8, 128


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run: what each request saw, the tokens of each answer, and what the controller decided."""

    run: Run
    tokens: dict[int, tuple[int, ...]]
    decisions: tuple[str, ...]


def spec(name: str, cost: LinearCost | None, slo: SLO, mode: str) -> ClusterSpec:
    engine = replace(ENGINE, kv_blocks=768, batching="adaptive", deterministic=True)
    engine = replace(engine, prompt_order="deadline", prompt_window=64)
    pools = (
        PoolSpec("prefill", Role.PREFILL, 1, engine=engine, resources=SHARE, cost=cost),
        PoolSpec("decode", Role.DECODE, 2, engine=engine, resources=SHARE, cost=cost),
    )
    elastic = ElasticSpec(mode=mode, window_s=10.0, margin=0.1, dwell_s=2.0, cooldown_s=5.0)
    gateway = GatewaySpec(grpc_port=0, routing="promise", rebalance=True, slo=slo)
    return ClusterSpec(MODEL, pools, name, gateway=gateway, health=PATIENT, elastic=elastic)


async def calibrated(endpoint: str) -> LinearCost:
    """The default costs, corrected by a prompt and a decode step timed on one of the workers."""
    guess = LinearCost()
    async with DiptychClient(endpoint) as client:
        prompt = await client.measure("prefill-0", Shape(((PROBE_TOKENS, 0),), 0, 0), 5)
        decode = await client.measure("decode-0", Shape((), PROBE_BATCH, PROBE_CONTEXT), 10)
    prompt_s, decode_s = (sorted(each.seconds)[len(each.seconds) // 2] for each in (prompt, decode))
    of_prompt = prompt_s / guess.prefill_seconds(PROBE_TOKENS)
    of_decode = decode_s / guess.decode_seconds(PROBE_BATCH, PROBE_BATCH * PROBE_CONTEXT)
    prompts, decodes = guess.scaled(of_prompt), guess.scaled(of_decode)
    return replace(decodes, prefill_token_s=prompts.prefill_token_s, prefill_pair_s=prompts.prefill_pair_s)


def promised(cost: LinearCost) -> SLO:
    """What a long prompt takes behind two others, and what a step of eight takes, each `TIGHT` times."""
    return SLO(round(TIGHT * 3 * cost.prefill_seconds(900), 2), round(TIGHT * cost.decode_seconds(8, 8 * 160), 3))


def shifting(cost: LinearCost, phase_s: float, load: float, seed: int) -> tuple[Workload, tuple[Phase, ...]]:
    """`load`: of what two workers can do for the phase that is in demand."""
    answers = load * 2 * 16 / (80 * cost.decode_seconds(16, 16 * 140))
    prompts = load * 2 / cost.prefill_seconds(800)
    parts = [(answers, ANSWERS), (prompts, PROMPTS), (answers, ANSWERS)]
    line = " + ".join(f"poisson:rate={rate:.3f},duration={phase_s:g},lengths={lengths}" for rate, lengths in parts)
    names = ("long answers", "long prompts", "long answers")
    phases = tuple(Phase(name, index * phase_s, (index + 1) * phase_s) for index, name in enumerate(names))
    return load_workload(line, seed=seed), phases


def remembering(ask: Ask, tokens: dict[str, list[int]]) -> Ask:
    """The same, with every answer's tokens kept by the request's id."""

    async def asked(request: Request) -> AsyncGenerator[Heard, None]:
        async with aclosing(ask(request)) as events:
            async for event in events:
                if isinstance(event, Delta | TextDelta):
                    tokens[request.id].extend(event.tokens)
                yield event

    return asked


async def drive_it(endpoint: str, workload: Workload, slo: SLO, seed: int) -> Outcome:
    tokens: dict[str, list[int]] = defaultdict(list)
    async with DiptychClient(endpoint) as client:
        status = await client.status()
        assert status.view.model is not None, "a served cluster knows its model"
        load = Load(status.view.model.vocab_size, DEADLINE_S, len(workload.arrivals), seed=seed, slo=slo)
        run = await drive(remembering(through(client, DEADLINE_S), tokens), workload, load)
        taken = (await client.status()).decisions
    told = tuple(
        f"{each.decision.worker or each.decision.pool}: {each.decision.reason} ({each.outcome})" for each in taken
    )
    by_index = {int(name.partition("-")[2]): tuple(answer) for name, answer in tokens.items()}
    return Outcome(run, by_index, told)


def table(outcomes: dict[str, Outcome], phases: tuple[Phase, ...], slo: SLO) -> str:
    lines = [f"TTFT <= {slo.ttft_s:g} s and TPOT <= {slo.tpot_s:g} s", ""]
    lines.append(f"{'kept by those who came':<34}" + "".join(f"{name:>16}" for name in outcomes))
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


def lost(outcome: Outcome, workload: Workload) -> int:
    """Requests without an end, or without all of their tokens."""
    return sum(
        each.ending is not Ending.FINISHED or len(outcome.tokens[each.index]) != arrival.output_tokens
        for each, arrival in zip(outcome.run.served, workload.arrivals, strict=True)
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--phase", "phase_s", type=click.FloatRange(5.0, 600.0), default=30.0, show_default=True, help="Seconds.")
@click.option("--load", type=click.FloatRange(0.1, 2.0), default=0.35, show_default=True, help="Of two workers.")
@click.option("--seed", type=int, default=0, show_default=True)
def main(phase_s: float, load: float, seed: int) -> None:
    """About five minutes on two cores."""
    refuse_foreign_ray(dict(os.environ))
    first = spec("shift", None, SLO(), "off")
    with hosted([first]) as system:
        cost = asyncio.run(calibrated(system.endpoints["shift"]))
    slo = promised(cost)
    workload, phases = shifting(cost, phase_s, load, seed)
    click.echo(
        f"{len(workload.arrivals)} requests in {workload.duration_s:.0f} s; a prompt token takes "
        f"{cost.prefill_token_s * 1e3:.2f} ms, a step of eight {cost.decode_seconds(8, 1280) * 1e3:.0f} ms"
    )
    outcomes = {}
    for mode, name in (("off", "fixed roles"), ("act", "elastic roles")):
        with hosted([spec("shift", cost, slo, mode)]) as system:
            outcomes[name] = asyncio.run(drive_it(system.endpoints["shift"], workload, slo, seed))
    click.echo(table(outcomes, phases, slo))
    for line in outcomes["elastic roles"].decisions:
        click.echo(line)
    fixed, elastic = outcomes["fixed roles"], outcomes["elastic roles"]
    differ = sum(fixed.tokens[index] != answer for index, answer in elastic.tokens.items())
    click.echo(
        f"lost: {lost(fixed, workload)} with fixed roles, {lost(elastic, workload)} with elastic ones; "
        f"{differ} of {len(elastic.tokens)} answers differ"
    )
    if differ or lost(elastic, workload):
        raise click.ClickException("an answer was lost or has other tokens")


if __name__ == "__main__":
    main()
