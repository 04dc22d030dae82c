"""`diptych autoscaler` against an API server that asks for tokens and refuses, and a gateway that comes and goes."""

import asyncio
import http.client
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.cli.options import _access
from cluster.control.autoscaler import loop
from cluster.control.autoscaler.kubernetes import ApiServer, ScaleError, api_server
from cluster.control.autoscaler.loop import Autoscaler, probed
from cluster.control.autoscaler.pods import Pods, ScaledPool
from cluster.frontend.servers import Servers
from cluster.runtime.local import LocalRuntime
from cluster.serving import serve
from cluster.spec import ClusterSpec
from diptych.access import Access
from diptych.client import AsyncClient
from kvtransfer.open import SharedMemory
from tests.cluster.local import FAST, split_spec
from tests.frontend.grpc.fake import FakeDispatcher, gateway_context
from tests.frontend.http.certificates import Authority
from tests.frontend.http.guarded import KEY, Files
from tests.frontend.tokenizers import ByteTokenizer
from tests.helm.api_server import BUILT_IN, Store
from tests.helm.chart import ROOT, of_kind, rendered, values
from tests.helm.service_accounts import Accounts, PodsHandler, door_for_pods
from workers.build import build_worker

pytestmark = pytest.mark.full

DECODE, PREFILL = ScaledPool("decode", 1, 1, 1, 3), ScaledPool("prefill", 1, 1, 1, 2)
ACCOUNT = "release-diptych-autoscaler"
STATEFUL = next(each for each in BUILT_IN if each.name == "StatefulSet")
WAIT_S = 30.0


class Faulty(PodsHandler):
    """`fault`: of which method, and a code to answer with, or what else may go wrong."""

    fault: tuple[str, int | str] | None
    asked: list[str]
    over: threading.Event

    def answer(self) -> None:
        self.asked.append(self.command)
        method, fault = self.fault or ("", None)
        if method != self.command:
            return super().answer()
        if fault == "hang":
            self.over.wait(WAIT_S)
        elif fault == "cut":
            self.connection.shutdown(socket.SHUT_RDWR)
        elif fault == "garbage":
            self._reply(200, "text/html", b"<html>\n<b>no Scale</b></html>")
        elif fault == "words":
            self._reply(500, "text/plain", b"etcd is\naway")
        elif isinstance(fault, int):
            self._send(fault, {"kind": "Status", "code": fault, "message": f"refused\nwith {fault}"})

    do_GET = do_PATCH = answer


@dataclass
class Kubernetes:
    """The release's StatefulSets and Roles, and what a pod is given to get at them."""

    store: Store
    accounts: Accounts
    server: ApiServer
    handler: type[Faulty]

    def replicas(self, pool: str) -> int:
        count: int = self.store.get(STATEFUL, "llm", f"release-diptych-{pool}")["spec"]["replicas"]
        return count

    def mount(self, **changed: str) -> None:
        """A new token; or other files."""
        files = self.accounts.files("llm", ACCOUNT) | {name.replace("_", "."): text for name, text in changed.items()}
        self.server.account.mkdir(exist_ok=True)
        for name, text in files.items():
            (self.server.account / name).write_text(text)


@pytest.fixture
def kubernetes(tmp_path: Path) -> Iterator[Kubernetes]:
    store, authority = Store(BUILT_IN), Authority(tmp_path, "kubernetes")
    objects = rendered(values("native-autoscaled"))
    for each in [found for kind in ("StatefulSet", "Role", "RoleBinding") for found in of_kind(objects, kind)]:
        kind = next(kind for kind in BUILT_IN if kind.name == each["kind"])
        store.write(kind, "llm", each["metadata"]["name"], each, how="apply", dry=False)
    handler: Any = type("Faults", (Faulty,), {"fault": None, "asked": [], "over": threading.Event()})
    listening = socket.create_server(("127.0.0.1", 0))
    address = f"https://127.0.0.1:{listening.getsockname()[1]}"
    with door_for_pods(store, authority, authority.sign("server"), listening, handler) as accounts:
        found = Kubernetes(store, accounts, ApiServer(address, tmp_path / "account", call_s=5.0), handler)
        found.mount()
        yield found
        handler.over.set()


def autoscaler(kubernetes: Kubernetes, endpoint: str = "127.0.0.1:1", window_s: float = 0.0) -> Autoscaler:
    pods = Pods((DECODE, PREFILL), window_s)
    return Autoscaler(pods, kubernetes.server, endpoint, Access, "release-diptych", period_s=0.01)


def elastic() -> ClusterSpec:
    spec = split_spec()
    pools = [replace(pool, min_replicas=1, max_replicas=3 - index) for index, pool in enumerate(reversed(spec.pools))]
    return replace(spec, pools=tuple(pools))


@asynccontextmanager
async def gateway(port: int = 0) -> AsyncIterator[tuple[AsyncClient, str]]:
    """A real controller and gateway with workers whose steps are simulated; pools as above."""
    shared = SharedMemory()
    runtime = LocalRuntime(lambda order: build_worker(order.config, heartbeat_s=0.05, shared=shared, cost=FAST))
    spec = elastic()
    spec = replace(spec, gateway=replace(spec.gateway, grpc_port=port))
    serving = await serve(spec, runtime=runtime, make_server=lambda context: Servers(context, ByteTokenizer))
    try:
        async with AsyncClient(serving.endpoint) as client:
            yield client, serving.endpoint
    finally:
        await serving.close()


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not is_so():
            await asyncio.sleep(0.01)


async def settled(client: AsyncClient, wanted: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while len([each for each in (await client.status()).view.workers if each.pool == "decode"]) != wanted:
            await asyncio.sleep(0.01)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """By the autoscaler."""
    return [each.getMessage() for each in caplog.records if each.name == loop.__name__]


async def test_pods_follow_a_pool_that_is_scaled_by_hand(
    kubernetes: Kubernetes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with gateway() as (client, endpoint):
        subject = autoscaler(kubernetes, endpoint)
        running = asyncio.ensure_future(subject.run())
        await client.scale("decode", 3)
        await until(lambda: kubernetes.replicas("decode") == 3)
        await settled(client, 3)
        await client.scale("decode", 1)
        await until(lambda: " from 3 to 1 pods" in said(caplog)[-1])
        running.cancel()
    lines = said(caplog)
    assert lines[0].startswith(f"target numbers of workers from the gateway at {endpoint}: decode ")
    assert "scaling release-diptych-decode from 1 to 3 pods: target is 3 workers" in lines
    assert "decode from 3 to 1 pods: the pool has had no more than 1 workers for" in lines[-1]
    assert (kubernetes.replicas("decode"), kubernetes.replicas("prefill")) == (1, 1)
    assert subject.trouble == ""


async def test_a_gateway_that_goes_takes_no_pod_along_and_is_found_again(kubernetes: Kubernetes) -> None:
    async with gateway() as (client, endpoint):
        subject = autoscaler(kubernetes, endpoint)
        await client.scale("decode", 2)
        assert await subject.round() == ""
        assert kubernetes.replicas("decode") == 2
    for _ in range(3):
        assert await subject.round() == "", "it is no trouble of Kubernetes"
    assert kubernetes.replicas("decode") == 2
    async with gateway(int(endpoint.rpartition(":")[2])):
        running = asyncio.ensure_future(subject.run())
        await until(lambda: kubernetes.replicas("decode") == 1)  # another cluster, which begins with one
        running.cancel()


async def test_without_a_gateway_there_is_room_to_begin(
    kubernetes: Kubernetes, caplog: pytest.LogCaptureFixture
) -> None:
    for pool in ("decode", "prefill"):
        name, none = f"release-diptych-{pool}", {"spec": {"replicas": 0}}
        kubernetes.store.write(STATEFUL, "llm", name, none | {"metadata": {"name": name}}, how="merge", dry=False)
    subject = autoscaler(kubernetes)
    for _ in range(3):
        assert await subject.round() == ""
    assert (kubernetes.replicas("decode"), kubernetes.replicas("prefill")) == (1, 1)
    received = [each.getMessage() for each in caplog.records if "no gateway answers" in each.getMessage()]
    assert len(received) == 1, "once, not in every round"


FAULTS: dict[int | str, str] = {
    401: "401 refused with 401",
    403: "403 refused with 403",
    404: "404 refused with 404",
    409: "409 refused with 409",
    429: "429 refused with 429",
    503: "503 refused with 503",
    "words": "500 etcd is away",
    "cut": "Server disconnected",
    "garbage": "the answer is no Scale: <html> <b>no Scale</b></html>",
    "hang": "the API server did not answer in time",
}


@pytest.mark.parametrize("method", ["GET", "PATCH"])
@pytest.mark.parametrize("fault", FAULTS)
async def test_what_the_api_server_does_wrong_is_one_line_and_over_when_it_is_over(
    kubernetes: Kubernetes, method: str, fault: int | str, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateway() as (client, endpoint):
        await client.scale("decode", 2)
        kubernetes.handler.fault = method, fault
        patient = kubernetes.server
        kubernetes.server = replace(patient, call_s=0.3) if fault == "hang" else patient
        subject = autoscaler(kubernetes, endpoint)
        running = asyncio.ensure_future(subject.run())
        await until(lambda: bool(subject.trouble))
        assert FAULTS[fault] in str(subject.trouble) and f"{method} the scale of release-diptych-" in str(
            subject.trouble
        )
        assert kubernetes.replicas("decode") == 1
        kubernetes.handler.fault = None
        await until(lambda: subject.trouble == "")
        running.cancel()
        assert kubernetes.replicas("decode") == 2
    warned = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert any(FAULTS[fault] in each for each in warned) and all("\n" not in each for each in warned)


async def test_tries_come_later_each_time(kubernetes: Kubernetes, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    starts_decoding = asyncio.sleep

    async def sleep(delay_s: float) -> None:
        slept.append(delay_s)
        kubernetes.handler.fault = ("GET", 503) if len(slept) < 16 else None
        if len(slept) > 17:
            await starts_decoding(WAIT_S)
        await starts_decoding(0)

    kubernetes.handler.fault = "GET", 503
    subject = autoscaler(kubernetes)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    running = asyncio.ensure_future(subject.run())
    while len(slept) < 18:
        await starts_decoding(0.01)
    running.cancel()
    assert slept[:4] == [0.02, 0.04, 0.08, 0.16] and max(slept) == pytest.approx(0.01 * 2**10)
    assert slept[16:] == [0.01, 0.01], "all is well again"


async def test_a_token_that_is_renewed_is_read_again(kubernetes: Kubernetes) -> None:
    subject = autoscaler(kubernetes)
    assert await subject.round() == ""
    kubernetes.accounts.tokens.clear()
    assert "401 Unauthorized" in await subject.round()
    kubernetes.mount()
    assert await subject.round() == ""
    (kubernetes.server.account / "token").unlink()
    assert "the service account cannot be read" in await subject.round()
    kubernetes.mount()
    assert await subject.round() == ""


async def test_a_guarded_gateway_is_asked_with_the_key_of_now(
    kubernetes: Kubernetes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder := tmp_path / "guarded").mkdir()
    files = Files.made(folder)
    pair, shown = files.clients.sign("client"), folder / "shown"
    doors = Servers(gateway_context(FakeDispatcher(), http_port=0, **files.mutual, **files.keys), ByteTokenizer)
    endpoint = f"grpcs://{await doors.open()}"
    try:
        subject = autoscaler(kubernetes, endpoint)
        subject._access = partial(_access, str(files.servers.ca), str(pair.cert), str(pair.key), str(shown))
        for key, has_targets in (("", False), ("of-somebody-else-entirely", False), (KEY, True)):
            shown.write_text(key)
            assert await subject.round() == "", "it is no trouble of Kubernetes"
            assert subject._has_targets is has_targets
    finally:
        await doors.close(0.0)
    (failed,) = [each for each in said(caplog) if each.startswith("no gateway answers")]
    assert "has no key; write one per line" in failed and KEY not in caplog.text


async def test_an_authority_that_signed_nothing_is_refused(kubernetes: Kubernetes, tmp_path: Path) -> None:
    subject = autoscaler(kubernetes)
    right = (kubernetes.server.account / "ca.crt").read_text()
    kubernetes.mount(ca_crt=Authority(tmp_path, "others").ca.read_text())
    assert "certificate verify failed" in await subject.round() and not kubernetes.handler.asked
    kubernetes.mount(ca_crt="no certificate")
    assert "the service account cannot be read" in await subject.round()
    kubernetes.mount(ca_crt=right)
    assert await subject.round() == ""


async def test_the_role_of_the_chart_allows_that_and_nothing_else(kubernetes: Kubernetes) -> None:
    async with kubernetes.server.session() as scales:
        assert await scales.write("release-diptych-decode", 2) == 2 == await scales.read("release-diptych-decode")
        assert await scales.write("release-diptych-decode", 0) == 0 == await scales.read("release-diptych-decode")
        for name in ("release-diptych-fixed", "release-diptych-head", "other"):
            forbidden = (
                f'403 statefulsets.apps "{name}" is forbidden: User "system:serviceaccount:llm:{ACCOUNT}" cannot patch'
            )
            with pytest.raises(ScaleError) as refused:
                await scales.write(name, 2)
            assert forbidden in str(refused.value)
        for path in ("statefulsets/release-diptych-decode", "statefulsets", "deployments/a/scale", "secrets/a"):
            async with scales._http.get(f"/apis/apps/v1/namespaces/llm/{path}") as answer:
                assert answer.status in (403, 404)
    assert kubernetes.replicas("fixed") == 2


async def test_one_pool_that_cannot_be_read_keeps_no_other_from_growing(kubernetes: Kubernetes) -> None:
    kubernetes.store.delete(STATEFUL, "llm", "release-diptych-prefill")
    async with gateway() as (client, endpoint):
        await client.scale("decode", 2)
        subject = autoscaler(kubernetes, endpoint)
        assert '404 statefulsets "release-diptych-prefill" not found' in await subject.round()
        assert kubernetes.replicas("decode") == 2


async def test_probes_tell_whether_rounds_end_and_what_was_wrong(
    kubernetes: Kubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = autoscaler(kubernetes)

    async def probe(port: int, path: str) -> tuple[int, str]:
        def ask() -> tuple[int, str]:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

        return await asyncio.to_thread(ask)

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with probed(subject, port):
        assert await probe(port, "/health") == (200, "ok\n")
        assert await probe(port, "/ready") == (503, "no round has ended yet\n")
        running = asyncio.ensure_future(subject.run())
        await until(lambda: subject.trouble is not None)
        assert await probe(port, "/ready") == (200, "ok\n")
        kubernetes.handler.fault = "GET", 403
        await until(lambda: bool(subject.trouble))
        status, words = await probe(port, "/ready")
        assert status == 503 and "403 refused with 403" in words
        assert await probe(port, "/health") == (200, "ok\n")
        running.cancel()
        subject.round_s -= 1000
        status, words = await probe(port, "/health")
        assert status == 503 and words.startswith("no round has ended for 100")


async def test_a_fault_of_our_own_ends_nothing(kubernetes: Kubernetes, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = autoscaler(kubernetes)
    monkeypatch.setattr(subject._pods, "changes", lambda *_: 1 / 0)
    running = asyncio.ensure_future(subject.run())
    await until(lambda: bool(subject.trouble))
    assert subject.trouble == "ZeroDivisionError: division by zero"
    monkeypatch.undo()
    await until(lambda: subject.trouble == "")
    running.cancel()


def test_where_the_api_server_is(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    assert api_server(tmp_path, {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}).address == "https://10.96.0.1:443"
    there = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    assert api_server(tmp_path, there).address == "https://[fd00::1]:6443"


# ---- the command -------------------------------------------------------------------------------------------------


def environment(**more: str) -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("KUBERNETES_", "DIPTYCH_"))}
    return inherited | {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}", "PYTHONUNBUFFERED": "1"} | more


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    pool = {"name": "decode", "role": "mixed", "replicas": {"min": 2, "max": 3}}
    path.write_text(yaml.safe_dump({"model": "m", "pools": [pool]}))
    return path


COMMAND = [sys.executable, "-m", "cluster.cli", "autoscaler", "--prefix", "release-diptych"]


async def test_the_command_runs_until_it_is_interrupted(kubernetes: Kubernetes, file: Path) -> None:
    host, _, port = kubernetes.server.address.removeprefix("https://").partition(":")
    there = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
    given = ["-f", str(file), "--service-account", str(kubernetes.server.account), "--endpoint", "127.0.0.1:1"]
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *given, env=environment(**there), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert process.stderr is not None
        lines = [await asyncio.wait_for(process.stderr.readline(), WAIT_S) for _ in range(2)]
        process.send_signal(signal.SIGTERM)
        out, err = await asyncio.wait_for(process.communicate(), WAIT_S)
    finally:
        if process.returncode is None:
            process.kill()
    assert (process.returncode, out, err) == (0, b"closed\n", b"")
    assert b"no gateway answers, so nothing shrinks: nothing answers at 127.0.0.1:1" in lines[0]
    assert b"release-diptych-decode from 1 to 2 pods: the cluster starts with them" in lines[1]
    assert kubernetes.replicas("decode") == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Missing option '-f' / '--file'"),
        (["-f", "FILE", "--cert", "FILE"], "--cert and --cert-key come together; give both"),
        (
            ["-f", str(ROOT / "examples" / "laptop.yaml")],
            "no pool may grow or shrink; write replicas: {min: 1, max: 4}",
        ),
        (["-f", "FILE"], "KUBERNETES_SERVICE_HOST is not set: this is not a Kubernetes pod"),
        (["-f", "FILE", "--window", "-1"], "is not in the range x>=0"),
    ],
)
def test_wrong_arguments_end_it_at_once(file: Path, arguments: list[str], words: str) -> None:
    given = [str(file) if each == "FILE" else each for each in arguments]
    done = subprocess.run([*COMMAND, *given], env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and words in done.stderr.splitlines()[-1], done.stderr


def test_a_pod_without_a_token_is_refused(file: Path, tmp_path: Path) -> None:
    there = environment(KUBERNETES_SERVICE_HOST="10.96.0.1")
    given = ["-f", str(file), "--service-account", str(tmp_path)]
    done = subprocess.run([*COMMAND, *given], env=there, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "has no token; the pod needs automountServiceAccountToken" in done.stderr
