"""`make bench-outside`: guidellm and aiperf, unmodified, against our HTTP server; their counts and times beside ours.

Each has an environment of its own, which is created on first use; vLLM's `bench serve` is included if
`python -m benchmarks peer-install` has created vLLM's environment. Every tool sends the same number of requests of the
same lengths with the same concurrency, one tool after another. The server's counts are read from /metrics.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from benchmarks.environments import AIPERF, GUIDELLM, VLLM, PeerEnvironment
from benchmarks.hosted import refuse_foreign_ray
from cluster.offline.load import machine
from cluster.offline.load.endpoint import Target
from cluster.offline.load.processes import Child
from cluster.offline.load.sender import LoadOptions, nothing
from cluster.offline.load.trials import open_endpoint
from cluster.offline.scoring.figures import figures
from cluster.offline.workload.changes import with_distinct_prompts
from cluster.offline.workload.load import load_workload
from workers.request import SLO

START_S, TOOL_S = 300.0, 900.0
READY = "ready: http://"


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """The load that each tool sends. `tokenizer`: a folder."""

    url: str
    model: str
    tokenizer: Path
    requests: int
    concurrency: int
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Counts:
    """Completed requests, and the tokens of their usage."""

    requests: int
    prompt_tokens: int
    output_tokens: int

    def since(self, before: "Counts") -> "Counts":
        return Counts(
            self.requests - before.requests,
            self.prompt_tokens - before.prompt_tokens,
            self.output_tokens - before.output_tokens,
        )


@dataclass(frozen=True, slots=True)
class ToolResult:
    """One tool's report and the server's counts during its run.

    `retokenized`: output tokens as the tool counts them in the text, if it does.
    """

    tool: str
    server: Counts
    requests: int
    prompt_tokens: int
    output_tokens: int
    ttft_mean_ms: float
    ttft_p50_ms: float
    itl_mean_ms: float
    itl_p50_ms: float
    seconds: float
    retokenized: int | None = None

    @property
    def agrees(self) -> bool:
        """Whether tool and server count the same tokens per request.

        Totals may differ: a tool may leave requests out of its report that end while it stops.
        """
        pairs = (self.prompt_tokens, self.server.prompt_tokens), (self.output_tokens, self.server.output_tokens)
        return self.requests > 0 and all(
            theirs * self.server.requests == counted * self.requests for theirs, counted in pairs
        )


Read = dict[str, Any]


def guidellm(spec: LoadSpec, folder: Path) -> Read:
    """Chats, so the model's template adds to its prompts. Raises `subprocess.CalledProcessError`."""
    data = f"kind=synthetic_text,prompt_tokens={spec.prompt_tokens},output_tokens={spec.output_tokens}"
    command = [
        *(str(GUIDELLM.path / "bin" / "guidellm"), "run"),
        *("--backend", f"kind=openai_http,target={spec.url},model={spec.model}"),
        *("--profile", f"kind=concurrent,streams={spec.concurrency}"),
        *("--constraint", f"kind=max_requests,count={spec.requests}"),
        *("--tokenizer", f"kind=hf_auto,model={spec.tokenizer}", "--data", data),
    ]
    _run(command, folder, HF_HUB_OFFLINE="1")
    return guidellm_read(json.loads((folder / "benchmarks.json").read_text()))


def guidellm_read(report: Any) -> Read:
    """Its ITL: every gap between tokens."""
    stats = report["benchmarks"][0]["metrics"]

    def of(name: str) -> Any:
        return stats[name]["successful"]

    tokens = {name: round(of(f"{name}_token_count")["mean"] * of(f"{name}_token_count")["count"]) for name in _KINDS}
    ttft, itl = of("time_to_first_token_ms"), of("inter_token_latency_ms")
    return {
        "requests": stats["request_totals"]["successful"],
        **{f"{name}_tokens": count for name, count in tokens.items()},
        **{"ttft_mean_ms": ttft["mean"], "ttft_p50_ms": ttft["median"]},
        **{"itl_mean_ms": itl["mean"], "itl_p50_ms": itl["median"]},
    }


_KINDS = ("prompt", "output")


def aiperf(spec: LoadSpec, folder: Path) -> Read:
    """Completions. Raises `subprocess.CalledProcessError`."""
    command = [
        *(str(AIPERF.path / "bin" / "aiperf"), "profile", "--model", spec.model, "--url", spec.url),
        *("--endpoint-type", "completions", "--streaming", "--concurrency", str(spec.concurrency)),
        *("--request-count", str(spec.requests), "--isl", str(spec.prompt_tokens)),
        *(
            "--osl",
            str(spec.output_tokens),
            "--extra-inputs",
            "ignore_eos:true",
            "--tokenizer",
            str(spec.tokenizer),
        ),
        *("--ui", "simple", "--no-gpu-telemetry", "--no-server-metrics", "--artifact-dir", str(folder)),
    ]
    _run(command, folder)
    return aiperf_read(json.loads((folder / "profile_export_aiperf.json").read_text()))


def aiperf_read(report: Any) -> Read:
    """Its ITL: each request's mean gap."""
    ttft, itl = report["time_to_first_token"], report["inter_token_latency"]
    return {
        "requests": round(report["request_count"]["avg"]),
        "prompt_tokens": round(report["total_usage_prompt_tokens"]["avg"]),
        "output_tokens": round(report["total_usage_completion_tokens"]["avg"]),
        **{
            "ttft_mean_ms": ttft["avg"],
            "ttft_p50_ms": ttft["p50"],
            "itl_mean_ms": itl["avg"],
            "itl_p50_ms": itl["p50"],
        },
        "retokenized": round(report["total_osl"]["avg"]),
    }


VLLM_BENCH = """
from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""  # what its command runs; the CPU package's command does not start


def vllm(spec: LoadSpec, folder: Path) -> Read:
    """Completions. Raises `subprocess.CalledProcessError`."""
    command = [
        *(str(VLLM.python), "-c", VLLM_BENCH, "--backend", "openai", "--base-url", spec.url),
        *(
            "--model",
            spec.model,
            "--tokenizer",
            str(spec.tokenizer),
            "--dataset-name",
            "random",
            "--ignore-eos",
        ),
        *("--random-input-len", str(spec.prompt_tokens), "--random-output-len", str(spec.output_tokens)),
        *("--num-prompts", str(spec.requests), "--max-concurrency", str(spec.concurrency)),
        *("--ready-check-timeout-sec", "0", "--save-result", "--result-dir", str(folder)),
        *("--result-filename", "vllm.json"),
    ]
    _run(command, folder, HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    return vllm_read(json.loads((folder / "vllm.json").read_text()))


def vllm_read(report: Any) -> Read:
    """Its ITL: every gap between tokens. Its counts of prompts are its tokenizer's, those of answers our usage's."""
    return {
        "requests": report["completed"],
        "prompt_tokens": report["total_input_tokens"],
        "output_tokens": report["total_output_tokens"],
        **{"ttft_mean_ms": report["mean_ttft_ms"], "ttft_p50_ms": report["median_ttft_ms"]},
        **{"itl_mean_ms": report["mean_itl_ms"], "itl_p50_ms": report["median_itl_ms"]},
    }


def ours(spec: LoadSpec, folder: Path) -> Read:
    """What `diptych bench` does over HTTP. Its ITL: every gap between tokens."""

    async def drive() -> Read:
        lengths = f"{spec.prompt_tokens}/{spec.output_tokens}"
        workload = with_distinct_prompts(load_workload(f"burst:count={spec.requests},lengths={lengths}", seed=0), 1)
        async with open_endpoint(Target(spec.url, spec.model)) as endpoint:
            before = server_counts(spec.url)
            run = await endpoint.drive(
                workload, LoadOptions(endpoint.vocab_size, concurrency=spec.concurrency), nothing
            )
        stats = figures(run, SLO())
        assert stats.ttft_s is not None and stats.tbt_s is not None, f"no request was answered: {stats.reasons}"
        return {
            "requests": stats.finished,
            "prompt_tokens": sum(each.prompt_tokens for each in run.served),
            "output_tokens": sum(len(each.token_s) for each in run.served),
            **{"ttft_mean_ms": 1e3 * stats.ttft_s.mean, "ttft_p50_ms": 1e3 * stats.ttft_s.p50},
            **{"itl_mean_ms": 1e3 * stats.tbt_s.mean, "itl_p50_ms": 1e3 * stats.tbt_s.p50},
            "before": before,
        }

    return asyncio.run(drive())


TOOLS: dict[str, Callable[[LoadSpec, Path], Read]] = {
    "guidellm": guidellm,
    "aiperf": aiperf,
    "vllm bench serve": vllm,
    "diptych bench": ours,
}


def _run(command: list[str], folder: Path, **environment: str) -> None:
    """Run with the output in a file. Raises `ClickException` with the end of the output when the tool fails."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HF_HUB_OFFLINE")}
    log = folder / "output.log"
    with log.open("w") as out:
        done = subprocess.run(command, cwd=folder, env=env | environment, stdout=out, stderr=out, timeout=TOOL_S)
    if done.returncode:
        last = " | ".join(log.read_text(errors="replace").strip().splitlines()[-6:])
        raise click.ClickException(f"{Path(command[0]).name} ended with {done.returncode}: {last}")


def server_counts(url: str) -> Counts:
    """Counts of all requests that this server has completed."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(f"{url}/metrics", timeout=10.0) as answer:
        return counts_of(answer.read().decode())


def counts_of(metrics: str) -> Counts:
    """Counts from Prometheus text."""

    def total(name: str, label: str = "") -> int:
        lines = (line for line in metrics.splitlines() if line.startswith(f"{name}{{") and label in line)
        return int(sum(float(line.split()[-1]) for line in lines))

    requests = total("diptych_requests_total", 'outcome="completed"')
    return Counts(requests, total("diptych_prompt_tokens_total"), total("diptych_generated_tokens_total"))


def measured(tool: str, spec: LoadSpec, folder: Path) -> ToolResult:
    folder.mkdir(parents=True)
    before, begun_s = server_counts(spec.url), time.monotonic()
    read = TOOLS[tool](spec, folder)
    before = read.pop("before", before)
    after = server_counts(spec.url)
    return ToolResult(
        tool=tool,
        server=after.since(before),
        seconds=time.monotonic() - begun_s,
        **read,
    )


def table(found: list[ToolResult]) -> str:
    """As Markdown."""
    counts = "prompt tokens, tool / server | output tokens, tool / server | counted in its text"
    head = f"| | requests, tool / server | {counts} | TTFT mean / p50 ms | ITL mean / p50 ms |"
    rows = [
        f"| {each.tool} | {each.requests} / {each.server.requests} | "
        f"{each.prompt_tokens} / {each.server.prompt_tokens} | {each.output_tokens} / {each.server.output_tokens} | "
        f"{each.retokenized or '-'} | "
        f"{each.ttft_mean_ms:.0f} / {each.ttft_p50_ms:.0f} | {each.itl_mean_ms:.1f} / {each.itl_p50_ms:.1f} |"
        for each in found
    ]
    return "\n".join((head, "|---|---|---|---|---|---|---|", *rows))


def write_tokenizer(model: str, folder: Path) -> None:
    """Write the tokenizer in the format of transformers."""
    from transformers import PreTrainedTokenizerFast

    from workers.model.store import resolve

    PreTrainedTokenizerFast.from_pretrained(str(resolve(model).path), local_files_only=True).save_pretrained(
        str(folder)
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("-f", "--file", "path", default="examples/laptop.yaml", show_default=True, help="The cluster file.")
@click.option("--model", default="smollm2-135m", show_default=True)
@click.option("--requests", type=click.IntRange(1), default=24, show_default=True, help="Of each tool.")
@click.option("--concurrency", type=click.IntRange(1), default=4, show_default=True)
@click.option("--prompt-tokens", type=click.IntRange(1), default=50, show_default=True)
@click.option("--output-tokens", type=click.IntRange(2), default=16, show_default=True)
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="JSON and the tools' own reports go here."
)
def main(
    path: str, model: str, requests: int, concurrency: int, prompt_tokens: int, output_tokens: int, out: Path | None
) -> None:
    """Run guidellm and aiperf, unmodified, against Diptych; compare their token counts with the server's."""
    for each in (GUIDELLM, AIPERF):
        _ensure_installed(each)
    tools = [tool for tool in TOOLS if tool != "vllm bench serve" or not VLLM.missing()]
    refuse_foreign_ray(dict(os.environ))
    command = [sys.executable, "-m", "cluster.cli", "serve", model, "-f", path, "--port", "0"]
    with tempfile.TemporaryDirectory(prefix="diptych-outside-") as temporary:
        folder = out.resolve() / datetime.now(UTC).strftime("%Y%m%dT%H%M%S") if out else Path(temporary)
        write_tokenizer(model, folder / "tokenizer")
        with Child([*command, "--http-port", "0"], {"PYTHONUNBUFFERED": "1"}) as child:
            line = child.wait_line(READY, START_S).text
            url = "http://" + line.partition(READY)[2].removesuffix("/v1")
            spec = LoadSpec(url, model, folder / "tokenizer", requests, concurrency, prompt_tokens, output_tokens)
            found = []
            for tool in tools:
                click.echo(f"{tool}: {requests} requests, {concurrency} at a time", err=True)
                found.append(measured(tool, spec, folder / tool.replace(" ", "-")))
        load = "/".join(f"{each:.1f}" for each in machine.load())
        here = f"{machine.cpu_name()}, {len(machine.allowed_cores())} cores; load after {load}; {_versions()}"
        if out is not None:
            document: Read = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": here}
            document |= {"found": [asdict(each) for each in found]}
            (folder / "outside.json").write_text(json.dumps(document, indent=2))
            click.echo(f"written to {folder}", err=True)
    click.echo(f"{here}\n\n{table(found)}")
    if wrong := [each.tool for each in found if not each.agrees or each.server.requests != requests]:
        raise click.ClickException(f"the server counted other tokens or requests than {', '.join(wrong)}")


def _ensure_installed(environment: PeerEnvironment) -> None:
    if environment.missing():
        environment.install(lambda line: click.echo(line, err=True))


def _versions() -> str:
    return ", ".join(each.versions() for each in (GUIDELLM, AIPERF, VLLM) if not each.missing())


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.outside")
