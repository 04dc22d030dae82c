"""The program: see the package. Returns 1 if a part failed."""

import concurrent.futures
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click

from benchmarks.gpu.parts import PARTS, GPUPart

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class PartOutcome:
    """`error` is empty for a part that passed; `log` ends with what it printed."""

    name: str
    seconds: float
    error: str = ""
    figures: dict[str, object] = field(default_factory=dict)
    log: str = ""


class GPURecord:
    """The outcomes so far, as `gpu.json` and `gpu.md` in a folder."""

    def __init__(self, folder: Path, device: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._device = device
        self._outcomes: list[PartOutcome] = []

    def add(self, outcome: PartOutcome) -> None:
        self._outcomes.append(outcome)
        state = outcome.error.splitlines()[-1] if outcome.error else "passed"
        print(f"{outcome.name:12} {outcome.seconds:6.1f} s  {state[:300]}", flush=True)
        for name, value in outcome.figures.items():
            print(f"    {name:42} {_text(value)}", flush=True)
        document = {"device": self._device, "parts": [asdict(each) for each in self._outcomes]}
        (self._folder / "gpu.json").write_text(json.dumps(document, indent=1) + "\n")
        (self._folder / "gpu.md").write_text("\n".join(self._lines()) + "\n")

    @property
    def failed(self) -> bool:
        return any(each.error for each in self._outcomes)

    def _lines(self) -> list[str]:
        lines = [f"# {self._device}, {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC"]
        for each in self._outcomes:
            lines += ["", f"## {each.name}: {'failed' if each.error else 'passed'} ({each.seconds:.1f} s)", ""]
            if each.figures:
                lines += ["| figure | value |", "|---|---|"]
                lines += [f"| {name} | {_text(value)} |" for name, value in each.figures.items()]
            if each.error:
                lines += ["```", each.error.strip(), each.log[-4000:].strip(), "```"]
        return lines


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def run_part(part: GPUPart, device: str, *, tiny: bool, limit_s: float) -> PartOutcome:
    """The part in a process of its own; killed with its children after `limit_s` seconds."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        figures_file, log_file = Path(folder) / "figures.json", Path(folder) / "log"
        command = [sys.executable, "-m", "benchmarks.gpu.run_part", part.name, device, str(figures_file)]
        command += ["--tiny"] if tiny else []
        environment = os.environ | {"PYTHONFAULTHANDLER": "1"} | ({"TRITON_INTERPRET": "1"} if device == "cpu" else {})
        with log_file.open("w") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
                _signal(process, signal.SIGABRT)  # the log ends with the stacks of all threads
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(2)
            finally:
                _end(process)
        text = log_file.read_text(errors="replace")
        figures = json.loads(figures_file.read_text()) if figures_file.exists() else {}
    error = ""
    if code is None:
        error = f"not done within {limit_s:.0f} s"
    elif code:
        error = f"ended with {code}: {(text.strip().splitlines() or ['nothing printed'])[-1]}"
    return PartOutcome(part.name, time.monotonic() - begun, error, figures, text[-20_000:])


def _end(process: "subprocess.Popen[bytes]") -> None:
    _signal(process, signal.SIGKILL)
    process.wait()


def _signal(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    """To its session: children that it left too."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=Path("benchmarks/results/gpu"), show_default=True)
@click.option("--device", default="auto", show_default=True, help="auto, cuda or cpu")
@click.option("--tiny", is_flag=True, help="sizes for a CPU: proves the program, measures nothing")
@click.option("--minutes", default=9.5, show_default=True, help="parts that have not begun by then are left out")
@click.option("--only", default="", help="parts, separated by commas")
@click.option("--jobs", default=4, show_default=True, help="parts at once that do not measure")
def main(out: Path, device: str, tiny: bool, minutes: float, only: str, jobs: int) -> None:
    """Check and measure on a GPU, in order of value."""
    import torch

    stop_s = time.monotonic() + 60 * minutes
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    names = set(filter(None, only.split(",")))
    if unknown := names - {part.name for part in PARTS}:
        raise click.BadParameter(f"{', '.join(sorted(unknown))}: parts are {', '.join(each.name for each in PARTS)}")
    parts = [part for part in PARTS if not names or part.name in names]
    record = GPURecord(out, f"{name}, torch {torch.__version__}, Python {sys.version.split()[0]}")

    def run(part: GPUPart) -> PartOutcome:
        left_s = stop_s - time.monotonic()
        if left_s < 5:
            return PartOutcome(part.name, 0.0, "no time left")
        return run_part(part, device, tiny=tiny, limit_s=min(part.limit_s, left_s))

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for outcome in concurrent.futures.as_completed([pool.submit(run, part) for part in parts if not part.alone]):
            record.add(outcome.result())
    for part in parts:
        if part.alone:
            record.add(run(part))
    sys.exit(record.failed)


if __name__ == "__main__":
    main()
