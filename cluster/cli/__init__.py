"""The `diptych` command. Each command imports heavy modules only when it runs, so `--help` is instant.

Prints errors as one line with a nonzero exit code; --debug shows the traceback.
"""

from typing import Any

import click

from cluster.cli.admin import drain, flip, scale
from cluster.cli.autoscaler import autoscaler
from cluster.cli.bench import bench
from cluster.cli.demo import demo
from cluster.cli.doctor import doctor
from cluster.cli.extras import missing_extra
from cluster.cli.gateway import gateway
from cluster.cli.generate import chat, generate
from cluster.cli.leave import leave
from cluster.cli.models import models
from cluster.cli.plan import plan
from cluster.cli.profile import profile
from cluster.cli.serve import serve
from cluster.cli.simulate import simulate
from cluster.cli.status import status
from cluster.cli.top import top
from cluster.cli.trace import trace

OURS = ("diptych", "cluster", "workers", "kvtransfer")


GROUPS: dict[str, tuple[click.Command, ...]] = {
    "Serve": (demo, serve, gateway, models, doctor),
    "Talk": (generate, chat),
    "Observe": (status, top, trace),
    "Operate": (scale, flip, drain, leave, autoscaler),
    "Plan": (plan, simulate),
    "Measure": (bench, profile),
}


class DiptychGroup(click.Group):
    """Lists commands in groups and turns exceptions into one-line errors."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.commands))
        for title, commands in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{each.name:{width}}", each.get_short_help_str(110)) for each in commands])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except KeyboardInterrupt:
            raise click.Abort from None
        except Exception as error:
            if ctx.params.get("debug"):
                raise
            line = missing_extra(error, ctx.invoked_subcommand or "") or one_line(error)
            raise click.ClickException(line) from None


def one_line(error: BaseException) -> str:
    """The error as one line. Includes the type unless the error is Diptych's or the operating system's."""
    if isinstance(error, OSError) and error.strerror:
        named = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        return " ".join(named.split())
    text = " ".join(str(error).split()) or type(error).__name__
    if type(error).__module__.partition(".")[0] in OURS:
        return text
    return f"unexpected {type(error).__name__}: {text} (run again with --debug for the traceback)"


@click.group(cls=DiptychGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.version_option(package_name="diptych", prog_name="diptych")
def main(debug: bool) -> None:
    """Serve large language models with prefill and decode on separate workers.

    Start with `diptych demo`: two workers on this machine, a real model, and the route of one request. Then
    `diptych serve smollm2-135m` and, in another terminal, `diptych chat`.
    """


for commands in GROUPS.values():
    for command in commands:
        main.add_command(command)
