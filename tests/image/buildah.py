"""buildah with its storage in a folder of its own, a Debian to stand in for the base image, and containers as a kubelet
would run them: a read-only root, volumes where the chart has them, user 1000.

What pip needs of this machine comes in as volumes of the build. Root only.
"""

import configparser
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("buildah", "debootstrap", "unshare", "chroot")
# In a mount and a PID namespace of its own, which take everything with them when they end.
CONTAINER = """
set -e
root=$1 models=$2; shift 2
mount --bind "$root" "$root"
mount --rbind /dev "$root/dev"
mount --rbind /sys "$root/sys"
mount --bind "$models" "$root/models"
mount -o remount,bind,ro "$root"
mount -t proc proc "$root/proc"
for volume in tmp cache dev/shm; do mount -t tmpfs -o mode=1777 tmpfs "$root/$volume"; done
exec chroot --userspec=1000:1000 "$root" "$@"
"""


class Buildah:
    """Owned by the test; `close` unmounts and forgets everything."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._command = ["buildah", "--root", str(folder / "storage"), "--runroot", str(folder / "run")]

    def __call__(self, *arguments: str | Path) -> str:
        done = subprocess.run([*self._command, *map(str, arguments)], stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout.strip()

    def debian(self, name: str) -> None:
        """An image with Python 3.11 and venv, from the packages that this machine's apt knows."""
        root = self._folder / "debian"
        packages = "--include=python3,python3-venv,ca-certificates"
        subprocess.run(["debootstrap", "--variant=minbase", packages, "bookworm", root, mirror()], check=True)
        for package in (root / "var/cache/apt/archives").glob("*.deb"):
            package.unlink()
        container = self("from", "scratch")
        self("add", "--quiet", container, root, "/")
        self("commit", "--quiet", container, name)
        self("rm", container)

    def build(self, base: str, name: str) -> None:
        """From the Dockerfile of this repository."""
        volumes = [f"--volume={path}:{inside}:ro" for path, inside in pip_volumes(self._folder).items()]
        self("bud", "--isolation=chroot", f"--build-arg=BASE_IMAGE={base}", *volumes, "-t", name, ROOT)

    @contextmanager
    def mounted(self, name: str) -> Iterator["Container"]:
        container = self("from", name)
        try:
            received = json.loads(self("inspect", "--type", "image", name))["OCIv1"]["config"]
            yield Container(Path(self("mount", container)), received)
        finally:
            self("umount", container)
            self("rm", container)

    def close(self) -> None:
        self("rm", "--all")
        self("rmi", "--all", "--force")


class Container:
    """An image's root, mounted; nothing is written to it. `config` is the image's own."""

    def __init__(self, root: Path, config: dict[str, Any]) -> None:
        self.root = root
        self.config = config

    def num_bytes(self) -> int:
        received = subprocess.run(["du", "-sxb", self.root], capture_output=True, text=True, check=True)
        return int(received.stdout.split()[0])

    def run(self, *command: str, models: Path, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """`models` lies at /models. The command's environment is the image's."""
        environment = self.config["Env"]
        space = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", CONTAINER, "sh"]
        whole = [*space, str(self.root), str(models), "env", "-i", *environment, *command]
        return subprocess.run(whole, capture_output=True, text=True, timeout=timeout_s)


def mirror() -> str:
    """Where this machine's apt finds bookworm."""
    received = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Codename: bookworm"]
    return subprocess.run(received, capture_output=True, text=True, check=True).stdout.split()[0]


def pip_volumes(folder: Path) -> dict[Path, Path]:
    """How pip is set up here as one file, and the files and folders that it names: path here to path in the build."""
    received = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    config = configparser.RawConfigParser()
    config["global"] = {}
    volumes = {}
    for key, value in re.findall(r"^(?:global|:env:)\.([\w-]+)='(.*)'$", received.stdout, re.M):
        config["global"][key] = value
        for scheme, name in re.findall(r"(?:^|\s)(file://)?(/[^\s']+)", value):
            path = Path(name).parent if scheme else Path(name)  # an index links to files beside it
            if path.exists():
                volumes[path] = path
    written = folder / "pip.conf"
    with written.open("w") as file:
        config.write(file)
    return volumes | {written: Path("/etc/pip.conf")}
