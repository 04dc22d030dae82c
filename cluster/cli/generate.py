"""`diptych generate` and `diptych chat`: send prompts to a running cluster over gRPC."""

import sys
from collections.abc import Callable, Iterable
from typing import IO, TYPE_CHECKING, Any

import click

from cluster.cli.options import GroupedCommand, client_options, grouped, seconds
from cluster.cli.screen import answer_json, console, print_json, print_report, queued_line, say
from diptych.access import Access
from diptych.errors import DiptychError

if TYPE_CHECKING:
    from cluster.frontend.text import TextEvent
    from diptych.client import Answer, Client

output = grouped("Output")
sampling = grouped("Sampling")
length = grouped("Length and stopping")
scheduling = grouped("Model, SLO and tenant")


def _text(ctx: click.Context, option: click.Parameter, file: IO[str] | None) -> str | None:
    return None if file is None else file.read()


SAMPLING = (
    length("--max-tokens", type=int, help="Maximum number of tokens to generate."),
    length("--stop", multiple=True, help="Stop before this text; repeatable."),
    length("--ignore-eos", is_flag=True, default=None, help="Continue after the model's end-of-sequence token."),
    sampling("--temperature", type=float, help="0 is greedy: always the most likely token."),
    sampling("--top-k", type=int, help="Sample from the k most likely tokens."),
    sampling("--top-p", type=float, help="Sample from the most likely tokens whose probabilities sum to this."),
    sampling("--min-p", type=float, help="Sample from tokens at least this share as likely as the most likely one."),
    sampling("--repetition-penalty", type=float, help="Above 1: tokens of the prompt and answer become less likely."),
    sampling("--presence-penalty", type=float, help="Subtracted from the logit of each token in the answer."),
    sampling("--frequency-penalty", type=float, help="Subtracted once for each time the token is in the answer."),
    sampling("--seed", type=int, help="The same seed gives the same answer."),
    sampling("--json-schema", type=click.File(), callback=_text, metavar="FILE", help="Answer in JSON of this schema."),
    sampling("--regex", help="Answer with a match of this regular expression."),
)
SCHEDULING = (
    scheduling("--model", metavar="NAME", help="Where several are served: the one to ask."),
    scheduling("--ttft", "ttft_s", type=float, metavar="SECONDS", help="SLO: time to first token."),
    scheduling("--tpot", "tpot_s", type=float, metavar="SECONDS", help="SLO: time per output token after the first."),
    scheduling("--slo-class", metavar="NAME", help="SLO class, with its targets and its priority."),
    scheduling("--tenant", metavar="NAME", help="Tenant that the request belongs to; tenants share by weight."),
)


def sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed((*SAMPLING, *SCHEDULING)):
        command = option(command)
    return command


def given(options: dict[str, Any]) -> dict[str, Any]:
    """The given options. The server has defaults for the others. SLO options become one `slo`."""
    found = {name: value for name, value in options.items() if value not in (None, ())}
    ttft_s, tpot_s, class_name = (found.pop(name, None) for name in ("ttft_s", "tpot_s", "slo_class"))
    if (ttft_s, tpot_s, class_name) != (None, None, None):
        from workers.request import SLO

        found["slo"] = SLO(ttft_s, tpot_s, "default" if class_name is None else class_name)
    return found


@click.command(cls=GroupedCommand)
@click.argument("text")
@sampling_options
@output("--raw", is_flag=True, help="Complete TEXT as it is, without the model's chat template.")
@output("--report", is_flag=True, help="Also print where the request ran and where its time went.")
@output("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
@client_options
@seconds("--timeout", "Give up after this time.")
def generate(
    text: str,
    endpoint: str,
    access: Access,
    raw: bool,
    timeout_s: float | None,
    report: bool,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Answer TEXT as a user's message ("-" reads it from standard input).

    A model without a chat template completes the text.

    \b
    Example:
      diptych generate "What is the capital of France?"
      diptych generate "The sea is" --raw --endpoint 127.0.0.1:50051 --temperature 0 --max-tokens 32
      diptych generate "The sea is" --seed 7 --top-p 0.9 --presence-penalty 0.5 --json
      diptych generate "Ada is 36 years old." --json-schema person.json
      diptych generate "When did it happen?" --regex "19[0-9]{2}|20[0-9]{2}"
      diptych generate "The sea is" --ttft 1.5 --tpot 0.1 --slo-class interactive --tenant alice --report
    """
    from diptych.client import Client

    prompt = sys.stdin.read() if text == "-" else text
    request = given(sampling) | {"apply_chat_template": not raw, "timeout_s": timeout_s}
    with Client(endpoint, access=access) as client:
        answer = show(client.generate(prompt, **request), is_quiet=as_json)
        if as_json:
            print_json(answer_json(answer))
        elif report:
            print_report(console(stderr=True), answer, client.status().view)
        _say_if_cut(answer, sampling)


def _say_if_cut(answer: "Answer", sampling: dict[str, Any]) -> None:
    """Where an answer should match a grammar."""
    from diptych.events import FinishReason

    asked = next((name for name in ("json_schema", "regex") if sampling.get(name) is not None), None)
    if asked is not None and answer.completed.finish is FinishReason.LENGTH:
        say(f"The answer was cut before it matched --{asked.replace('_', '-')}: raise --max-tokens.")


def show(events: Iterable[Any], *, is_quiet: bool = False) -> "Answer":
    """Print the text as it arrives. Ctrl-C closes the stream, which cancels the request."""
    from cluster.events import Queued
    from cluster.frontend.text import TextDelta
    from diptych.client import answer_of

    received: list[TextEvent] = []
    for event in events:
        received.append(event)
        if isinstance(event, Queued):
            say(queued_line(event))
        elif isinstance(event, TextDelta) and not is_quiet:
            click.echo(event.text, nl=False)
    if not is_quiet:
        click.echo()
    return answer_of(received)


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
    from diptych.client import Client

    start = [("system", system)] if system else []
    messages = list(start)
    keyboard = sys.stdin.isatty()
    if keyboard:
        import readline  # noqa: F401  (adds a history to input())
    with Client(endpoint, access=access) as client:
        client.status()  # raises before the first message is typed
        while (line := _read(keyboard)) not in (None, "/quit"):
            if line == "/reset":
                messages = list(start)
            elif line:
                _turn(client, messages, line, given(sampling), keyboard)


def _turn(
    client: "Client", messages: list[tuple[str, str]], line: str, sampling: dict[str, Any], keyboard: bool
) -> None:
    """Send one message and print its answer. With a keyboard, a failed turn is dropped and the chat continues."""
    conversation = [*messages, ("user", line)]
    try:
        answer = show(client.chat(conversation, **sampling))
        _say_if_cut(answer, sampling)
    except KeyboardInterrupt:
        say(" (stopped)")
    except DiptychError as error:
        if not keyboard:
            raise
        say(f"Error: {error}")
    else:
        messages[:] = [*conversation, ("assistant", answer.text)] if answer.text else messages


def _read(keyboard: bool) -> str | None:
    """The next line; None at the end."""
    try:
        return input("> " if keyboard else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None
