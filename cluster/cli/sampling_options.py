"""Options of a request: sampling, length, number of answers, SLO and tenant."""

from collections.abc import Callable
from typing import IO, Any

import click

from cluster.cli.groups import grouped

sampling = grouped("Sampling")
length = grouped("Length and stopping")
answers = grouped("Several answers, log probabilities")
scheduling = grouped("Model, SLO and tenant")


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


def _text(ctx: click.Context, option: click.Parameter, file: IO[str] | None) -> str | None:
    return None if file is None else file.read()


SAMPLING = (
    length("--max-tokens", type=int, help="Maximum number of tokens to generate."),
    length("--min-tokens", type=int, help="Do not stop before this many tokens."),
    length("--stop", multiple=True, help="Stop before this text; repeatable."),
    length("--stop-token-id", "stop_token_ids", type=int, multiple=True, help="Stop at this token; repeatable."),
    length("--include-stop", "include_stop_in_output", is_flag=True, default=None, help="Keep the stop text."),
    length("--ignore-eos", is_flag=True, default=None, help="Continue after the model's end-of-sequence token."),
    sampling("--temperature", type=float, help="0 is greedy: always the most likely token."),
    sampling("--top-k", type=int, help="Sample from the k most likely tokens."),
    sampling("--top-p", type=float, help="Sample from the most likely tokens whose probabilities sum to this."),
    sampling("--min-p", type=float, help="Sample from tokens at least this share as likely as the most likely one."),
    sampling("--repetition-penalty", type=float, help="Above 1: tokens of the prompt and answer become less likely."),
    sampling("--presence-penalty", type=float, help="Subtracted from the logit of each token in the answer."),
    sampling("--frequency-penalty", type=float, help="Subtracted once for each time the token is in the answer."),
    sampling(
        "--logit-bias",
        multiple=True,
        metavar="ID=BIAS",
        callback=_biases,
        help="Added to this token's logit (-100 bans it, 100 forces it); repeatable.",
    ),
    sampling("--seed", type=int, help="The same seed gives the same answer."),
    sampling("--json-schema", type=click.File(), callback=_text, metavar="FILE", help="Answer in JSON of this schema."),
    sampling("--regex", help="Answer with a match of this regular expression."),
    sampling(
        "--special-tokens", "skip_special_tokens", flag_value=False, default=None, help="Show special tokens as text."
    ),
)
ANSWERS = (
    answers("--n", type=int, help="Number of answers, each sampled with its own seed."),
    answers("--best-of", type=int, help="Generate this many answers and return the n most likely."),
    answers("--logprobs", type=int, metavar="K", help="Log probabilities of the answer and of the K best tokens."),
    answers("--prompt-logprobs", type=int, metavar="K", help="The same for the tokens of the prompt."),
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


def answer_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(ANSWERS):
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
