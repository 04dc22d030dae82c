"""A guarded release as real processes: probes and its smoke test get in over TLS with a key, a stranger does not."""

import base64
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.frontend.http.certificates import Authority
from tests.helm.api_server import api_server
from tests.helm.chart import CHART, Object, values
from tests.helm.kubelet import kubelet
from tests.helm.pod_network import why_not
from tests.helm.programs import run
from tests.helm.test_lifecycle import connected
from workers.errors import ModelError
from workers.model.store import resolve

SLOW = pytest.mark.skipif(not os.environ.get("DIPTYCH_PODS"), reason="takes minutes: make pods")
pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(600), SLOW]

HOST, KEY, WAIT_S = "release-diptych.llm.svc", "a-key-that-is-long-enough", 240.0
OPTIONS = ("--set", "httpRoute.enabled=false,metrics.serviceMonitor.enabled=false,cluster.health.dead_after_s=20")


def objects_of(secrets: dict[str, dict[str, Path]]) -> Iterator[Object]:
    yield {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "llm"}}
    for name, files in secrets.items():
        data = {key: base64.b64encode(path.read_bytes()).decode() for key, path in files.items()}
        yield {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "namespace": "llm"}, "data": data}


def test_the_smoke_test_and_the_probes_get_in_and_a_stranger_does_not(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(f"pods as processes: {reason}")
    try:
        resolve("smollm2-135m")
    except ModelError as error:
        pytest.skip(f"the model cannot be had here: {error}")
    authority = Authority(tmp_path, "servers")
    pair = authority.sign("server", HOST)
    (tmp_path / "keys").write_text(KEY + "\n")
    (tmp_path / "other").write_text("another-key-of-this-length\n")
    pods = tmp_path / "pods"
    pods.mkdir()
    with api_server(kuberay=False) as (address, store), kubelet(store, pods) as (running, _):
        config = ("--namespace", "llm", "--kubeconfig", connected(address, store, tmp_path).config)

        def done(program: str, *args: object) -> str:
            code, out, err = run(program, *args, *config, timeout_s=WAIT_S + 30)
            assert code == 0, f"{err}\n{running.told()}"
            return out

        secrets = {"certificate": {"tls.crt": pair.cert, "tls.key": pair.key, "ca.crt": authority.ca}}
        secrets |= {"keys": {"keys": tmp_path / "keys"}}
        manifest = tmp_path / "secrets.json"
        manifest.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects_of(secrets))}))
        done("kubectl", "apply", "--server-side", "-f", manifest)
        waiting = ("--wait", "--timeout", f"{WAIT_S:.0f}s")
        done("helm", "install", "release", CHART, "-f", values("native-guarded"), *OPTIONS, *waiting)
        done("helm", "test", "release", "--timeout", "120s")
        (gateway,) = running.pods_of("gateway")
        ask = (sys.executable, "-m", "cluster.cli", "generate", "The sea is", "--max-tokens", "1")
        there = ("--endpoint", f"grpcs://{HOST}:50051", "--ca", str(authority.ca))
        said, code = running.call(gateway.run(*ask, *there, "--key-file", str(tmp_path / "keys")))
        assert code == 0, said
        said, code = running.call(gateway.run(*ask, *there, "--key-file", str(tmp_path / "other")))
        assert code != 0 and "this gateway does not know this API key" in said
        fetch = (
            f"import urllib.request; urllib.request.urlopen('http://{gateway.place.address}:8000/health', timeout=5)"
        )
        said, code = running.call(gateway.run(sys.executable, "-c", fetch))
        assert code != 0, "there is no door without TLS"
