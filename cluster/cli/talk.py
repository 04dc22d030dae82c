"""`diptych generate` and `diptych chat`: a running cluster over gRPC."""

import asyncio
import sys
from collections.abc import Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import click

from cluster.api.errors import DiptychError
from cluster.cli.screen import answer_json, console, ledger_table, print_json, say, way_lines

if TYPE_CHECKING:
    from cluster.api.client import Answer, DiptychClient
    from cluster.text import TextEvent

ENDPOINT = click.option(
    "--endpoint", default="127.0.0.1:50051", show_default=True, envvar="DIPTYCH_ENDPOINT", metavar="HOST:PORT"
)
SAMPLING = (
    click.option("--max-tokens", type=int, help="Longest answer in tokens."),
    click.option("--temperature", type=float, help="0 takes the likeliest token."),
    click.option("--top-k", type=int),
    click.option("--top-p", type=float),
    click.option("--min-p", type=float),
    click.option("--repetition-penalty", type=float),
    click.option("--seed", type=int, help="The same seed gives the same answer."),
    click.option("--stop", multiple=True, help="End before this text; may be given again."),
)


def sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(SAMPLING):
        command = option(command)
    return command


def given(sampling: dict[str, Any]) -> dict[str, Any]:
    """Only what was said: the rest is the server's choice."""
    return {name: value for name, value in sampling.items() if value not in (None, ())}


@click.command()
@click.argument("text")
@ENDPOINT
@sampling_options
@click.option("--stream/--no-stream", default=True, show_default=True, help="Show the text as it is made.")
@click.option("--timeout", "timeout_s", type=float, help="Seconds until the request is given up.")
@click.option("--report", is_flag=True, help="Also show where the request and its time went.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def generate(
    text: str, endpoint: str, stream: bool, timeout_s: float | None, report: bool, as_json: bool, **sampling: Any
) -> None:
    """Go on from TEXT ("-": read it from standard input).

    \b
    Example:
      diptych generate "The sea is" --endpoint 127.0.0.1:50051 --temperature 0 --max-tokens 32
    """
    prompt = sys.stdin.read() if text == "-" else text
    asyncio.run(_generate(prompt, endpoint, stream and not as_json, timeout_s, report, as_json, given(sampling)))


async def _generate(
    prompt: str,
    endpoint: str,
    stream: bool,
    timeout_s: float | None,
    report: bool,
    as_json: bool,
    sampling: dict[str, Any],
) -> None:
    from cluster.api.client import DiptychClient

    async with DiptychClient(endpoint) as client:
        if stream:
            answer = await show(client.generate(prompt, timeout_s=timeout_s, **sampling))
        else:
            answer = await client.complete(prompt, timeout_s=timeout_s, **sampling)
            if not as_json:
                click.echo(answer.text)
        if as_json:
            print_json(answer_json(answer.text, answer.output.tokens, answer.accepted, answer.completed))
        elif report:
            await _report(client, answer)


async def show(events: Any) -> "Answer":
    """Write the text as it comes. Closing on the way out cancels the request."""
    from cluster.api.client import answer_of
    from cluster.text import TextDelta

    heard: list[TextEvent] = []
    async with aclosing(events) as stream:
        async for event in stream:
            heard.append(event)
            if isinstance(event, TextDelta):
                click.echo(event.text, nl=False)
    click.echo()
    return answer_of(heard)


async def _report(client: "DiptychClient", answer: "Answer") -> None:
    workers = {worker.name: worker for worker in (await client.status()).view.workers}
    screen = console(stderr=True)
    for line in way_lines(answer.accepted, answer.completed, workers):
        screen.print(line, markup=False, soft_wrap=True)
    screen.print(ledger_table(answer.completed.ledger))


@click.command()
@ENDPOINT
@click.option("--system", help="What the model is told first.")
@sampling_options
def chat(endpoint: str, system: str | None, **sampling: Any) -> None:
    """Talk with the model; it remembers the conversation.

    Each line is a message, from the keyboard or from a pipe. /reset forgets, /quit or Ctrl-D ends; Ctrl-C ends an
    answer early.

    \b
    Example:
      diptych chat --endpoint 127.0.0.1:50051 --system "Answer in one sentence."
      printf 'Hello\\nWhat did I say?\\n' | diptych chat
    """
    start = [("system", system)] if system else []
    messages = list(start)
    keyboard = sys.stdin.isatty()
    if keyboard:
        import readline  # noqa: F401  (gives input() its history)
    with asyncio.Runner() as runner:
        client = runner.run(_connect(endpoint))
        try:
            while (line := _read(keyboard)) not in (None, "/quit"):
                if line == "/reset":
                    messages = list(start)
                elif line:
                    assert line is not None
                    _turn(runner, client, messages, line, given(sampling), keyboard)
        finally:
            runner.run(client.close())


def _turn(
    runner: asyncio.Runner,
    client: "DiptychClient",
    messages: list[tuple[str, str]],
    line: str,
    sampling: dict[str, Any],
    keyboard: bool,
) -> None:
    """One question and its answer. At the keyboard a failed turn is forgotten and the talk goes on."""
    asked = [*messages, ("user", line)]
    try:
        answer = runner.run(show(client.chat(asked, **sampling)))
    except KeyboardInterrupt:
        say(" (stopped)")
    except DiptychError as error:
        if not keyboard:
            raise
        say(f"Error: {error}")
    else:
        messages[:] = [*asked, ("assistant", answer.text)] if answer.text else messages


async def _connect(endpoint: str) -> "DiptychClient":
    from cluster.api.client import DiptychClient

    return DiptychClient(endpoint)


def _read(keyboard: bool) -> str | None:
    """The next line; None at the end."""
    try:
        return input("> " if keyboard else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None
