"""`make clients`: client libraries, compliance suites and lm-eval, unmodified, against our HTTP server.

Each group has an environment of its own, which is created on first use. The server runs SmolLM2 with a chat template
that knows tools, in Hermes' format: too small to choose a tool well, so the cases require one.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from benchmarks.clients.snippets import placed, snippets
from benchmarks.environments import CANITOOLCALL, COMPLY, LLAMA_INDEX, LM_EVAL, SDKS, PeerEnvironment
from benchmarks.hosted import refuse_foreign_ray
from cluster.offline.load import machine
from cluster.offline.load.processes import Child
from workers.model.store import resolve

ROOT = Path(__file__).resolve().parents[2]
START_S, CLIENT_S = 300.0, 300.0
READY = "ready: http://"
TEMPLATE = """{% if tools %}<|im_start|>system
You may call functions: {{ tools | tojson }}
Answer <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LIBRARIES: Mapping[str, PeerEnvironment] = {
    **dict.fromkeys(
        ("openai", "langchain", "langchain_anthropic", "litellm", "instructor", "pydantic_ai", "openai_agents"), SDKS
    ),
    "llama_index": LLAMA_INDEX,
}
# llm-comply's formats. It asks a text model about an image, and expects an error for a request without a model, which
# a server of one model answers, like vLLM.
SUITES = ("openai-chat", "open-responses", "anthropic")
EXPECTED = {
    "openai-chat": {"chat-image-input", "chat-error-handling"},
    "open-responses": {"image-input", "error-handling"},
    "anthropic": {"anth-image-input"},
}
PROBE = (str(CANITOOLCALL.path / "bin" / "canitoolcall"), "probe", "--concurrency", "2", "--timeout", "120")
# Scenarios in which the model should choose a tool; this one is too small.
CHOICES = {"single-call", "parallel-calls", "nested-args", "unicode-args", "empty-args", "reasoning-then-call"}
REPLAY = (str(CANITOOLCALL.path / "bin" / "canitoolcall"), "run", "--engine", "benchmarks.clients.parsers:Diptych")
# Answers that canitoolcall reads otherwise. Of those that max_tokens has cut, named "truncated", it expects no call,
# while a stream has already sent the beginning of one.
READ_OTHERWISE = {
    "deepseek/vllm-v3-malformed-missing-brace",  # so does a call whose JSON is not complete
    "qwen3-hermes/vllm-invalid-json-missing-brace",
    "gemma4/sglang-text-around-call",  # white space after a call
    "glm/glm47-missing-last-close-arg-value",  # </tool_call> in a value is text
    "gpt-oss/llamacpp-builtin-python-recipient",  # a message to a tool that was not given is content
    "gpt-oss/harmony-marker-in-reasoning",  # ends the reasoning
    "mistral/vllm-v11-think-text",  # another template's reasoning
    "mistral/v13think-stop-at-open-marker",  # an answer that ends with [TOOL_CALLS]
    "qwen3-xml/llamacpp-q35-call-inside-think",  # reasoning without an end
}
LONGEST_ROW = 12  # cases whose names are shown
CAPITALS = (("France", " Paris"), ("Italy", " Rome"), ("England", " London"))
CHOICE = """task: capital_choice
output_type: multiple_choice
doc_to_text: "The capital of {{country}} is"
doc_to_choice: [" Paris", " Rome", " London"]
doc_to_target: capital
target_delimiter: ""
metric_list: [{metric: acc}]
"""
GENERATE = """task: capital_generate
output_type: generate_until
doc_to_text: "The capital of {{country}} is"
doc_to_target: capital
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match}]
"""
DATA = "test_split: test\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {path}}}}}\n"


@dataclass(frozen=True, slots=True)
class CaseResult:
    """`error`: empty if it passed. `expected`: it cannot pass here."""

    client: str
    case: str
    error: str
    expected: bool = False


@contextmanager
def served(path: str, folder: Path) -> Iterator[tuple[str, str]]:
    """The URL of a server, and the name of its model."""
    model = folder / "model"
    model.mkdir()
    source = resolve("smollm2-135m").path
    for each in source.iterdir():
        if each.name not in ("chat_template.jinja", "generation_config.json"):
            (model / each.name).symlink_to(each)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    generation = json.loads((source / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps(generation | {"temperature": 0.0}))  # the same each time
    command = [sys.executable, "-m", "cluster.cli", "serve", str(model), "-f", path, "--port", "0", "--http-port", "0"]
    with Child(command, {"PYTHONUNBUFFERED": "1"}) as child:
        yield "http://" + child.wait_line(READY, START_S).text.partition(READY)[2], str(model)


def libraries(url: str, model: str) -> Iterator[CaseResult]:
    cases = str(Path(__file__).with_name("cases.py"))
    for name, environment in LIBRARIES.items():
        lines = _run([str(environment.python), cases, url, model, name]).splitlines()
        found = [CaseResult(**json.loads(line)) for line in lines if line.startswith('{"client"')]
        yield from found or [CaseResult(name, "import", "printed no case")]


def documented(url: str, model: str) -> Iterator[CaseResult]:
    """The snippets of docs/http.md."""
    for name, source in snippets("http.md").items():
        python = LLAMA_INDEX.python if name == "llama_index" else SDKS.python
        command = [str(python), "-c", placed(source, url.removesuffix("/v1"), model)]
        done = subprocess.run(command, env=_environment(), capture_output=True, text=True, timeout=CLIENT_S)
        yield CaseResult("docs/http.md", name, done.stderr[-600:] if done.returncode or not done.stdout else "")


def suites(url: str, model: str) -> Iterator[CaseResult]:
    for suite in SUITES:
        command = [str(COMPLY.path / "bin" / "llm-comply"), "-u", url, "-k", "none", "-m", model, "--format", suite]
        results = json.loads(_run([*command, "--json"]))["results"]
        for each in results:
            if each["status"] != "skipped":
                error = "" if each["status"] == "passed" else "; ".join(each["errors"])
                yield CaseResult(f"llm-comply {suite}", each["id"], error, each["id"] in EXPECTED[suite])


def probe(url: str, model: str, folder: Path) -> Iterator[CaseResult]:
    """Scenarios with tools: whole, streamed, and both compared."""
    report = folder / "probe.json"
    _run([*PROBE, "--base-url", url, "--model", model, "--json", str(report)])
    for each in json.loads(report.read_text())["outcomes"]:
        kind = "equal" if each["check"] == "stream_equals_nonstream" else "stream" if each["stream"] else "whole"
        error = "" if each["status"] == "pass" else f"{each['status']}: {each['detail']}"
        expected = each["status"] == "fail" and kind != "equal" and each["scenario_id"] in CHOICES
        yield CaseResult("canitoolcall probe", f"{each['scenario_id']} {kind}", error, expected)


def parsers(folder: Path) -> Iterator[CaseResult]:
    """Recorded answers of model families, cut in many ways, read by our parsers."""
    out = folder / "parsers"
    _run([*REPLAY, "--env", f"PYTHONPATH={ROOT}", "--out", str(out)], PYTHONPATH=str(ROOT))
    for each in [case for path in out.glob("*.json") for case in json.loads(path.read_text())["cases"]]:
        name, status = each["fixture_id"], each["status"]
        if status != "unsupported":
            details = "; ".join(str(check["detail"]) for check in each["checks"] if check["status"] == status)
            error = "" if status in ("pass", "soft_pass") else f"{status}: {details or each.get('harness_error')}"
            yield CaseResult(
                f"canitoolcall {each['family']}", name, error, "truncated" in name or name in READ_OTHERWISE
            )


def lm_eval(url: str, model: str, folder: Path) -> Iterator[CaseResult]:
    """Its own tokenizer is our server's, by /tokenize."""
    data = folder / "capitals.json"
    data.write_text("\n".join(json.dumps({"country": country, "capital": name}) for country, name in CAPITALS))
    for name, task in (("choice", CHOICE), ("generate", GENERATE)):
        (folder / f"{name}.yaml").write_text(task + DATA.format(path=data))
    for kind, path, options, more, tasks in (
        ("local-completions", "completions", "tokenizer_backend=remote", (), "capital_choice,capital_generate"),
        ("local-chat-completions", "chat/completions", "seed=1", ("--apply_chat_template",), "capital_generate"),
    ):
        out = folder / kind
        arguments = f"model={model},base_url={url}/{path},{options}"
        command = [str(LM_EVAL.path / "bin" / "lm_eval"), "run", "--model", kind, "--model_args", arguments, *more]
        _run([*command, "--tasks", tasks, "--include_path", str(folder), "--output_path", str(out)])
        reports = [json.loads(each.read_text()) for each in out.rglob("*.json")]
        done: dict[str, Any] = reports[0]["results"] if reports else {}
        for task in tasks.split(","):
            yield CaseResult(f"lm-eval {kind}", task, "" if task in done else "no result")


def _run(command: list[str], **environment: str) -> str:
    """Its standard output."""
    env = _environment() | environment
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=CLIENT_S).stdout


def _environment() -> dict[str, str]:
    """A client looks for nothing outside of this machine."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return env | {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_API_KEY": "none"}


def table(found: list[CaseResult]) -> str:
    """As Markdown, a row for each client."""
    rows = ["| client | passed | cases | failed |", "|---|---|---|---|"]
    for client in dict.fromkeys(each.client for each in found):
        cases = [each for each in found if each.client == client]
        failed = [f"{each.case}{' (expected)' if each.expected else ''}" for each in cases if each.error]
        passed = [each.case for each in cases if not each.error]
        names = ", ".join(passed) if len(passed) <= LONGEST_ROW else "-"
        rows.append(f"| {client} | {len(cases) - len(failed)} of {len(cases)} | {names} | {', '.join(failed) or '-'} |")
    return "\n".join(rows)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("-f", "--file", "path", default="examples/laptop.yaml", show_default=True, help="The cluster file.")
def main(path: str) -> None:
    """Run clients and compliance suites, unmodified, against Diptych. Fails if a case fails that can pass."""
    environments = (SDKS, LLAMA_INDEX, COMPLY, CANITOOLCALL, LM_EVAL)
    for environment in environments:
        if environment.missing():
            environment.install(lambda line: click.echo(line, err=True))
    refuse_foreign_ray(dict(os.environ))
    found: list[CaseResult] = []
    with tempfile.TemporaryDirectory(prefix="diptych-clients-") as temporary:
        folder = Path(temporary)
        with served(path, folder) as (url, model):
            for results in (
                libraries(url, model),
                documented(url, model),
                suites(url, model),
                probe(url, model, folder),
                parsers(folder),
                lm_eval(url, model, folder),
            ):
                for each in results:
                    found.append(each)
                    click.echo(f"{each.client}: {each.case}: {each.error or 'passed'}", err=True)
    versions = ", ".join(environment.versions() for environment in environments)
    click.echo(f"{datetime.now(UTC):%Y-%m-%d}, {machine.cpu_name()}, {len(machine.allowed_cores())} cores; {versions}")
    click.echo(f"\n{table(found)}")
    if wrong := [f"{each.client}: {each.case}" for each in found if each.error and not each.expected]:
        raise click.ClickException("failed: " + "; ".join(wrong))


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.clients")
