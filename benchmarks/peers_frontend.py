"""What a request costs in the frontends of other systems, beside this one's gateway: all over HTTP, all with a mocked
engine.

    Diptych        gateway of a cluster on Ray with simulated workers       (routes, calls two workers, detokenizes)
    Dynamo         its frontend, with its mocker as the worker             (routes, calls a worker, detokenizes)
    vLLM           its API server over `vllm_stub_server`                  (tokenizes, detokenizes)
    SGLang router  the router alone, in front of `bare_servers`            (routes, passes on)
    LiteLLM        the proxy alone, in front of `bare_servers`             (parses and formats each event again)
    bare           `bare_servers` alone: FastAPI with prebuilt events

Each engine gives a stream a token every `PERIOD_S`. CPU seconds are those of the frontend's process only. A system that
is not installed, or does not start, is left out, and a note says why.
"""

import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import aiohttp

from benchmarks.environments import DYNAMO, LITELLM, SGLANG_ROUTER, VLLM, PeerEnvironment
from benchmarks.figures import BenchmarkPart, Figure, Progress, spread
from benchmarks.frontend import served, served_spec
from benchmarks.hosted import model_folder
from benchmarks.pinning import process_cpu_s
from cluster.offline.load.processes import Child, ProcessFailed
from workers.costs import LinearCost

PERIOD_S = 0.005
TOKENS, PROMPT = 258, "The capital of France is a city on a river. " * 3
TOKEN_PROMPT = list(range(400, 432))  # simulated workers have 1000 token ids, fewer than the tokenizer
CONCURRENCY, REQUESTS, QUICK_REQUESTS = 16, 48, 16
ROUNDS = 3
START_S = 120.0
MODEL = "bare"


@dataclass(frozen=True, slots=True)
class Frontend:
    """A server and the process whose CPU time counts."""

    pid: int
    url: str
    model: str = MODEL
    prompt: str | list[int] = PROMPT


@dataclass(frozen=True, slots=True)
class FrontendSample:
    """Means over the requests of one round."""

    request_cpu_s: float
    tokens_per_event: float
    duration_s: float


@contextmanager
def bare() -> Iterator[Frontend]:
    with Child([sys.executable, "-m", "benchmarks.bare_servers", str(PERIOD_S)]) as child:
        yield Frontend(child.pid, child.wait_line("open ", START_S).text.split()[2])


@contextmanager
def diptych() -> Iterator[Frontend]:
    spec = served_spec()
    cost = LinearCost(PERIOD_S, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    with served(replace(spec, pools=tuple(replace(pool, cost=cost) for pool in spec.pools))) as server:
        yield Frontend(server.pid, server.addresses["HTTP"], spec.model, TOKEN_PROMPT)


@contextmanager
def litellm() -> Iterator[Frontend]:
    _installed(LITELLM)
    with bare() as upstream, tempfile.TemporaryDirectory(prefix="diptych-bench-") as folder:
        entry = {"model": f"text-completion-openai/{MODEL}", "api_base": f"{upstream.url}/v1", "api_key": "none"}
        config = {
            "model_list": [{"model_name": MODEL, "litellm_params": entry}],
            "litellm_settings": {"drop_params": True, "telemetry": False},
            "general_settings": {"dangerously_permit_weak_or_unset_master_key": True},
        }
        file = Path(folder) / "config.yaml"
        file.write_text(json.dumps(config))  # JSON is YAML
        command = [str(LITELLM.path / "bin" / "litellm"), "--config", str(file), "--host", "127.0.0.1"]
        settings = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        settings["REPEATED_STREAMING_CHUNK_LIMIT"] = str(2 * TOKENS)  # `bare_servers` repeats one token
        with _listening(command, settings, "--port") as frontend:
            yield frontend


@contextmanager
def sglang_router() -> Iterator[Frontend]:
    _installed(SGLANG_ROUTER)
    with bare() as upstream:
        command = [str(SGLANG_ROUTER.python), "-m", "sglang_router.launch_router", "--worker-urls", upstream.url]
        with _listening([*command, "--host", "127.0.0.1", "--policy", "round_robin"], {}, "--port") as frontend:
            yield frontend


@contextmanager
def vllm() -> Iterator[Frontend]:
    """Without its engine's process and the messages to it."""
    _installed(VLLM)
    stub = Path(__file__).with_name("vllm_stub_server.py")
    model = ["--model", str(model_folder()), "--served-model-name", MODEL, "--disable-log-stats"]
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    command = [str(VLLM.python), str(stub), str(PERIOD_S), *model, "--host", "127.0.0.1"]
    with _listening(command, environment, "--port") as frontend:
        yield frontend


@contextmanager
def dynamo() -> Iterator[Frontend]:
    """Discovery by files and requests by TCP, so that it needs neither etcd nor NATS."""
    _installed(DYNAMO)
    with tempfile.TemporaryDirectory(prefix="diptych-bench-") as folder:
        planes = ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]
        environment = {"DYN_FILE_KV": folder, "HF_HUB_OFFLINE": "1"}
        python = str(DYNAMO.python)
        worker = ["--model-path", str(model_folder()), "--model-name", MODEL, "--max-num-seqs", "256"]
        with (
            _listening([python, "-m", "dynamo.frontend", *planes], environment, "--http-port") as frontend,
            Child([python, "-m", "dynamo.mocker", *worker, *planes], environment),
        ):
            yield frontend


SYSTEMS: Mapping[str, Callable[[], AbstractContextManager[Frontend]]] = {
    "Diptych": diptych,
    "Dynamo": dynamo,
    "vLLM": vllm,
    "SGLang router": sglang_router,
    "LiteLLM": litellm,
    "bare": bare,
}


def _installed(environment: PeerEnvironment) -> None:
    if reason := environment.missing():
        raise ProcessFailed(reason)


@contextmanager
def _listening(command: list[str], environment: Mapping[str, str], option: str) -> Iterator[Frontend]:
    """Run a peer's server on a free port, with none of this process's Python path."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with Child([*command, option, str(port)], {"PYTHONPATH": "", **environment}) as child:
        yield Frontend(child.pid, f"http://127.0.0.1:{port}")


def measure(rounds: int, quick: bool, progress: Progress) -> BenchmarkPart:
    samples: defaultdict[str, list[FrontendSample]] = defaultdict(list)
    notes: list[str] = []
    with ExitStack() as stack:
        running: dict[str, Frontend] = {}
        for name, system in SYSTEMS.items():
            try:
                frontend = stack.enter_context(system())
                asyncio.run(_wait_answers(frontend))
                running[name] = frontend
            except (ProcessFailed, OSError, subprocess.SubprocessError) as error:
                notes.append(f"{name} is left out: {error}")
            progress(f"{name}: {'ready' if name in running else notes[-1]}")
        for number in range(rounds):
            for name in list(running)[:: -1 if number % 2 else 1]:
                requests = QUICK_REQUESTS if quick else REQUESTS
                samples[name].append(asyncio.run(_sample(running[name], requests)))
            progress(f"round {number + 1} of {rounds}")
    return BenchmarkPart("peers-frontend", figures(samples), (), (*NOTES, *notes))


async def _wait_answers(frontend: Frontend) -> None:
    """Until it answers a request. Raises `ProcessFailed` when it does not in time."""
    deadline_s, last = time.monotonic() + START_S, ""
    while time.monotonic() < deadline_s:
        try:
            async with _session() as session:
                await _answer(session, frontend)
            return
        except (aiohttp.ClientError, TimeoutError, ProcessFailed) as error:
            last = f"{type(error).__name__}: {error}"
        await asyncio.sleep(1.0)
    raise ProcessFailed(f"no answer in {START_S:g} s ({last})")


@asynccontextmanager
async def _session() -> AsyncIterator[aiohttp.ClientSession]:
    limits = aiohttp.ClientTimeout(total=60.0)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=limits) as session:
        yield session


async def _answer(session: aiohttp.ClientSession, frontend: Frontend) -> int:
    """Events with text. Raises `ProcessFailed` unless the answer has `TOKENS` tokens."""
    body: dict[str, object] = {
        "model": frontend.model,
        "prompt": frontend.prompt,
        "max_tokens": TOKENS,
        "stream": True,
        "ignore_eos": True,
    }
    body |= {"temperature": 0.0, "stream_options": {"include_usage": True}}
    events, counted = 0, None
    async with session.post(f"{frontend.url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise ProcessFailed(f"status {response.status}: {(await response.text())[:200]}")
        async for line in response.content:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                if "choices" not in chunk:
                    raise ProcessFailed(f"an event without choices: {line[:300].decode()}")
                counted = (chunk.get("usage") or {}).get("completion_tokens", counted)
                events += bool(chunk["choices"] and chunk["choices"][0].get("text"))
    if counted != TOKENS:
        raise ProcessFailed(f"an answer had {counted} tokens instead of {TOKENS}")
    return events


async def _sample(frontend: Frontend, requests: int) -> FrontendSample:
    left, events, durations_s = iter(range(requests)), 0, []

    async def send_all(session: aiohttp.ClientSession) -> None:
        nonlocal events
        for _ in left:
            begun_s = time.perf_counter()
            of_answer = await _answer(session, frontend)
            events += of_answer
            durations_s.append(time.perf_counter() - begun_s)

    cpu_s = partial(process_cpu_s, frontend.pid)
    async with _session() as session:
        before_s = cpu_s()
        async with asyncio.TaskGroup() as group:
            for _ in range(CONCURRENCY):
                group.create_task(send_all(session))
        spent_s = cpu_s() - before_s
    return FrontendSample(spent_s / requests, requests * TOKENS / events, median(durations_s))


def figures(samples: Mapping[str, list[FrontendSample]]) -> tuple[Figure, ...]:
    title = f"Answers of {TOKENS} tokens, {CONCURRENCY} at once"
    made = []
    for name, each in samples.items():
        made += [
            Figure(title, name, "CPU time of a request", "ms", spread(one.request_cpu_s for one in each)),
            Figure(title, name, "requests per core", "1/s", spread(1.0 / one.request_cpu_s for one in each)),
            Figure(title, name, "tokens in an event", "x", spread(one.tokens_per_event for one in each)),
            Figure(title, name, "duration of a request", "s", spread(one.duration_s for one in each)),
        ]
    return tuple(made)


NOTES = (
    "CPU time is that of the frontend's process with all its threads; engines, mockers and the client do not count.",
    "SGLang's router and LiteLLM only pass a server's text on; Diptych, Dynamo and vLLM also detokenize, and Dynamo and"
    " vLLM tokenize the prompt of 34 tokens; Diptych gets 32 token ids. vLLM's engine is a task of its own process.",
)
