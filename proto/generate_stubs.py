"""Generates the stubs beside the .proto files: `python proto/generate_stubs.py`; needs grpcio-tools."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent


def generate(target: Path = ROOT) -> list[Path]:
    """Write `*_pb2.py`, `*_pb2.pyi` and, for services, `*_pb2_grpc.py` under `target`. Returns the written files."""
    sources = sorted(ROOT.glob("diptych/v1/*.proto"))
    includes = [f"-I{path}" for path in (ROOT, _own_protos(), _common_protos())]
    for source in sources:
        outputs = [f"--python_out={target}", f"--pyi_out={target}"]
        if "\nservice " in source.read_text():
            outputs.append(f"--grpc_python_out={target}")
        # In a separate process: with protoc's library loaded, importing NIXL aborts the interpreter.
        command = [sys.executable, "-m", "grpc_tools.protoc", *includes, *outputs, str(source)]
        if subprocess.run(command, check=False).returncode != 0:
            raise RuntimeError(f"protoc failed on {source}; see its output above")
    for path in target.glob("diptych/v1/*_pb2_grpc.py"):  # the rest is grpc's experimental API without stubs
        path.write_text(path.read_text().partition("\n\n # This class is part of an EXPERIMENTAL API.")[0])
    return sorted(target.glob("diptych/v1/*_pb2*.py*"))


def _own_protos() -> Path:
    """The folder with google/protobuf/*.proto. Raises ImportError without grpcio-tools."""
    spec = find_spec("grpc_tools")
    if spec is None or spec.origin is None:
        raise ImportError("grpcio-tools is missing: pip install grpcio-tools")
    return Path(spec.origin).parent / "_proto"


def _common_protos() -> Path:
    """The folder with google/rpc/*.proto, from googleapis-common-protos."""
    from google.rpc import status_pb2

    return Path(status_pb2.__file__).parents[2]


if __name__ == "__main__":
    for path in generate():
        sys.stdout.write(f"{path.relative_to(ROOT.parent)}\n")
