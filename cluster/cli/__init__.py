"""The `diptych` command. A command is imported when it is used, and its heavy modules when it runs.

Prints errors as one line with a nonzero exit code; --debug shows the traceback.
"""

from importlib import import_module
from typing import Any

import click

OURS = ("diptych", "cluster", "workers", "kvtransfer")


# For each command: the module that has it, and its short help, so that the list of commands imports none of them.
GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "Serve": {
        "demo": ("demo", "Start a prefill and a decode worker here, answer one prompt, and show where it ran."),
        "serve": ("serve", "Serve MODEL, or the cluster of a YAML file, until Ctrl-C."),
        "gateway": ("gateway", "Add a gateway to a running cluster, until Ctrl-C."),
        "models": ("models", "List, download and inspect models."),
        "doctor": ("doctor", "Check torch, Ray and the transports for KV on this machine."),
    },
    "Talk": {
        "generate": ("generate", 'Answer TEXT as a user\'s message ("-" reads it from standard input).'),
        "chat": ("generate", "Chat with the model, which remembers the conversation."),
    },
    "Observe": {
        "status": ("status", "Show workers, their load, pools, links and SLO attainment."),
        "top": ("top", "Watch pools, queues, KV, transfers and SLO attainment until Ctrl-C."),
        "cache": ("cache", "Show cache tiers, pin prompts, and verify cache files."),
        "trace": ("trace", "Write a time window of a cluster as a trace for ui.perfetto.dev."),
    },
    "Operate": {
        "scale": ("admin", "Set the number of workers of a pool."),
        "flip": ("admin", "Change a worker's role."),
        "drain": ("admin", "Remove a worker: it takes no new work and stops when it is empty."),
        "adapter": ("admin", "Load and unload LoRA adapters."),
        "leave": ("leave", "Empty a Ray node before it goes."),
        "autoscaler": (
            "autoscaler",
            "Scale each pool's pods to its target number of workers; runs in a Kubernetes pod.",
        ),
    },
    "Plan": {
        "plan": (
            "plan",
            "Find the best cluster for a load: whether to disaggregate, pools, parallelism, replicas, chunk sizes.",
        ),
        "simulate": ("simulate", "Replay a workload through the shipped scheduling code in virtual time."),
    },
    "Measure": {
        "bench": ("bench", "Measure a running cluster or any OpenAI server, or compare configurations."),
        "profile": ("profile", "Measure the workers of an idle cluster and fit a cost model to each pool."),
    },
}
COMMANDS = {name: command for commands in GROUPS.values() for name, command in commands.items()}
# The extras and their libraries.
EXTRAS = {
    "simulate": ("aiohttp", "numpy", "xxhash", "jinja2", "psutil"),
    "pictures": ("matplotlib",),
    "serve": (
        *("torch", "ray", "grpc_reflection", "transformers", "tokenizers", "gguf", "safetensors"),
        *("huggingface_hub", "platformdirs", "prometheus_client"),
    ),
    "http": ("fastapi", "starlette", "uvicorn", "pydantic"),
}
EXTRA_OF = {library: extra for extra, libraries in EXTRAS.items() for library in libraries}
NEED_WORKERS = frozenset({"demo", "serve", "gateway", "leave", "models", "doctor"})  # need more than `simulate` has


def missing_extra(error: BaseException, command: str) -> str | None:
    """The error line for a missing library of an extra; None for other errors."""
    library = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    extra = "serve" if command in NEED_WORKERS and EXTRA_OF.get(library) == "simulate" else EXTRA_OF.get(library)
    if extra is None:
        return None
    return f"`diptych {command}` needs {library}, which is not installed: pip install 'diptych[{extra}]'"


class DiptychGroup(click.Group):
    """Lists commands in groups, imports a command when it is asked for, and turns exceptions into one-line errors."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _ = COMMANDS[cmd_name]
        command: click.Command = getattr(import_module(f"{__name__}.{module}"), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for title, commands in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:{width}}", text) for name, (_, text) in commands.items()])

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


@click.group(
    cls=DiptychGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True},
)
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.version_option(package_name="diptych", prog_name="diptych")
def main(debug: bool) -> None:
    """Serve large language models with prefill and decode on separate workers.

    Start with `diptych demo`: two workers on this machine, a real model, and the route of one request. Then
    `diptych serve smollm2-135m` and, in another terminal, `diptych chat`.
    """
