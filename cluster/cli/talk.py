"""`diptych generate` and `diptych chat`: a running cluster over gRPC."""

import asyncio
import sys
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from cluster.cli.address import addressed
from cluster.cli.groups import GroupedCommand
from cluster.cli.screen import answer_json, console, ledger_table, print_json, queued_line, say, way_lines
from diptych.access import Access
from diptych.errors import DiptychError
from workers.request import SLO

if TYPE_CHECKING:
    from cluster.frontend.text import TextDelta, TextEvent
    from diptych.client import Answer, AsyncClient


def _biases(ctx: click.Context, option: click.Parameter, given: tuple[str, ...]) -> dict[int, float] | None:
    """("42=-100", ...) as {42: -100.0, ...}."""
    biases: dict[int, float] = {}
    for each in given:
        token, _, bias = each.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise click.BadParameter(f"{each!r} is not ID=BIAS, such as 42=-100", ctx, option) from None
    return biases or None


SAMPLING = (
    click.option("--max-tokens", type=int, help="Longest answer in tokens."),
    click.option("--min-tokens", type=int, help="No end before this many tokens."),
    click.option("--temperature", type=float, help="0 takes the likeliest token."),
    click.option("--top-k", type=int, help="Draw among the k likeliest tokens."),
    click.option("--top-p", type=float, help="Draw among the likeliest tokens that together reach this probability."),
    click.option("--min-p", type=float, help="Draw among tokens at least this times as likely as the likeliest."),
    click.option("--repetition-penalty", type=float, help="Above 1, what prompt and answer have becomes less likely."),
    click.option("--presence-penalty", type=float, help="Taken off the logit of each token that the answer has."),
    click.option("--frequency-penalty", type=float, help="Taken off for each time that the answer has the token."),
    click.option(
        "--logit-bias",
        multiple=True,
        metavar="ID=BIAS",
        callback=_biases,
        help="Added to this token's logit (-100 bans it, 100 forces it); may be given again.",
    ),
    click.option("--seed", type=int, help="The same seed gives the same answer."),
    click.option("--stop", multiple=True, help="End before this text; may be given again."),
    click.option("--stop-token-id", "stop_token_ids", type=int, multiple=True, help="End at this token; likewise."),
    click.option(
        "--include-stop", "include_stop_in_output", is_flag=True, default=None, help="Show what ended the answer, too."
    ),
    click.option("--ignore-eos", is_flag=True, default=None, help="Go on where the model would end."),
    click.option(
        "--special-tokens",
        "skip_special_tokens",
        flag_value=False,
        default=None,
        help="Show the text of special tokens.",
    ),
)
ANSWERS = (
    click.option("--n", type=int, help="Answers to give, each drawn with a seed of its own."),
    click.option("--best-of", type=int, help="Answers to make, of which the n likeliest are given."),
    click.option("--logprobs", type=int, metavar="K", help="Log probabilities of the answer, and of the K best."),
    click.option("--prompt-logprobs", type=int, metavar="K", help="The same for the prompt's own tokens."),
)
PROMISES = (
    click.option("--ttft", "ttft_s", type=float, metavar="SECONDS", help="Promise wanted: time to the first token."),
    click.option("--tpot", "tpot_s", type=float, metavar="SECONDS", help="Promise wanted: time between tokens."),
    click.option("--slo-class", metavar="NAME", help="The class whose promises and priority the request has."),
    click.option("--tenant", metavar="NAME", help="On whose behalf: tenants share the cluster by their weights."),
)


def sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed((*SAMPLING, *PROMISES)):
        command = option(command)
    return command


def answer_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(ANSWERS):
        command = option(command)
    return command


def given(options: dict[str, Any]) -> dict[str, Any]:
    """Only what was said: the rest is the server's choice. What is said of promises becomes one `slo`."""
    said = {name: value for name, value in options.items() if value not in (None, ())}
    ttft_s, tpot_s, class_name = (said.pop(name, None) for name in ("ttft_s", "tpot_s", "slo_class"))
    if (ttft_s, tpot_s, class_name) != (None, None, None):
        said["slo"] = SLO(ttft_s, tpot_s, "default" if class_name is None else class_name)
    return said


@click.command(cls=GroupedCommand)
@click.argument("text")
@addressed
@answer_options
@sampling_options
@click.option("--stream/--no-stream", default=True, show_default=True, help="Show the text as it is made.")
@click.option("--timeout", "timeout_s", type=float, help="Seconds until the request is given up.")
@click.option("--report", is_flag=True, help="Also show where the request and its time went.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
@click.option("--raw", is_flag=True, help="Go on from TEXT as it is, without the model's chat template.")
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
    """Answer TEXT ("-": read it from standard input); a model without a chat template goes on from it. Several answers
    are shown once all are there.

    \b
    Example:
      diptych generate "What is the capital of France?"
      diptych generate "The sea is" --raw --endpoint 127.0.0.1:50051 --temperature 0 --max-tokens 32
      diptych generate "The sea is" --n 3 --seed 7 --top-p 0.9 --presence-penalty 0.5
      diptych generate "The sea is" --n 1 --best-of 8 --json
      diptych generate "The sea is" --max-tokens 1 --prompt-logprobs 2 --logit-bias 28=-100
      diptych generate "The sea is" --ttft 1.5 --tpot 0.1 --slo-class interactive --tenant alice --report
    """
    prompt = sys.stdin.read() if text == "-" else text
    asked = prompt, endpoint, access, stream and not as_json, timeout_s, report, as_json
    asyncio.run(_generate(*asked, given(sampling) | {"apply_chat_template": not raw}))


async def _generate(
    prompt: str,
    endpoint: str,
    access: Access,
    stream: bool,
    timeout_s: float | None,
    report: bool,
    as_json: bool,
    sampling: dict[str, Any],
) -> None:
    from diptych.client import AsyncClient

    several = sampling.get("n", 1) > 1 or "best_of" in sampling
    async with AsyncClient(endpoint, access=access) as client:
        if stream and not several:
            answer = await show(client.generate(prompt, timeout_s=timeout_s, **sampling))
        else:
            answer = await client.complete(prompt, timeout_s=timeout_s, **sampling)
            if not as_json:
                _show_whole(answer)
        if as_json:
            print_json(_json(answer))
            return
        for output in answer.outputs:
            _show_logprobs(output)
        if report:
            await _report(client, answer)


def _show_whole(answer: "Answer") -> None:
    """The text; several are numbered, each under a line of its own."""
    ends = answer.completed.answers
    if len(answer.outputs) == 1:
        click.echo(answer.text)
        return
    for number, (output, end) in enumerate(zip(answer.outputs, ends, strict=True), 1):
        rank = "" if end.mean_logprob is None else f", mean logprob {end.mean_logprob:.3f}"
        told = f"{end.completion_tokens} tokens, {end.finish.value}{rank}"
        click.echo(f"{'' if number == 1 else chr(10)}--- answer {number} of {len(ends)} ({told})")
        click.echo(output.text)


def _show_logprobs(output: "TextDelta") -> None:
    """What was asked for, one token a line. A client has no vocabulary: tokens are told by their ids."""
    for title, logprobs in (("prompt", output.prompt_logprobs), (f"answer {output.index + 1}", output.logprobs)):
        if not logprobs:
            continue
        tokens = output.tokens if logprobs is output.logprobs else (None,) * len(logprobs)
        click.echo(f"\n--- log probabilities of the {title}")
        first = 1 if title == "prompt" else 0  # nothing stands before the prompt's first token
        for position, (token, each) in enumerate(zip(tokens, logprobs, strict=True), first):
            name = "" if token is None else f" token {token:<7}"
            best = ", ".join(f"{other} {value:.3f}" for other, value in each.top)
            click.echo(f"{position:>6}{name} {each.chosen:>9.3f}{'   best ' + best if best else ''}")


def _json(answer: "Answer") -> dict[str, Any]:
    told = answer_json(answer.text, answer.output.tokens, answer.accepted, answer.completed)
    if answer.queued is not None:
        told["queued"] = asdict(answer.queued)
    if answer.output.prompt_logprobs:
        told["prompt_logprobs"] = [asdict(each) for each in answer.output.prompt_logprobs]
    if answer.output.logprobs:
        told["logprobs"] = [asdict(each) for each in answer.output.logprobs]
    if answer.completed.answers:
        told["answers"] = [
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
    return told


async def show(events: Any) -> "Answer":
    """Write the text as it comes. Closing on the way out cancels the request."""
    from cluster.events import Queued
    from cluster.frontend.text import TextDelta
    from diptych.client import answer_of

    heard: list[TextEvent] = []
    async with aclosing(events) as stream:
        async for event in stream:
            heard.append(event)
            if isinstance(event, TextDelta):
                click.echo(event.text, nl=False)
            elif isinstance(event, Queued):
                say(queued_line(event))
    click.echo()
    return answer_of(heard)


async def _report(client: "AsyncClient", answer: "Answer") -> None:
    workers = {worker.name: worker for worker in (await client.status()).view.workers}
    screen = console(stderr=True)
    for line in way_lines(answer.accepted, answer.completed, workers):
        screen.print(line, markup=False, soft_wrap=True)
    screen.print(ledger_table(answer.completed.ledger))


@click.command(cls=GroupedCommand)
@addressed
@click.option("--system", help="What the model is told first.")
@sampling_options
def chat(endpoint: str, access: Access, system: str | None, **sampling: Any) -> None:
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
        client = runner.run(_connect(endpoint, access))
        try:
            runner.run(client.status())  # nobody should type a message to learn that there is no server
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


async def _connect(endpoint: str, access: Access) -> "AsyncClient":
    from diptych.client import AsyncClient

    return AsyncClient(endpoint, access=access)


def _read(keyboard: bool) -> str | None:
    """The next line; None at the end."""
    try:
        return input("> " if keyboard else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None
