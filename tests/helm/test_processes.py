"""A release as real processes: installed by the real helm up to its first token, rolled under requests, asked by a job.

Its pods are containers in network namespaces (`pod`), and what Kubernetes does with them is played (`kubelet`).
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from cluster.frontend.servers import open_servers
from cluster.serving import serve
from cluster.spec_file import parse_spec
from diptych.client import AsyncClient
from tests.helm.api_server import api_server
from tests.helm.chart import CHART, ROOT, values
from tests.helm.kubelet import Kubelet, kubelet
from tests.helm.pod import Pod
from tests.helm.pod_network import Place, why_not
from tests.helm.programs import run
from tests.helm.test_lifecycle import Kubernetes, connected
from workers.errors import ModelError
from workers.model.store import resolve

SLOW = pytest.mark.skipif(not os.environ.get("DIPTYCH_PODS"), reason="takes minutes: make pods")
pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(900), SLOW]

MODEL, TOKENS = "smollm2-135m", 24
PROMPTS = ["The sea is", "Once upon a time there was", "A short list of fruits:", "The capital of France", "In 1969"]
NAME, ENDPOINT = "release-diptych", "release-diptych:50051"
WAIT_S = 240.0
POOLS = [
    {"name": "prefill", "role": "prefill", "replicas": 1, "resources": {"cpu": 1, "labels": {"pool": "prefill"}}},
    {"name": "decode", "role": "decode", "replicas": 2, "resources": {"cpu": 1, "labels": {"pool": "decode"}}},
]
# Two cores for all pods: who is slow is not dead.
OPTIONS = (
    *("-f", str(values("native")), "--set-json", f"cluster.pools={json.dumps(POOLS)}"),
    *("--set", "cluster.gateway.replicas=2,cluster.health.dead_after_s=20,gateway.drainSeconds=3"),
)


@dataclass
class Release:
    """An installed one. `exact`: the tokens of each prompt, as one worker alone computes them."""

    kubernetes: Kubernetes
    kubelet: Kubelet
    outside: Place
    exact: list[tuple[int, ...]]
    first_token_s: float = 0.0

    def helm(self, *args: object) -> str:
        begun_s = time.monotonic()
        config = ("--namespace", "llm", "--kubeconfig", self.kubernetes.config)
        code, out, err = run("helm", *args, *config, timeout_s=WAIT_S + 30)
        assert code == 0, f"{err}\n{self.told()}"
        assert self.kubelet.failure is None, self.kubelet.failure
        print(f"helm {args[0]}: {time.monotonic() - begun_s:.0f} s")
        return out

    def told(self) -> str:
        return self.kubelet.told()

    def ask(self, *command: str, pod: Pod | None = None) -> str:
        """Run it in this pod, or outside of all."""
        if pod is not None:
            said, code = self.kubelet.call(pod.run(*command, timeout_s=120))
        else:
            done = subprocess.run(
                self.outside.inside(*command), capture_output=True, text=True, timeout=120, env=environment()
            )
            said, code = done.stdout + done.stderr, done.returncode
        assert code == 0, f"{said}\n{self.told()}"
        return said


@dataclass
class Asked:
    """What came of requests that went on meanwhile."""

    answers: list[dict[str, object]] = field(default_factory=list)

    def check(self, exact: list[tuple[int, ...]], least: int) -> str:
        failed = [each for each in self.answers if "error" in each]
        assert not failed, failed
        wrong = [each for each in self.answers if tuple(each["tokens"]) != exact[each["prompt"]]]  # type: ignore
        assert not wrong, wrong
        assert len(self.answers) >= least, f"only {len(self.answers)} answers in all that time"
        again = sum(bool(each["again"]) for each in self.answers)
        attempts = max(int(str(each["attempts"])) for each in self.answers)
        return f"{len(self.answers)} requests, none failed, asked again {again}, attempts at most {attempts}"


def read_limits(pod: Pod) -> int | None:
    """What the pod was started with."""
    limit: int | None = yaml.safe_load((pod.folder / "cluster.yaml").read_text())["gateway"].get("max_requests")
    return limit


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}", "PYTHONUNBUFFERED": "1"}


@contextmanager
def requests(release: Release, at_once: int, prompts: Sequence[str] = PROMPTS, tokens: int = TOKENS) -> Iterator[Asked]:
    """Inside, requests come without an end; each prompt was asked at least once when it is over."""
    asked = Asked()
    file = release.kubelet.folder / "prompts.json"
    file.write_text(json.dumps(prompts))
    script = str(Path(__file__).with_name("asking.py"))
    command = [sys.executable, script, ENDPOINT, str(file), str(tokens), str(at_once)]
    asking = subprocess.Popen(
        release.outside.inside(*command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    )
    try:
        yield asked
        out, _ = asking.communicate(timeout=120)
        asked.answers = [json.loads(line) for line in out.splitlines()]
    finally:
        asking.kill()


@pytest.fixture(scope="module")
def exact() -> list[tuple[int, ...]]:
    return alone(PROMPTS, TOKENS)


def alone(prompts: Sequence[str], tokens: int) -> list[tuple[int, ...]]:
    """What a mixed worker answers by itself."""
    try:
        resolve(MODEL)
    except ModelError as error:
        pytest.skip(f"the model cannot be had here: {error}")
    pool = {"name": "both", "role": "mixed", "replicas": 1}
    spec = parse_spec({"model": MODEL, "pools": [pool], "gateway": {"grpc_port": 0}})

    async def asked() -> list[tuple[int, ...]]:
        serving = await serve(spec, runtime="local", make_server=open_servers)
        try:
            async with AsyncClient(serving.endpoint) as client:
                calls = (client.complete(each, max_tokens=tokens, temperature=0.0) for each in prompts)
                return [each.output.tokens for each in await asyncio.gather(*calls)]
        finally:
            await serving.close()

    return asyncio.run(asked())


@pytest.fixture(scope="module")
def release(exact: list[tuple[int, ...]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    if reason := why_not():
        pytest.skip(f"pods as processes: {reason}")
    with installed(exact, tmp_path_factory.mktemp("pods"), OPTIONS) as there:
        yield there


@contextmanager
def installed(exact: list[tuple[int, ...]], folder: Path, options: Sequence[str]) -> Iterator[Release]:
    with api_server(kuberay=False) as (address, store), kubelet(store, folder) as (running, outside):
        there = Release(connected(address, store, folder), running, outside, exact)
        begun_s = time.monotonic()
        waiting = ("--wait", "--timeout", f"{WAIT_S:.0f}s")
        there.helm("install", "release", CHART, "--create-namespace", *options, *waiting)
        there.ask(
            sys.executable, "-m", "cluster.cli", "generate", PROMPTS[0], "--endpoint", ENDPOINT, "--max-tokens", "1"
        )
        there.first_token_s = time.monotonic() - begun_s
        yield there


def test_an_installed_release_answers_with_the_tokens_of_one_worker(release: Release) -> None:
    print(f"helm install to the first token: {release.first_token_s:.0f} s")
    with requests(release, 2) as asked:
        time.sleep(10)
    print(asked.check(release.exact, len(PROMPTS)))
    release.helm("test", "release", "--timeout", "120s")


def test_pods_of_pools_roll_without_a_failed_request(release: Release) -> None:
    before = release.kubelet.pods_of("pool")
    begun_s = time.monotonic()
    with requests(release, 3) as asked:
        time.sleep(2)
        changed = "pools.prefill.podAnnotations.round=two,pools.decode.podAnnotations.round=two"
        waiting = ("--wait", "--timeout", f"{WAIT_S:.0f}s")
        release.helm("upgrade", "release", CHART, "--reuse-values", "--set", changed, *waiting)
        rolled_s = time.monotonic() - begun_s
        time.sleep(2)
    received = asked.check(release.exact, len(PROMPTS))
    assert all(each.gone and not each.killed for each in before), release.told()
    assert [code for each in before for code, _ in each.hooks] == [0] * len(before), release.told()
    assert all("is empty after" in said for each in before for _, said in each.hooks)
    print(f"{len(before)} pods of pools rolled in {rolled_s:.0f} s under {received}")


def test_gateways_roll_without_a_failed_request(release: Release) -> None:
    before, begun_s = release.kubelet.pods_of("gateway"), time.monotonic()
    serving = release.kubelet.pods_of("serve")
    with requests(release, 3) as asked:
        time.sleep(2)
        waiting = ("--wait", "--timeout", f"{WAIT_S:.0f}s")
        release.helm(
            "upgrade", "release", CHART, "--reuse-values", "--set", "gateway.podAnnotations.round=two", *waiting
        )
        rolled_s = time.monotonic() - begun_s
        time.sleep(2)
    received = asked.check(release.exact, len(PROMPTS))
    assert all(each.gone and not each.killed and each.exit_code == 0 for each in before), release.told()
    assert release.kubelet.pods_of("serve") == serving, "who serves has gone on"
    print(f"{len(before)} gateways rolled in {rolled_s:.0f} s under {received}")


def test_a_job_inside_of_it_gets_its_tokens(release: Release) -> None:
    (head,) = release.kubelet.pods_of("head")
    script = str(ROOT / "examples" / "ask.py")
    said = release.ask(
        *("ray", "job", "submit", "--address", "http://127.0.0.1:8265", "--"),
        *("python", script, ENDPOINT, PROMPTS[0], str(TOKENS)),
        pod=head,
    )
    assert f"tokens: {list(release.exact[0])}" in said, said


def test_what_restarts_everything_is_an_outage_that_ends(release: Release) -> None:
    """As a new image does: Ray's head goes, and with it all nodes, whoever serves, and the gateways."""
    waiting = ("--wait", "--timeout", f"{WAIT_S:.0f}s")
    changed = ("--reuse-values", "--set", "podDefaults.podAnnotations.build=two,cluster.gateway.max_requests=77")
    for words in (("upgrade", "release", CHART, *changed), ("rollback", "release")):
        before, begun_s = list(release.kubelet.pods), time.monotonic()
        release.helm(*words, *waiting)
        rolled_s = time.monotonic() - begun_s
        assert all(each.gone for each in before), release.told()
        with requests(release, 2) as asked:
            time.sleep(5)
        received = asked.check(release.exact, len(PROMPTS))
        print(f"helm {words[0]} of everything: {len(before)} pods anew in {rolled_s:.0f} s; then {received}")
        killed = [each.name for each in before if each.killed]
        assert not killed, f"{killed}\n{release.told()}"
        limits = [read_limits(each) for each in release.kubelet.pods_of("serve")]
        assert limits == [77 if words[0] == "upgrade" else None]


def test_a_release_that_is_removed_ends_in_time(release: Release) -> None:
    pods, begun_s = list(release.kubelet.pods), time.monotonic()
    release.helm("uninstall", "release")
    while not all(each.gone for each in pods):
        assert time.monotonic() - begun_s < WAIT_S and release.kubelet.failure is None, release.told()
        time.sleep(0.2)
    assert not [each.name for each in pods if each.killed], release.told()
    print(f"{len(pods)} pods ended in {time.monotonic() - begun_s:.0f} s")
