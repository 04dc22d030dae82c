"""Options of a request: sampling, length, SLO and tenant."""

from collections.abc import Callable
from typing import IO, Any

import click

from cluster.cli.groups import grouped

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
