"""`diptych bench` against a real cluster's gRPC and HTTP servers and a fake server, and the options that it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from cluster.cli import main
from cluster.offline.load.endpoint import Target
from cluster.offline.load.trials import external, kind_of
from tests.offline.load.conftest import Served
from tests.offline.load.made_up import MadeUp

CLOSED = ("--concurrency", "3", "--workload", "burst:count=9,lengths=12/6")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", *arguments])


def document_of(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def refused(result: Result) -> str:
    assert result.exit_code != 0 and result.stdout == "", result.output
    lines = result.stderr.strip().splitlines()
    assert lines[-1].startswith("Error: ") and "Traceback" not in result.stderr
    return lines[-1]


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_grpc_and_http_return_every_token(served: Served, protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "of another server")
    address = f"grpc://{served.grpc}" if protocol == "grpc" else f"{served.http}/v1"
    document = document_of(run("--endpoint", address, *CLOSED, "--seed", "4", "--json"))
    (system,) = document["systems"]
    figures = system["figures"]
    assert (figures["requests"], figures["finished"], figures["tbt_s"]["count"]) == (9, 9, 9 * 5)
    assert figures["workload"].endswith("3 in flight") and figures["reasons"] == []
    assert not any("chunks" in note for note in figures["notes"])
    about = document["about"]
    assert about["seeds"] == [4] and about["cpu"] and about["versions"]["diptych"] and about["command"]
    assert figures["gpus"] == (2 if protocol == "grpc" else 1)


def test_a_folder_has_json_pictures_and_one_page(served: Served, tmp_path: Path) -> None:
    workload = "poisson:rate=50,count=8,lengths=10-20/4"
    result = run(
        "--endpoint", served.http, "--workload", workload, "--rates", "40,80", "--ttft", "5", "-o", str(tmp_path)
    )
    assert result.exit_code == 0, result.output
    assert "GPU" not in result.output and "ranks" in result.stdout, "what is measured here has none"
    document = json.loads((tmp_path / "figures.json").read_text())
    assert document["about"]["endpoints"][0].startswith(served.model)
    page = (tmp_path / "report.html").read_text()
    assert "Command: " in page and "Seeds: 0" in page and "data:image/png;base64," in page
    assert {"latency.png", "requests.png"} <= {path.name for path in tmp_path.iterdir()}
    assert len(list(tmp_path.glob("*.trace.json"))) == 1, "whatever a model is called, its trace lies in the folder"


@pytest.mark.full
def test_goodput_of_a_server_with_a_known_capacity(server: MadeUp) -> None:
    """Five at once, each for 50 ms: 100 a second. Above, a queue grows and SLOs of 100 ms break."""
    workload = "constant:rate=30,count=30,lengths=8/5"
    document = document_of(
        run(
            *("--endpoint", server.url, "--model", "made-up", "--workload", workload, "--ttft", "0.1"),
            *("--goodput", "--tolerance", "0.5", "--seeds", "1", "--json"),
        )
    )
    (found,) = document["systems"][0]["goodput"]
    assert 10.0 < found["rate"] <= 130.0
    assert found["search"]["tolerance"] == 0.5 and found["target"] == 0.9
    probed = {probe["rate"]: probe["attained"]["both"] for probe in found["probes"]}
    assert len(probed) >= 3 and min(probed.values()) < 0.9 <= max(probed.values())


def test_failures_are_counted_by_reason_and_shown(server: MadeUp) -> None:
    server.fails_after = len(server.bodies) + 3  # the trial and two more
    try:
        result = run("--endpoint", server.url, "--model", "made-up", *CLOSED)
    finally:
        server.fails_after = None
    assert result.exit_code == 0, result.output
    assert "7 requests did not finish: HTTP 429" in result.stderr and "7/0/0" in result.stdout


@pytest.mark.full
def test_configurations_run_in_turn_and_are_compared(tiny: str, server: MadeUp, tmp_path: Path) -> None:
    engine = {"block_size": 8, "kv_blocks": 96, "max_batch_tokens": 64, "max_running": 8, "threads": 1}
    spec = {
        "name": "tiny-split",
        "model": tiny,
        "pools": [{"name": role, "role": role, "engine": engine} for role in ("prefill", "decode")],
        "transfer": {"backends": ["tcp"]},
        "gateway": {"grpc_port": 0},
    }
    path = tmp_path / "split.yaml"
    path.write_text(yaml.safe_dump(spec))
    workload = "poisson:rate=30,count=6,lengths=2x8/4+20/4"
    command = (
        *("--compare", str(path), f"colocated={server.url}", "--model", "made-up", "--runtime", "local"),
        *("--workload", workload, "--seeds", "1", "--seed", "5", "--ttft", "1", "-o", str(tmp_path / "out")),
    )
    document = document_of(run(*command, "--rates", "30,60", "--json"))
    runs = [(each["configuration"], each["load"], each["seed"]) for each in document["runs"]]
    there = server.url.removeprefix("http://")
    loads = ("30 requests/s", "60 requests/s")
    assert runs == [("tiny-split", load, 5) for load in loads] + [(there, load, 5) for load in loads]
    assert all(each["figures"]["finished"] == 6 for each in document["runs"])
    assert len(document["summary"]) == 2 and all(there in line for line in document["summary"])
    names = {each.name for each in (tmp_path / "out").iterdir()}
    file = tmp_path / "out" / "runs.jsonl"
    assert recorded(file) == figures_by_run(document["runs"])
    assert {"figures.json", "report.html", "verdicts.png", "compared.png", "tiny-split.trace.json"} <= names
    assert "best colocated" in (tmp_path / "out" / "report.html").read_text()

    before = recorded(file)
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-1]) + lines[-1][:40])  # interrupted while it wrote a line
    again = document_of(run(*command, "--rates", "30,60", "--resume", "--json"))
    after = recorded(file)
    assert after.keys() == before.keys() and figures_by_run(again["runs"]) == after
    kept = [key for key in before if before[key] == after[key]]
    assert len(kept) == len(before) - 1, "only the run without a whole line ran again"
    bodies = len(server.bodies)
    document_of(run(*command, "--rates", "30,60", "--resume", "--json"))
    assert recorded(file) == after and len(server.bodies) == bodies, "nothing is left to run"
    assert "has runs of" in refused(run(*command, "--rates", "30", "--tpot", "1", "--resume"))


def recorded(file: Path) -> dict[tuple[str, str, int], object]:
    return figures_by_run([json.loads(line) for line in file.read_text().splitlines()])


def figures_by_run(runs: list[dict[str, Any]]) -> dict[tuple[str, str, int], object]:
    return {(each["configuration"], each["load"], each["seed"]): each["figures"] for each in runs}


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ("http://here:8000", None, "colocated or split"),
        ("colocated=http://here:8000", True, "; colocated"),
        ("split=http://here:8000", False, "; split"),
    ],
)
def test_only_a_marked_endpoint_has_a_known_kind(given: str, kind: bool | None, words: str) -> None:
    assert kind_of(given) == (kind, "http://here:8000")
    made = external(given, Target("http://here:8000"))
    assert (made.name, made.is_colocated) == ("here:8000", kind) and made.description.endswith(words)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "Missing option '--workload'"),
        (("a.yaml", *CLOSED), "a.yaml is a configuration; add --compare"),
        (("--compare", "a.yaml", *CLOSED), "--compare needs two or more configurations"),
        (("--compare", "a.yaml", "a.yaml", *CLOSED), "each once"),
        (("--compare", "a.yaml", "b.yaml", "--goodput", "--workload", "x"), "--compare excludes --goodput"),
        (("--compare", "a.yaml", "b.yaml", "--resume", *CLOSED), "--resume needs --compare and --out"),
        (("--workload", "x", "--concurrency", "4", "--rates", "1"), "--concurrency has no rate"),
        (("--workload", "x", "--rates", "1,x"), "numbers with commas"),
        (("--workload", "poisson:rate=1,count=2,lengths=8/8", "--goodput"), "--goodput needs an SLO"),
        (("--workload", "burst:count=2,lengths=8/8", "--goodput", "--ttft", "1"), "has none; say rate=1"),
        (
            ("--workload", "poisson:rate=1,count=2,lengths=8/8", "--attainment", "1.5"),
            "1.5 is not in the range",
        ),
        ((*CLOSED, "--seeds", "3"), "--seeds goes with --goodput or --compare"),
        ((*CLOSED, "--endpoint", "ftp://there"), "ftp:// is no endpoint"),
        ((*CLOSED, "--tokenizer", "."), "is gRPC; --tokenizer goes with http:// endpoints"),
        ((*CLOSED, "--endpoint", "127.0.0.1:1"), "nothing answers at 127.0.0.1:1"),
        (
            (*CLOSED, "--endpoint", "http://127.0.0.1:1"),
            "nothing answers at http://127.0.0.1:1/v1 (Connection",
        ),
        (("--compare", "none.yaml", "other.yaml", *CLOSED), "none.yaml: cannot be read (No such file"),
    ],
)
def test_invalid_options_are_one_clear_line(arguments: tuple[str, ...], says: str) -> None:
    assert says in refused(run(*arguments))


def test_a_wrong_model_is_one_clear_line(served: Served) -> None:
    assert "model 'nope' is not served here" in refused(run("--endpoint", served.http, "--model", "nope", *CLOSED))
    assert "choose one of them with --model" in refused(run("--endpoint", served.grpc, "--model", "nope", *CLOSED))


def test_a_cluster_that_does_not_start_is_one_clear_line(tmp_path: Path) -> None:
    for name in ("one", "two"):
        spec = {"name": name, "model": str(tmp_path / "missing"), "pools": [{"name": "mixed", "role": "mixed"}]}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(spec))
    files = [str(tmp_path / f"{name}.yaml") for name in ("one", "two")]
    says = refused(run("--compare", *files, "--runtime", "local", *CLOSED))
    assert "one does not start" in says and "missing" in says


def test_a_key_never_shows() -> None:
    from cluster.offline.load.machine import command_line

    shown = command_line(["x/diptych", "bench", "--api-key", "secret", "--api-key=secret", "--count", "a b"])
    assert shown == "diptych bench --api-key '***' '--api-key=***' --count 'a b'"
