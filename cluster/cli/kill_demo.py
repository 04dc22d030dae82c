"""`diptych demo --kill`: kill -9 a worker while it streams, and compare every token with an undisturbed run.

Imported when the command runs, so heavy imports are at the top.
"""

import asyncio
import io
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, field

import click
import psutil

from cluster.cli.lifetime import running_cluster
from cluster.cli.screen import print_json, say
from cluster.spec import ClusterSpec
from diptych.client import Accepted, AsyncClient, Completed, TextDelta
from diptych.view import Role, WorkerState, WorkerView

PROMPTS = (
    "Explain in two sentences why the sea is salty.",
    "Write a short story about a lighthouse.",
    "List the planets and say one thing about each.",
    "How does a bicycle stay upright?",
)
KILL_AFTER_TOKENS = 8  # of every stream
READY_S, STREAM_S, BACK_S = 30.0, 300.0, 120.0
POLL_S, LINE_S = 0.1, 2.0


@dataclass(frozen=True, slots=True)
class KillOutcome:
    """The effect of the kill. Tokens are compared with the undisturbed run, by position.

    `recovered_streams`: streams that continued on another worker. `longest_pause_s`: between two tokens of a stream.
    """

    worker: str
    killed_pid: int
    new_pid: int
    streams: int
    recovered_streams: int
    tokens: int
    lost_tokens: int
    repeated_tokens: int
    changed_tokens: int
    longest_pause_s: float
    back_s: float

    @property
    def is_exact(self) -> bool:
        return not (self.lost_tokens or self.repeated_tokens or self.changed_tokens)

    @property
    def lines(self) -> tuple[str, ...]:
        damage = f"{self.lost_tokens} lost, {self.repeated_tokens} repeated, {self.changed_tokens} changed"
        verdict = "Not a token was lost." if self.is_exact else "The streams differ from the undisturbed run."
        pids = f"pid {self.killed_pid} before, {self.new_pid} now"
        return (
            verdict,
            f"streams   {self.streams} finished, {self.recovered_streams} of them on another worker",
            f"tokens    {self.tokens} compared with the undisturbed run: {damage}",
            f"pause     {self.longest_pause_s:.1f} s at most between two tokens of a stream",
            f"worker    {self.worker} ready again {self.back_s:.1f} s after the kill ({pids})",
        )


@dataclass(slots=True)
class DemoStream:
    """One streamed answer. `repeated`: number of tokens at positions that were already received."""

    prompt: str
    tokens: list[int] = field(default_factory=list)
    repeated: int = 0
    attempts: int = 1
    ended: bool = False
    longest_pause_s: float = 0.0
    last_s: float | None = None

    def add(self, first_position: int, tokens: tuple[int, ...]) -> None:
        now_s = time.monotonic()
        if self.last_s is not None:
            self.longest_pause_s = max(self.longest_pause_s, now_s - self.last_s)
        self.last_s = now_s
        self.repeated += max(0, len(self.tokens) - first_position)
        self.tokens += tokens


class Journal:
    """Prints the events of a run and its progress, with times since the streams began."""

    def __init__(self, streams: list[DemoStream], most_tokens: int) -> None:
        self.streams = streams
        self.most_tokens = most_tokens
        self._begun_s = time.monotonic()

    def add(self, text: str) -> None:
        say(f"{time.monotonic() - self._begun_s:6.1f} s  {text}")

    @property
    def is_over(self) -> bool:
        return all(each.ended for each in self.streams)

    async def add_progress(self) -> None:
        """A line every few seconds, until all streams have ended."""
        while True:
            await asyncio.sleep(LINE_S)
            if self.is_over:
                return
            counts = ", ".join(str(len(each.tokens)) for each in self.streams)
            self.add(f"tokens: {counts} of {self.most_tokens} each")


def check_can_kill(runtime: str) -> None:
    """Raise `click.UsageError` unless this command will start the worker itself."""
    if runtime != "ray":
        raise click.UsageError("--kill needs workers that are processes; leave --runtime local out")
    if "RAY_ADDRESS" in os.environ:
        raise click.UsageError("--kill starts a Ray of its own on this machine; unset RAY_ADDRESS")


async def kill_demo(spec: ClusterSpec, max_tokens: int, as_json: bool) -> None:
    """Raises if a token was lost, repeated or changed, or if the worker is not ready again in time."""
    async with running_cluster(spec, "ray", say) as serving, AsyncClient(serving.endpoint) as client:
        await client.wait_ready(READY_S)
        outcome = await _outcome(client, max_tokens)
    if as_json:
        print_json(asdict(outcome))
    else:
        click.echo("\n" + "\n".join(outcome.lines))
    if not outcome.is_exact:
        raise click.ClickException("the streams differ from the undisturbed run")


async def _outcome(client: AsyncClient, max_tokens: int) -> KillOutcome:
    undisturbed = [DemoStream(prompt) for prompt in PROMPTS]
    with _shown("Run 1 of 2: undisturbed", undisturbed, max_tokens) as journal:
        await _run(client, journal)
    victim = next(each for each in (await client.status()).view.workers if each.role is Role.DECODE)
    disturbed = [DemoStream(prompt) for prompt in PROMPTS]
    title = f"Run 2 of 2: the same prompts, and kill -9 for {victim.name} in the middle"
    with _shown(title, disturbed, max_tokens) as journal:
        killed: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        back = asyncio.ensure_future(_back(client, journal, victim, killed))
        try:
            await _run(client, journal, lambda: _kill_when_all_stream(journal, victim, killed))
            if not killed.done():
                raise click.ClickException("the answers ended before the kill; ask for longer ones with --max-tokens")
            back_s, new_pid = await back
        finally:
            back.cancel()
    pairs = list(zip(undisturbed, disturbed, strict=True))
    return KillOutcome(
        worker=victim.name,
        killed_pid=victim.pid,
        new_pid=new_pid,
        streams=len(disturbed),
        recovered_streams=sum(each.attempts > 1 for each in disturbed),
        tokens=sum(len(each.tokens) for each in disturbed),
        lost_tokens=sum(max(0, len(one.tokens) - len(other.tokens)) for one, other in pairs),
        repeated_tokens=sum(each.repeated for each in disturbed),
        changed_tokens=sum(a != b for one, other in pairs for a, b in zip(one.tokens, other.tokens, strict=False)),
        longest_pause_s=max(each.longest_pause_s for each in disturbed),
        back_s=back_s,
    )


async def _run(client: AsyncClient, journal: Journal, on_token: Callable[[], None] = lambda: None) -> None:
    async with asyncio.timeout(STREAM_S), asyncio.TaskGroup() as group:
        for number, each in enumerate(journal.streams, 1):
            group.create_task(_stream(client, journal, number, each, on_token))


async def _stream(
    client: AsyncClient, journal: Journal, number: int, stream: DemoStream, on_token: Callable[[], None]
) -> None:
    events = client.generate(
        stream.prompt,
        apply_chat_template=True,
        timeout_s=STREAM_S,
        temperature=0.0,
        ignore_eos=True,
        max_tokens=journal.most_tokens,
    )
    async for event in events:
        if isinstance(event, TextDelta):
            stream.add(event.first_position, event.tokens)
            on_token()
        elif isinstance(event, Accepted) and event.attempt:
            journal.add(f"stream {number} continues after token {len(stream.tokens)} on {event.decode_worker}")
        elif isinstance(event, Completed):
            stream.attempts, stream.ended = event.attempts, True
            if journal.is_over:
                journal.add("all streams have finished")


def _kill_when_all_stream(journal: Journal, victim: WorkerView, killed: asyncio.Future[float]) -> None:
    """Kill the worker once every stream has `KILL_AFTER_TOKENS`, so that all of them are interrupted."""
    if killed.done() or any(len(each.tokens) < KILL_AFTER_TOKENS or each.ended for each in journal.streams):
        return
    _kill(victim.pid)
    killed.set_result(time.monotonic())
    journal.add(f"kill -9 {victim.pid} ({victim.name})")


def _kill(pid: int) -> None:
    """Kill a child process. Raises `click.ClickException` if this process did not start it."""
    if pid not in {child.pid for child in psutil.Process().children(recursive=True)}:
        raise click.ClickException(f"process {pid} was not started by this demo; it is not killed")
    os.kill(pid, signal.SIGKILL)


async def _back(
    client: AsyncClient, journal: Journal, victim: WorkerView, killed: asyncio.Future[float]
) -> tuple[float, int]:
    """Seconds from the kill until the worker is ready again, and its new process. Raises TimeoutError."""
    killed_s = await killed
    state = victim.state
    async with asyncio.timeout(BACK_S):
        while True:
            now = next(each for each in (await client.status()).view.workers if each.name == victim.name)
            back_s = time.monotonic() - killed_s
            if now.state is WorkerState.READY and now.incarnation != victim.incarnation:
                journal.add(f"{victim.name} is ready again, pid {now.pid}")
                return back_s, now.pid
            if now.state is not state:
                state = now.state
                journal.add(f"{victim.name} is {state.value}")
            await asyncio.sleep(POLL_S)


@contextmanager
def _shown(title: str, streams: list[DemoStream], most_tokens: int) -> Iterator[Journal]:
    """Discards stdout, because Ray prints long reports of the dead actor there."""
    say(title)
    journal = Journal(streams, most_tokens)
    progress = asyncio.ensure_future(journal.add_progress())
    try:
        with redirect_stdout(io.StringIO()):
            yield journal
    finally:
        progress.cancel()
