"""`diptych generate` and `diptych chat`: send prompts to a running cluster over gRPC."""

import asyncio
import sys
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from cluster.cli.address import client_options
from cluster.cli.groups import GroupedCommand, grouped
from cluster.cli.sampling_options import answer_options, given, sampling_options
from cluster.cli.screen import answer_json, console, ledger_table, print_json, queued_line, route_lines, say
from diptych.access import Access
from diptych.errors import DiptychError

if TYPE_CHECKING:
    from cluster.frontend.text import TextDelta, TextEvent
    from diptych.client import Answer, AsyncClient

output = grouped("Output")


@dataclass(frozen=True, slots=True)
class Shown:
    """How to print an answer."""

    stream: bool
    report: bool
    as_json: bool


@click.command(cls=GroupedCommand)
@click.argument("text")
@answer_options
@sampling_options
@output("--raw", is_flag=True, help="Complete TEXT as it is, without the model's chat template.")
@output("--stream/--no-stream", default=True, show_default=True, help="Print the text as it is generated.")
@output("--report", is_flag=True, help="Also print where the request ran and where its time went.")
@output("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
@client_options
@click.option("--timeout", "timeout_s", type=float, metavar="SECONDS", help="Give up after this time.")
def generate(
    text: str,
    endpoint: str,
    access: Access,
    raw: bool,
    stream: bool,
    timeout_s: float | None,
    report: bool,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Answer TEXT as a user's message ("-" reads it from standard input).

    A model without a chat template completes the text. Several answers are printed once all are there.

    \b
    Example:
      diptych generate "What is the capital of France?"
      diptych generate "The sea is" --raw --endpoint 127.0.0.1:50051 --temperature 0 --max-tokens 32
      diptych generate "The sea is" --n 3 --seed 7 --top-p 0.9 --presence-penalty 0.5
      diptych generate "The sea is" --n 1 --best-of 8 --json
      diptych generate "The sea is" --max-tokens 1 --prompt-logprobs 2 --logit-bias 28=-100
      diptych generate "The sea is" --ttft 1.5 --tpot 0.1 --slo-class interactive --tenant alice --report
    """
    from diptych.client import AsyncClient

    prompt = sys.stdin.read() if text == "-" else text
    request = given(sampling) | {"apply_chat_template": not raw, "timeout_s": timeout_s}
    shown = Shown(stream and not as_json, report, as_json)

    async def ask() -> None:
        async with AsyncClient(endpoint, access=access) as client:
            await _generate(client, prompt, request, shown)

    asyncio.run(ask())


async def _generate(client: "AsyncClient", prompt: str, request: dict[str, Any], shown: Shown) -> None:
    several = request.get("n", 1) > 1 or "best_of" in request
    if shown.stream and not several:
        answer = await show(client.generate(prompt, **request))
    else:
        answer = await client.complete(prompt, **request)
        if not shown.as_json:
            _show_whole(answer)
    if shown.as_json:
        print_json(_json(answer))
        return
    for one in answer.outputs:
        _show_logprobs(one)
    if shown.report:
        await _report(client, answer)


def _show_whole(answer: "Answer") -> None:
    """Print the text. Each of several answers has a header line with its number."""
    ends = answer.completed.answers
    if len(answer.outputs) == 1:
        click.echo(answer.text)
        return
    for number, (output, end) in enumerate(zip(answer.outputs, ends, strict=True), 1):
        rank = "" if end.mean_logprob is None else f", mean logprob {end.mean_logprob:.3f}"
        facts = f"{end.completion_tokens} tokens, {end.finish.value}{rank}"
        click.echo(f"{'' if number == 1 else chr(10)}--- answer {number} of {len(ends)} ({facts})")
        click.echo(output.text)


def _show_logprobs(output: "TextDelta") -> None:
    """Print one token per line, by its id, because a client has no vocabulary."""
    for title, logprobs in (("prompt", output.prompt_logprobs), (f"answer {output.index + 1}", output.logprobs)):
        if not logprobs:
            continue
        tokens = output.tokens if logprobs is output.logprobs else (None,) * len(logprobs)
        click.echo(f"\n--- log probabilities of the {title}")
        first = 1 if title == "prompt" else 0  # the prompt's first token has no probability
        for position, (token, each) in enumerate(zip(tokens, logprobs, strict=True), first):
            name = "" if token is None else f" token {token:<7}"
            best = ", ".join(f"{other} {value:.3f}" for other, value in each.top)
            click.echo(f"{position:>6}{name} {each.chosen:>9.3f}{'   best ' + best if best else ''}")


def _json(answer: "Answer") -> dict[str, Any]:
    found = answer_json(answer.text, answer.output.tokens, answer.accepted, answer.completed)
    if answer.queued is not None:
        found["queued"] = asdict(answer.queued)
    if answer.output.prompt_logprobs:
        found["prompt_logprobs"] = [asdict(each) for each in answer.output.prompt_logprobs]
    if answer.output.logprobs:
        found["logprobs"] = [asdict(each) for each in answer.output.logprobs]
    if answer.completed.answers:
        found["answers"] = [
            {
                "text": output.text,
                "tokens": list(output.tokens),
                "finish": end.finish.value,
                "completion_tokens": end.completion_tokens,
                "attempts": end.attempts,
                "mean_logprob": end.mean_logprob,
                "ttft_s": end.ledger.ttft_ns / 1e9,
                "total_s": end.ledger.total_ns / 1e9,
                "logprobs": [asdict(each) for each in output.logprobs],
            }
            for output, end in zip(answer.outputs, answer.completed.answers, strict=True)
        ]
    return found


async def show(events: Any) -> "Answer":
    """Print the text as it arrives. A cancellation closes the stream, which cancels the request."""
    from cluster.events import Queued
    from cluster.frontend.text import TextDelta
    from diptych.client import answer_of

    received: list[TextEvent] = []
    async with aclosing(events) as stream:
        async for event in stream:
            received.append(event)
            if isinstance(event, TextDelta):
                click.echo(event.text, nl=False)
            elif isinstance(event, Queued):
                say(queued_line(event))
    click.echo()
    return answer_of(received)


async def _report(client: "AsyncClient", answer: "Answer") -> None:
    workers = {worker.name: worker for worker in (await client.status()).view.workers}
    screen = console(stderr=True)
    for line in route_lines(answer.accepted, answer.completed, workers):
        screen.print(line, markup=False, soft_wrap=True)
    screen.print(ledger_table(answer.completed.ledger))


@click.command(cls=GroupedCommand)
@client_options
@click.option("--system", help="System message.")
@sampling_options
def chat(endpoint: str, access: Access, system: str | None, **sampling: Any) -> None:
    """Chat with the model, which remembers the conversation.

    Each line is a message, typed or piped in. /reset starts over, /quit or Ctrl-D exits, Ctrl-C stops an answer.

    \b
    Example:
      diptych chat --endpoint 127.0.0.1:50051 --system "Answer in one sentence."
      printf 'Hello\\nWhat did I say?\\n' | diptych chat
    """
    start = [("system", system)] if system else []
    messages = list(start)
    keyboard = sys.stdin.isatty()
    if keyboard:
        import readline  # noqa: F401  (adds a history to input())
    with asyncio.Runner() as runner:
        client = runner.run(_connect(endpoint, access))
        try:
            runner.run(client.status())  # raises before the first message is typed
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
    client: "AsyncClient",
    messages: list[tuple[str, str]],
    line: str,
    sampling: dict[str, Any],
    keyboard: bool,
) -> None:
    """Send one message and print its answer. With a keyboard, a failed turn is dropped and the chat continues."""
    conversation = [*messages, ("user", line)]
    try:
        answer = runner.run(show(client.chat(conversation, **sampling)))
    except KeyboardInterrupt:
        say(" (stopped)")
    except DiptychError as error:
        if not keyboard:
            raise
        say(f"Error: {error}")
    else:
        messages[:] = [*conversation, ("assistant", answer.text)] if answer.text else messages


async def _connect(endpoint: str, access: Access) -> "AsyncClient":
    from diptych.client import AsyncClient

    return AsyncClient(endpoint, access=access)


def _read(keyboard: bool) -> str | None:
    """The next line; None at the end."""
    try:
        return input("> " if keyboard else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None
