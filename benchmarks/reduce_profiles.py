"""Creates `workers/profiles/data` from the published measurements: `python -m benchmarks.reduce_profiles FOLDER`.

FOLDER holds `distserve`, `splitwise` and `vidur` in the layout of their repositories (see data/LICENSES.md there).

    distserve.json   the coefficients and the KV capacities, unchanged, in one file
    splitwise.csv    the median over repetitions and answer lengths of each prompt length and batch
    vidur_layers.csv medians of each operator at the token counts below; thinned, from up to 456 to at most 21 points
    vidur_links.csv  medians of sends and of sums within a node, first size at or above each power of two
"""

import csv
import gzip
import io
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

from workers.profiles.hardware import DATA
from workers.profiles.published import OPERATORS

FILES = ("distserve.json", "splitwise.csv", "vidur_layers.csv", "vidur_links.csv")
# fmt: off
TOKENS = (
    1, 8, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096,
    6144, 8192, 12288, 16384, 24576, 32768,
)
# fmt: on
SIZES = tuple(2**power for power in range(11, 27))
Row = Sequence[object]


def distserve(folder: Path) -> str:
    engines = {"distserve": "profiler-a100-80g.distserve.json", "vllm": "profiler-a100-80g.vllm.json"}
    fits = {engine: json.loads((folder / name).read_text()) for engine, name in engines.items()}
    capacity: dict[str, dict[str, int]] = defaultdict(dict)
    for row in _rows(folder / "max_num_tokens.csv"):
        capacity[row["model"]][f"{row['tp']},{row['pp']}"] = int(row["max_num_tokens"])
    return json.dumps({"fits_ms": fits, "max_num_tokens": capacity}, indent=1) + "\n"


def splitwise(folder: Path) -> str:
    prompt_ms, token_ms = defaultdict(list), defaultdict(list)
    for row in _rows(folder / "perf_model.csv"):
        sizes = tuple(int(row[name]) for name in ("tensor_parallel", "prompt_size", "batch_size"))
        key = (row["model"], row["hardware"], *sizes)
        prompt_ms[key].append(float(row["prompt_time"]))
        token_ms[key].append(float(row["token_time"]))
    header = ("model", "hardware", "tensor", "prompt", "batch", "prompt_ms", "token_ms")
    rows = ((*key, _short(median(prompt_ms[key])), _short(median(token_ms[key]))) for key in sorted(prompt_ms))
    return _csv(header, rows)


def vidur_layers(folder: Path) -> str:
    rows: list[Row] = []
    for path in sorted((folder / "mlp").glob("*.csv.gz")):
        hardware, model = path.name.split("__")[0].split("_", 1)
        model = model.split("_")[-1]
        seen = defaultdict(list)
        for row in _rows(path):
            tokens = int(row["num_tokens"])
            if tokens in TOKENS:
                seen[int(row["num_tensor_parallel_workers"]), tokens].append(row)
        for (tensor, tokens), found in sorted(seen.items()):
            medians = (median(float(row[f"time_stats.{name}.median"]) for row in found) for name in OPERATORS)
            rows.append((model, hardware, tensor, tokens, *map(_short, medians)))
    return _csv(("model", "hardware", "tensor", "tokens", *OPERATORS), rows)


def vidur_links(folder: Path) -> str:
    rows: list[Row] = []
    for path in sorted((folder / "network").glob("*_dgx__*.csv.gz")):
        hardware, kind = path.name.removesuffix(".csv.gz").split("_dgx__")
        seen: dict[tuple[int, bool], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for row in _rows(path):
            ranks, in_node = int(row["num_workers"]), int(row["devices_per_node"])
            if in_node == ranks or (kind == "send_recv" and in_node == 1):
                seen[ranks, in_node == ranks][int(row["size"])].append(float(row[f"time_stats.{kind}.median"]))
        for (ranks, inside), by_size in sorted(seen.items()):
            for size in sorted({min(each for each in by_size if each >= least) for least in SIZES}):
                where = "intra-node" if inside else "inter-node"
                rows.append((hardware, kind, where, ranks, size, _short(median(by_size[size]))))
    return _csv(("hardware", "kind", "where", "ranks", "bytes", "ms"), rows)


def reduced(folder: Path) -> dict[str, str]:
    """The text of each data file. Raises OSError when an original is missing."""
    return {
        "distserve.json": distserve(folder / "distserve"),
        "splitwise.csv": splitwise(folder / "splitwise"),
        "vidur_layers.csv": vidur_layers(folder / "vidur"),
        "vidur_links.csv": vidur_links(folder / "vidur"),
    }


def _rows(path: Path) -> list[dict[str, str]]:
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    return list(csv.DictReader(io.StringIO(text)))


def _short(value: float) -> str:
    return f"{value:.5g}"


def _csv(header: Sequence[str], rows: Iterable[Row]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        print("usage: python -m benchmarks.reduce_profiles FOLDER (with distserve, splitwise, vidur)", file=sys.stderr)
        return 2
    try:
        made = reduced(Path(arguments[0]))
    except OSError as error:
        print(f"an original is missing: {error}", file=sys.stderr)
        return 1
    for name, text in made.items():
        (DATA / name).write_text(text)
        print(f"{name}: {len(text)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
