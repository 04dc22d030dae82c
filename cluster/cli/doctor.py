"""`diptych doctor`: the hardware and libraries of this machine, and which of them Diptych will use."""

import importlib.util
import os
import platform
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from cluster.cli.options import GroupedCommand
from cluster.cli.screen import print_json, size

if TYPE_CHECKING:
    from kvtransfer.doctor import TransferFacts


@click.command(cls=GroupedCommand)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of lines.")
def doctor(as_json: bool) -> None:
    """Check torch, Ray and the transports for KV on this machine.

    Runs a trial transfer between two processes, which takes some seconds.

    \b
    Example:
      diptych doctor --json
    """
    from kvtransfer.doctor import transfer_facts

    compute = _compute()
    transfer = transfer_facts(has_gpu=bool(compute["devices"]))
    verdict = {"compute": _compute_verdict(compute), "transfer": _transfer_verdict(transfer, compute["cuda"])}
    if as_json:
        print_json({"compute": compute, "transfer": asdict(transfer), "used": verdict})
        return
    for title, facts in (("compute", compute), ("kv transfer", asdict(transfer))):
        click.secho(title, bold=True)
        for name, value in facts.items():
            click.echo(f"  {name:16} {_shown(name, value)}")
    click.secho("will be used", bold=True)
    for name, reason in verdict.items():
        click.echo(f"  {name:16} {reason}")


def _compute() -> dict[str, Any]:
    """`devices`: accelerators that torch can use. `cuda`: the version that torch is built for."""
    import psutil

    from cluster.offline.load.machine import versions

    torch_version, cuda, threads, devices = _torch()
    return {
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "torch": torch_version,
        "cuda": cuda,
        "torch_threads": threads,
        "devices": devices,
        "ray": versions().get("ray", "not installed"),
        "ray_address": os.environ.get("RAY_ADDRESS", "(unset: Ray is started here)"),
    }


def _torch() -> tuple[str, str | None, int, tuple[str, ...]]:
    if importlib.util.find_spec("torch") is None:
        return "not installed", None, 0, ()
    import torch

    cuda = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    devices = tuple(f"cuda:{index} {torch.cuda.get_device_name(index)}" for index in cuda)
    return str(torch.__version__), torch.version.cuda, torch.get_num_threads(), devices


def _compute_verdict(compute: dict[str, Any]) -> str:
    if not compute["torch_threads"]:
        return "nothing: torch is not installed; pip install 'diptych[serve]'"
    if compute["devices"]:
        return f"{compute['devices'][0]}, because torch can use it (engine.device: cpu overrides)"
    return f"the CPU with {compute['torch_threads']} threads, because torch sees no accelerator"


def _transfer_verdict(facts: "TransferFacts", cuda: str | None) -> str:
    if facts.cuda_ipc != "no GPU":
        return f"{_gpu_verdict(facts)}; {_host_verdict(facts, cuda)}"
    return _host_verdict(facts, cuda)


def _gpu_verdict(facts: "TransferFacts") -> str:
    if facts.cuda_ipc.startswith("CUDA IPC"):
        return "between GPUs of this host cuda_ipc, because a trial between two processes passed"
    return f"not cuda_ipc: {facts.cuda_ipc}"


def _host_verdict(facts: "TransferFacts", cuda: str | None) -> str:
    from kvtransfer.backends.nixl_build import mismatch

    if wrong := mismatch(facts.nixl_module, cuda):
        return wrong
    if facts.nixl_module == "not usable":
        return f"tcp, because NIXL does not work here: {facts.nixl_path}"
    return (
        f"nixl over {facts.nixl_path}, because a trial between two processes passed; tcp where a pair has no such path"
    )


def _shown(name: str, value: Any) -> str:
    if name == "memory_bytes":
        return size(value)
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    return str(value)
