"""Runs one part in this process: `python -m benchmarks.gpu.run_part NAME DEVICE FILE [--tiny]` writes its figures."""

import importlib
import json
import logging
import sys
from pathlib import Path


def main(name: str, device: str, file: str, *flags: str) -> None:
    import torch

    logging.basicConfig(level=logging.WARNING)
    part = importlib.import_module(f"benchmarks.gpu.parts.{name}")
    chosen = torch.device("cuda", 0) if device == "cuda" else torch.device(device)
    Path(file).write_text(json.dumps(part.measure(chosen, tiny="--tiny" in flags)))


if __name__ == "__main__":
    main(*sys.argv[1:])
