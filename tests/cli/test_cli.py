"""The command line, against a real server in another thread: output, exit codes, and one clear line on bad input."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cluster.cli import COMMANDS as LISTED
from cluster.cli import main
from cluster.cli.screen import pools_table
from diptych.view import ClusterView, PoolView, Role
from tests.cli.commands import command_of
from tests.model.tiny import write_tiny_llama

COMMANDS = ["demo", "serve", "generate", "chat", "status", "models", "models list", "models pull", "doctor"]
SPEC = """
model: {folder}
pools:
  - name: prefill
    role: prefill
  - name: decode
    role: decode
gateway:
  grpc_port: {port}
"""


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, arguments, input=stdin)


def refused(result: Result) -> str:
    """The one line that a failed command wrote."""
    assert result.exit_code != 0 and result.stdout == "", result.output
    lines = result.stderr.strip().splitlines()
    assert lines[-1].startswith("Error: ") and "Traceback" not in result.stderr
    return lines[-1]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str) -> None:
    result = run(*command.split(), "--help")
    assert result.exit_code == 0
    assert "Example:" in result.output and "diptych " in result.output


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, (_, text) in LISTED.items()])
def test_the_list_of_commands_shows_their_short_help(name: str, text: str) -> None:
    assert command_of(name).get_short_help_str(110) == text


HEAVY = {
    *("torch", "ray", "grpc", "transformers", "tokenizers", "numpy", "gguf", "nixl_cu12", "opentelemetry"),
    *("fastapi", "uvicorn", "pydantic", "rich", "yaml", "jinja2", "psutil", "msgspec", "asyncio"),
}


@pytest.mark.parametrize(
    "code",
    ["import cluster", "from cluster.cli import main; main(['--help'], standalone_mode=False)"],
    ids=["import cluster", "diptych --help"],
)
def test_nothing_heavy_is_loaded(code: str) -> None:
    """`-X importtime` names every module that was imported, even one that was removed again."""
    light = [sys.executable, "-X", "importtime", "-c", code]
    done = subprocess.run(light, capture_output=True, text=True, check=True)
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "cluster" in loaded
    assert loaded.isdisjoint(HEAVY)


def test_generate_streams_the_text(endpoint: str) -> None:
    result = run("generate", "--raw", "the sea is salty", "--endpoint", endpoint)
    assert (result.exit_code, result.stdout) == (0, "SEA IS SALTY\n")


def test_generate_answers_a_text_as_a_users_message(endpoint: str) -> None:
    result = run("generate", "sea", "--endpoint", endpoint)
    assert (result.exit_code, result.stdout) == (0, "<USER>SEA\n\n")


def test_generate_reads_standard_input_and_stops(endpoint: str) -> None:
    result = run("generate", "--raw", "-", "--endpoint", endpoint, "--stop", "SAL", stdin="the sea is salty")
    assert (result.exit_code, result.stdout) == (0, "SEA IS \n")


def test_generate_report_shows_route_and_ledger(endpoint: str) -> None:
    result = run("generate", "--raw", "the sea is salty", "--endpoint", endpoint, "--report")
    assert result.exit_code == 0
    for words in ("prefill-0 (pid 4711", "memory, in-process copy", "3 digests", "prefill_compute", "sum"):
        assert words in result.stderr


def test_generate_json_is_one_object_whose_ledger_adds_up(endpoint: str) -> None:
    result = run("generate", "--raw", "the sea is salty", "--endpoint", endpoint, "--json", "--max-tokens", "5")
    document = json.loads(result.stdout)
    assert (document["text"], document["finish"], document["completion_tokens"]) == ("SEA I", "length", 5)
    assert sum(document["ledger_s"]["first"].values()) == pytest.approx(document["ttft_s"], abs=1e-12)
    assert document["transfers"][0]["digests_verified"] == 3


def test_a_schema_is_read_from_its_file(endpoint: str, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    sent = ("generate", "--raw", "hi", "--endpoint", endpoint, "--json-schema", str(tmp_path / "schema.json"))
    stopped = run(*sent, "--stop", "I")
    assert (stopped.exit_code, stopped.stderr) == (0, "")
    assert "cut before it matched --json-schema: raise --max-tokens" in run(*sent, "--max-tokens", "1").stderr
    assert "has one grammar" in refused(run(*sent, "--regex", "a+"))


def test_chat_answers_each_piped_line_and_remembers_the_conversation(endpoint: str) -> None:
    result = run("chat", "--endpoint", endpoint, stdin="first\n\nsecond one\n/reset\n/quit\nnever\n")
    assert (result.exit_code, result.stdout) == (0, "<USER>FIRST\n\n>SECOND ONE\n\n")


def test_status_shows_workers(endpoint: str) -> None:
    result = run("status", "--endpoint", endpoint, "--wait", "5")
    assert result.exit_code == 0
    assert "prefill-0" in result.stdout and "200/256" in result.stdout
    assert "TP x PP" in result.stdout and "2 x 2" in result.stdout and "25%" in result.stdout


def test_status_json(endpoint: str) -> None:
    document = json.loads(run("status", "--endpoint", endpoint, "--json").stdout)
    assert [worker["role"] for worker in document["workers"]] == ["prefill", "decode"]
    assert document["workers"][1]["parallel"] == {"tensor": 2, "pipeline": 2, "placement": "pack"}
    assert document["workers"][1]["stats"]["bubble_share"] == 0.25
    assert document["links"][0]["transport"] == "memory"
    assert document["gateway"]["max_requests"] == 256


def test_bad_sampling_is_one_line(endpoint: str) -> None:
    line = refused(run("generate", "--raw", "hi", "--endpoint", endpoint, "--temperature", "-3"))
    assert "sampling.temperature: is -3.0; it must be between 0 (greedy) and 100" in line


@pytest.mark.parametrize("command", [("generate", "hi"), ("status",)])
def test_a_refused_endpoint_is_one_line(command: tuple[str, ...]) -> None:
    assert "nothing answers at 127.0.0.1:1 (" in refused(run(*command, "--endpoint", "127.0.0.1:1"))


def test_chat_from_a_pipe_fails_with_one_line() -> None:
    assert "nothing answers at" in refused(run("chat", "--endpoint", "127.0.0.1:1", stdin="hi\n"))


def test_chat_reports_a_dead_server_before_the_first_message() -> None:
    assert "nothing answers at" in refused(run("chat", "--endpoint", "127.0.0.1:1", stdin=""))


def test_a_misspelled_key_has_its_path_and_a_suggestion(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(SPEC.format(folder="x", port=0).replace("grpc_port", "grcp_port"))
    line = refused(run("serve", "-f", str(file)))
    assert "gateway.grcp_port: unknown key; did you mean 'grpc_port'?" in line


def test_a_missing_file_is_one_line() -> None:
    assert "no-such.yaml: cannot be read" in refused(run("serve", "-f", "no-such.yaml"))


def test_a_port_in_use_is_reported_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        file = tmp_path / "cluster.yaml"
        file.write_text(SPEC.format(folder=tmp_path, port=port))
        line = refused(run("serve", "-f", str(file)))
    assert f"cannot listen on 127.0.0.1:{port} (Address already in use); choose another port" in line


def test_an_address_of_another_machine_is_reported_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    file = tmp_path / "cluster.yaml"
    file.write_text(SPEC.format(folder=tmp_path, port=15999).replace("gateway:", "gateway:\n  host: 203.0.113.1"))
    line = refused(run("serve", "-f", str(file)))
    assert "203.0.113.1:15999 (Cannot assign requested address); set gateway.host to an address of this mach" in line


def test_an_unknown_model_is_one_line() -> None:
    assert "no model 'no-such-model'" in refused(run("models", "inspect", "no-such-model"))


def test_a_model_is_inspected_as_text(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "tiny")
    result = run("models", "inspect", str(folder))
    assert result.exit_code == 0 and not any(letter in result.stdout for letter in "{}()[]"), result.output
    assert "LlamaForCausalLM" in result.stdout and "of KV" in result.stdout and "float32" in result.stdout
    assert json.loads(run("models", "inspect", str(folder), "--json").stdout)["config"]["layers"]


def test_a_pool_of_a_fixed_size_has_no_bounds_to_contradict_it() -> None:
    fixed, elastic = PoolView("decode", Role.DECODE, 2, 1, 1), PoolView("prefill", Role.PREFILL, 2, 1, 4)
    view = ClusterView(1, "llm", None, (), pools=(fixed, elastic))
    cells = [list(column.cells)[:2] for column in pools_table(view).columns][-3:]
    assert cells == [["2", "2"], ["-", "1"], ["-", "4"]]


def test_models_list_json() -> None:
    document = json.loads(run("models", "list", "--json").stdout)
    assert any(each["name"] == "smollm2-135m" for each in document)


def test_debug_shows_the_traceback() -> None:
    result = run("--debug", "serve", "-f", "no-such.yaml")
    assert result.exit_code != 0 and result.exc_info is not None
    assert type(result.exception).__name__ == "SpecError"


@pytest.mark.parametrize(
    "command",
    [
        ("profile", "--endpoint", "127.0.0.1:1", "-o", "/proc/profile.json"),
        ("plan", "--model", "opt-13b", "--hardware", "a100-80gb", "-o", "/proc/plan.yaml"),
        ("simulate", "--model", "opt-13b", "-o", "/proc/out/simulation"),
        ("bench", "--endpoint", "127.0.0.1:1", "-o", "/proc/out"),
    ],
    ids=lambda command: command[0],
)
def test_an_output_that_cannot_be_written_is_refused_first(command: tuple[str, ...]) -> None:
    assert f"{command[-1]} cannot be written: No such file or directory" in refused(run(*command))


def test_what_a_check_of_an_output_finds_stays_as_it_is(tmp_path: Path) -> None:
    written = tmp_path / "profile.json"
    written.write_text("earlier")
    for output in written, tmp_path / "new.json":
        assert "127.0.0.1:1" in refused(run("profile", "--endpoint", "127.0.0.1:1", "-o", str(output)))
    assert [each.name for each in tmp_path.iterdir()] == [written.name] and written.read_text() == "earlier"


@pytest.mark.parametrize("command", ["warm", "drop"])
def test_a_file_without_prompts_is_refused(command: str) -> None:
    assert refused(run("cache", command, "-", stdin="\n")).endswith(
        "the file of prompts has none; write one in each line"
    )
