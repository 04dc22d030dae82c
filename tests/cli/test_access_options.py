"""Commands connect to gateways with TLS and keys by options or the environment; errors are one line."""

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cluster.cli import main
from cluster.frontend.servers import Servers
from tests.frontend.grpc.fake import FakeDispatcher, gateway_context
from tests.frontend.http.guarded import KEY, Files
from tests.frontend.tokenizers import ByteTokenizer

ENVIRONMENT = (
    "DIPTYCH_API_KEY",
    "DIPTYCH_CA",
    "DIPTYCH_CERT",
    "DIPTYCH_CERT_KEY",
    "DIPTYCH_KEY_FILE",
    "OPENAI_API_KEY",
)


@dataclass(frozen=True)
class Served:
    """Both servers, mutual TLS and a key."""

    files: Files
    grpc: str
    http: str

    @property
    def options(self) -> tuple[str, ...]:
        folder = self.files.folder
        own = "--cert", f"{folder}/client.pem", "--cert-key", f"{folder}/client-key.pem"
        return "--ca", str(self.files.servers.ca), *own, "--key-file", f"{folder}/keys"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    files = Files.made(tmp_path_factory.mktemp("guarded"))
    files.clients.sign("client")
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def opened() -> tuple[Servers, str]:
        context = gateway_context(FakeDispatcher(), http_port=0, **files.mutual, **files.keys)
        servers = Servers(context, ByteTokenizer)
        return servers, await servers.open()

    servers, endpoint = asyncio.run_coroutine_threadsafe(opened(), loop).result(20)
    yield Served(files, f"grpcs://{endpoint}", servers.http_url)
    asyncio.run_coroutine_threadsafe(servers.close(0.0), loop).result(20)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ENVIRONMENT, "DIPTYCH_ENDPOINT", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, arguments, input=stdin)


def refused(result: Result) -> str:
    assert result.exit_code != 0 and result.stdout == "", result.output
    lines = result.stderr.strip().splitlines()
    assert lines[-1].startswith("Error: ") and "Traceback" not in result.stderr
    return lines[-1]


def test_every_client_command_authenticates(served: Served, tmp_path: Path) -> None:
    at = "--endpoint", served.grpc, *served.options
    assert run("generate", "--raw", "abc", "--max-tokens", "3", *at).stdout == "abc\n"
    assert run("chat", *at, "--max-tokens", "3", stdin="hello\n").stdout == "abc\n"
    assert json.loads(run("status", *at, "--wait", "20", "--json").stdout)["gateway"]["name"] == "gateway-0"
    assert "diptych_" in run("status", *at, "--metrics").stdout
    assert run("top", *at, "--interval", "0.1").exit_code == 0
    assert run("trace", *at, "-o", str(tmp_path / "trace.json")).exit_code == 0
    for change in (("flip", "decode-0", "prefill"), ("drain", "decode-0"), ("scale", "decode", "2")):
        assert "this gateway has no controller" in refused(run(*change, *at))
    error = refused(run("profile", *at, "-o", str(tmp_path / "profile.json")))
    assert "(INTERNAL)" in error, "the fake cannot be measured, and was asked"


@pytest.mark.parametrize("server", ["grpc", "http"])
def test_bench_authenticates_on_both_servers(served: Served, server: str) -> None:
    address = served.grpc if server == "grpc" else served.http
    load = "--concurrency", "2", "--workload", "burst:count=4,lengths=8/4", "--json"
    result = run("bench", "--endpoint", address, *served.options, *load)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["systems"][0]["figures"]["finished"] == 4
    assert document["about"]["endpoints"][0].partition(" at ")[2].startswith(address)
    assert KEY not in result.output


def test_access_options_may_come_from_the_environment(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = served.files.folder
    values = served.grpc, str(served.files.servers.ca), f"{folder}/client.pem", f"{folder}/client-key.pem", KEY
    names = "ENDPOINT", "CA", "CERT", "CERT_KEY", "API_KEY"
    for name, value in zip(names, values, strict=True):
        monkeypatch.setenv(f"DIPTYCH_{name}", value)
    assert run("generate", "--raw", "abc", "--max-tokens", "3").stdout == "abc\n"
    load = "--concurrency", "1", "--workload", "burst:count=1,lengths=8/4"
    assert run("bench", "--endpoint", served.http, *load).exit_code == 0


def test_what_is_wrong_is_one_line(served: Served, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("another-key-that-is-long-enough\n")
    (tmp_path / "empty").write_text("# nobody\n")
    at, (ca, cert, key) = ("--endpoint", served.grpc), (served.options[:2], served.options[2:6], served.options[6:])
    wrong = {
        "requires an API key; send it as Authorization: Bearer KEY (UNAUTHENTICATED)": (*at, *ca, *cert),
        "does not know this API key": (*at, *ca, *cert, "--key-file", str(tmp_path / "keys")),
        "closed the connection: it may require TLS": (*at, *ca, *key),
        "is not trusted": (*at, *cert, *key),
        "--cert and --cert-key come together": (*at, *ca, *cert[:2]),
        "is without TLS": ("--endpoint", served.grpc.removeprefix("grpcs://"), *ca),
        "'--ca': File 'nowhere' does not exist": (*at, "--ca", "nowhere"),
        "has no key; write one per line": (*at, *ca, *cert, "--key-file", str(tmp_path / "empty")),
    }
    for words, options in wrong.items():
        assert words in refused(run("generate", "--raw", "abc", *options)), words


def test_bench_explains_how_to_give_a_key(served: Served) -> None:
    load = "--concurrency", "1", "--workload", "burst:count=1,lengths=8/4"
    error = refused(run("bench", "--endpoint", served.http, *served.options[:6], *load))
    assert "give a key by --key-file, DIPTYCH_API_KEY or OPENAI_API_KEY" in error
    stranger = ("--ca", str(served.files.clients.ca), *served.options[2:])
    assert "certificate is not trusted" in refused(run("bench", "--endpoint", served.http, *stranger, *load))
    plain = served.http.replace("https", "http")
    assert "is without TLS" in refused(run("bench", "--endpoint", plain, *served.options, *load))


WRONG = {
    "a certificate without its key": (("--tls-cert-file", "server.pem"), "come together; give tls_key_file too"),
    "authorities without a certificate": (("--tls-client-ca-file", "clients-ca.pem"), "give tls_cert_file and"),
    "a missing file": (
        ("--tls-cert-file", "none.pem", "--tls-key-file", "server-key.pem"),
        "none.pem cannot be read (No such file or directory)",
    ),
    "a key of another": (
        ("--tls-cert-file", "server.pem", "--tls-key-file", "client-key.pem"),
        "is not the key of the certificate",
    ),
    "no keys": (("--api-keys-file", "empty"), "has no key; write one per line"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_serve_checks_files_before_it_starts_anything(
    served: Served, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(served.files.folder)
    Path("empty").write_text("\n")
    options, words = WRONG[wrong]
    assert words in refused(run("serve", "--port", "0", "--runtime", "local", *options))


def test_serve_passes_absolute_paths_and_keeps_symbolic_links(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes renews a mounted Secret by turning a link."""
    monkeypatch.chdir(served.files.folder)
    if not Path("now").exists():
        os.symlink("keys", "now")
    seen = []
    module = import_module("cluster.cli.serve")
    monkeypatch.setattr(module, "check_pools", lambda *_: None)
    monkeypatch.setattr(module, "_serve", lambda spec, *_, **options: seen.append(spec))
    monkeypatch.setattr(module, "run", lambda work: None)
    files = "--tls-cert-file", "server.pem", "--tls-key-file", "./server-key.pem", "--api-keys-file", "now"
    result = run("serve", "--port", "0", *files)
    assert result.exit_code == 0, result.output
    folder, gateway = served.files.folder, seen[0].gateway
    paths = gateway.tls_cert_file, gateway.tls_key_file, gateway.api_keys_file
    assert paths == (f"{folder}/server.pem", f"{folder}/server-key.pem", f"{folder}/now")


def test_no_key_is_an_argument() -> None:
    for name in ("generate", "chat", "status", "top", "trace", "flip", "drain", "scale", "profile"):
        assert "--key-file" in run(name, "--help").output and "--api-key" not in run(name, "--help").output
