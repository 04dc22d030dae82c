"""The image, really built by buildah in chroot isolation and run as a kubelet would: `make image-test`, as root.

The base is a Debian made by debootstrap. Ten minutes and 10 GB of disk; needs buildah, debootstrap, and apt set up.
"""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.image.buildah import PROGRAMS, Buildah, Container
from tests.model.tiny import write_tiny_llama

MISSING = [name for name in PROGRAMS if shutil.which(name) is None]
pytestmark = [
    pytest.mark.skipif("DIPTYCH_IMAGE" not in os.environ, reason="slow: make image-test"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount and to change root"),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
    pytest.mark.timeout(3600),
]
SPEC = """
name: image
model: /models/tiny
pools:
  - {name: prefill, role: prefill, resources: {cpu: 1}, engine: {kv_blocks: 64, threads: 1}}
  - {name: decode, role: decode, resources: {cpu: 1}, engine: {kv_blocks: 64, threads: 1}}
gateway: {host: 127.0.0.1, grpc_port: 0, http_port: 0}
"""
SERVE = """
! touch /opt/x 2>/dev/null || echo "the root can be written"
diptych serve -f /models/cluster.yaml > /tmp/served 2>&1 & serving=$!
until grep -q ^ready: /tmp/served; do kill -0 $serving || { cat /tmp/served; exit 1; }; sleep 1; done
endpoint=$(sed -n 's#^ready: grpc://##p' /tmp/served)
diptych generate "The sea is" --endpoint "$endpoint" --max-tokens 4 --temperature 0 --json; code=$?
kill -INT $serving
wait $serving || code=$?
cat /tmp/served >&2
exit $code
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(tmp_path_factory.mktemp("models"))
    write_tiny_llama(folder / "tiny")
    (folder / "cluster.yaml").write_text(SPEC)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    buildah = Buildah(Path(tmp_path_factory.mktemp("image")))
    try:
        started_s = time.monotonic()
        buildah.debian("base")
        based_s = time.monotonic()
        buildah.build("localhost/base", "diptych")
        built_s = time.monotonic()
        with buildah.mounted("localhost/diptych") as container:
            took = f"base in {based_s - started_s:.0f} s, image in {built_s - based_s:.0f} s"
            print(f"{took}, {container.num_bytes() / 1e9:.2f} GB")
            yield container
    finally:
        buildah.close()


def test_it_runs_as_user_1000_what_the_chart_calls(container: Container, models: Path) -> None:
    assert container.config["User"] == "1000" and container.config["Entrypoint"] == ["diptych"]
    for command in (["id", "-u"], ["diptych", "--version"], ["ray", "--version"], ["bash", "-c", "exit"]):
        done = container.run(*command, models=models)
        assert done.returncode == 0, done.stderr
    assert container.run("id", "-u", models=models).stdout == "1000\n"


def test_it_holds_nothing_of_the_build(container: Container) -> None:
    for left in ("src", "etc/pip.conf", "root/.cache", "var/lib/apt/lists/lock"):
        path = container.root / left
        assert not path.exists() or not path.stat().st_size, f"/{left} is in the image"


def test_it_serves_with_a_root_that_cannot_be_written(container: Container, models: Path) -> None:
    done = container.run("sh", "-c", SERVE, models=models, timeout_s=300.0)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"completion_tokens": 4' in done.stdout and "the root can be written" not in done.stdout
    assert done.stderr.rstrip().endswith("closed")
