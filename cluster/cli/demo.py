"""`diptych demo`: starts two workers, answers one prompt and shows its route; `--kill` kills a worker instead."""

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import click
import msgspec

from cluster.cli.generate import show
from cluster.cli.launch import private
from cluster.cli.lifetime import run, running_cluster
from cluster.cli.options import JSON, GroupedCommand
from cluster.cli.screen import answer_json, console, print_json, print_report, say
from cluster.cli.serve import check_pools

if TYPE_CHECKING:
    from cluster.spec import ClusterSpec

PROMPT = "Explain in two sentences why the sea is salty."


@click.command(cls=GroupedCommand)
@click.option("--kill", is_flag=True, help="Kill the decode worker (kill -9) under running streams instead.")
@click.option("--prompt", default=PROMPT, help="Prompt of the demo without --kill.")
@click.option("--model", default="smollm2-135m", help="Short name, folder, .gguf file or hub id.")
@click.option("--max-tokens", type=click.IntRange(1), default=64, help="Length of each answer.")
@click.option("--runtime", type=click.Choice(["ray", "local"]), default="ray")
@JSON
def demo(kill: bool, prompt: str, model: str, max_tokens: int, runtime: str, as_json: bool) -> None:
    """Start a prefill and a decode worker here, answer one prompt, and show where it ran.

    With --kill: stream several answers, run them again and kill the decode worker in the middle, and compare every
    token of the two runs.

    The first run downloads the model. Everything that was started is stopped at the end.

    \b
    Example:
      diptych demo --prompt "What is a diptych?" --max-tokens 40
      diptych demo --kill
    """
    from cluster.cli.kill_demo import check_can_kill, kill_demo
    from cluster.spec_file import laptop_spec

    if kill:
        check_can_kill(runtime)
    spec = private(laptop_spec().with_model(model))
    # The default router would run a short prompt on the decode worker alone, without a KV handoff.
    spec = replace(spec, gateway=replace(spec.gateway, routing="least-loaded"))
    check_pools(spec, None, runtime)
    try:
        run(kill_demo(spec, max_tokens, as_json) if kill else _demo(spec, runtime, prompt, max_tokens, as_json))
    except KeyboardInterrupt:
        raise click.Abort from None


async def _demo(spec: "ClusterSpec", runtime: str, prompt: str, max_tokens: int, as_json: bool) -> None:
    async with running_cluster(spec, runtime, say) as serving:
        await asyncio.to_thread(_ask, serving.endpoint, prompt, max_tokens, as_json)


def _ask(endpoint: str, prompt: str, max_tokens: int, as_json: bool) -> None:
    from diptych.client import Client

    with Client(endpoint) as client:
        client.wait_ready(30.0)
        if not as_json:
            click.echo(f"\n> {prompt}\n")
        answer = show(client.chat([("user", prompt)], max_tokens=max_tokens, temperature=0.0), is_quiet=as_json)
        view = client.status().view
        if as_json:
            print_json(answer_json(answer) | {"workers": msgspec.to_builtins(view.workers)})
        else:
            print_report(console(), answer, view)
