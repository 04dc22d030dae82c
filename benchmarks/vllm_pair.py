"""The peer: a vLLM prefill server and a vLLM decode server that transfer KV with vLLM's NIXL connector."""

import http.client
import json
import socket
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.environments import VLLM
from benchmarks.timed_request import TokenTimes
from cluster.offline.load.processes import Child, ProcessFailed

START_TIMEOUT_S = 600.0
LISTEN_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 300.0
NAME = "peer"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # one thread each, pinned by the benchmark or not at all
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "UCX_MODULES": "^ib",
    "UCX_NET_DEVICES": "lo",
}
CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
PREFILL_ONLY = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass(frozen=True, slots=True)
class VllmServer:
    """One vLLM server and the processes under it."""

    child: Child
    port: int

    def pids(self) -> list[int]:
        return [process.pid for process in self.child.family()]


@dataclass(frozen=True, slots=True)
class PairAnswer:
    """One request through the pair: seconds until the prefill server's reply, and the decode server's token times."""

    prefill_s: float
    times: TokenTimes


class VllmPair:
    """Both servers, running. `generate` does what the connector's proxy does."""

    def __init__(self, prefill: VllmServer, decode: VllmServer) -> None:
        self.prefill = prefill
        self.decode = decode

    def pids(self) -> list[int]:
        return [*self.prefill.pids(), *self.decode.pids()]

    def generate(self, prompt: Sequence[int], num_tokens: int) -> PairAnswer:
        """Exactly `num_tokens` greedy tokens. Raises `ProcessFailed` or OSError. Blocks."""
        name = uuid.uuid4().hex
        body = {"model": NAME, "prompt": list(prompt), "temperature": 0, "ignore_eos": True}
        begun = time.perf_counter()
        first = body | {"max_tokens": 1, "kv_transfer_params": PREFILL_ONLY}
        with _post(self.prefill.port, first, name) as reply:
            answer = json.load(reply)
        prefill_s = time.perf_counter() - begun
        params = answer.get("kv_transfer_params")
        if not params:
            raise ProcessFailed(f"the peer's prefill server gave no kv_transfer_params: {str(answer)[:200]}")
        second = body | {"max_tokens": num_tokens, "kv_transfer_params": params}
        with _post(self.decode.port, second | {"stream": True, "return_token_ids": True}, name) as reply:
            token_s = tuple(at_s - begun for at_s in _tokens(reply))
        if len(token_s) != num_tokens:
            raise ProcessFailed(f"the peer's decode server sent {len(token_s)} of {num_tokens} tokens")
        return PairAnswer(prefill_s, TokenTimes(token_s))


@contextmanager
def pair(model: Path) -> Iterator[VllmPair]:
    """Start the pair on this model folder; stop it on exit. Raises `ProcessFailed`."""
    ports = _free_ports(4)
    with ExitStack() as servers:
        started = [
            VllmServer(servers.enter_context(_start(model, port, side)), port)
            for port, side in ((ports[0], ports[1]), (ports[2], ports[3]))
        ]
        for server in started:
            server.child.wait_line("Application startup complete", START_TIMEOUT_S)
            _wait_listening(server.port)
        yield VllmPair(*started)


def _start(model: Path, port: int, side_channel: int) -> Child:
    command = [str(VLLM.python), "-m", "vllm.entrypoints.openai.api_server"]
    options = {
        "--model": str(model),
        "--served-model-name": NAME,
        "--host": "127.0.0.1",
        "--port": str(port),
        "--dtype": "float32",
        "--max-model-len": "4096",
        "--max-num-batched-tokens": "4096",
        "--max-num-seqs": "32",
        "--kv-transfer-config": json.dumps(CONNECTOR),
    }
    command += ["--enforce-eager", "--no-enable-prefix-caching"]
    command += [word for option in options.items() for word in option]
    return Child(command, ENVIRONMENT | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel)})


def _wait_listening(port: int) -> None:
    """Wait until the server listens: it logs its startup a moment earlier."""
    deadline_s = time.monotonic() + LISTEN_TIMEOUT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        except OSError:
            if time.monotonic() > deadline_s:
                raise ProcessFailed(f"the peer does not listen on port {port}") from None
            time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    """Distinct free ports."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextmanager
def _post(port: int, body: dict[str, Any], name: str) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_TIMEOUT_S)
    try:
        headers = {"Content-Type": "application/json", "X-Request-Id": name}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        reply = connection.getresponse()
        if reply.status != http.client.OK:
            raise ProcessFailed(f"the peer answered {reply.status}: {reply.read(300)!r}")
        yield reply
    finally:
        connection.close()


def _tokens(reply: http.client.HTTPResponse) -> Iterator[float]:
    """Arrival time of each token (`time.perf_counter`)."""
    for line in reply:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise ProcessFailed(f"the peer's decode server failed: {event['error']}")
        at_s = time.perf_counter()
        for choice in event.get("choices", ()):
            yield from [at_s] * len(choice.get("token_ids") or ())
