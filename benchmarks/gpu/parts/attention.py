"""The device's attention against the reference: decodes, chunks, windows, soft caps, dtypes; rows bit for bit."""

import concurrent.futures
import itertools
import multiprocessing

import torch

from workers.ops.attention import REFERENCE, TRITON, TRITON_INVARIANT, best_attention
from workers.ops.batch import RaggedBatch, Scoring
from workers.ops.narrow import compute_dtype, to_slots

SHAPES = ((8, 4, 128), (2, 7, 64), (1, 8, 256), (3, 1, 40))  # kv_heads, group, head_dim
DTYPES = (torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.float32, torch.float16)  # most useful first
WINDOWS = (0, 100)
SIZE = 16  # of a block
PROCESSES = 8  # compiling takes longer than running


def measure(device: torch.device, *, tiny: bool) -> dict[str, object]:
    """Raises if a result differs by more than rounding, or a row of a chunk from its decode by one bit."""
    shapes, dtypes = (SHAPES[-1:], DTYPES[:1]) if tiny else (SHAPES, DTYPES)
    cases = list(itertools.product(dtypes, shapes))
    spawn = multiprocessing.get_context("spawn")
    found, wrong = [], []
    with concurrent.futures.ProcessPoolExecutor(min(len(cases), PROCESSES), spawn) as pool:
        asked = {pool.submit(_compare, shape, dtype, str(device)): (dtype, shape) for dtype, shape in cases}
        for each in concurrent.futures.as_completed(asked):
            failure = each.exception()
            print(*asked[each], f"failed: {failure}" if failure else "passed", flush=True)  # if the part is cut off
            if failure:
                wrong.append(str(failure))
            else:
                found.append(each.result())
    if wrong:
        raise AssertionError("; ".join(wrong))
    worst: dict[str, float] = {}
    for name, error in itertools.chain.from_iterable(errors for errors, *_ in found):
        worst[name] = max(error, worst.get(name, 0.0))
    figures: dict[str, object] = {f"worst_error_{name}": error for name, error in worst.items()}
    figures["cases"] = sum(cases for _, cases, _ in found)
    figures["rows_with_equal_bits_alone"] = sum(rows for *_, rows in found)
    return figures | {"chosen_for_bfloat16": best_attention(device, torch.bfloat16, deterministic=False).name}


def _compare(
    shape: tuple[int, int, int], dtype: torch.dtype, device_name: str
) -> tuple[list[tuple[str, float]], int, int]:
    """(dtype, relative error) of each case, the number of cases, and of rows compared bit for bit."""
    device, (kv_heads, group, head_dim) = torch.device(device_name), shape
    is_tiny = device.type == "cpu"
    generator = torch.Generator().manual_seed(0)
    lengths = [1, 1, 40, 70] if is_tiny else [1, 1, 1, 300, 1000]
    contexts = [5, 70, 70, 70] if is_tiny else [1, 700, 5000, 300, 2500]
    errors: list[tuple[str, float]] = []
    rows = 0
    other: list[str] = []
    for window in WINDOWS:
        softcap = 30.0 if window and head_dim == 256 else 0.0
        query_dtype, name = compute_dtype(device, dtype), str(dtype).removeprefix("torch.")
        what = f"{name}, {kv_heads} x {group} heads of {head_dim}, window {window}"
        tables = _tables(contexts, SIZE, generator)
        pool = torch.randn(int(tables.max()) + 1, kv_heads, 2, 2, SIZE, head_dim, generator=generator)
        pool = to_slots(pool, dtype).to(device)
        tokens = sum(lengths)
        query = torch.randn(tokens, kv_heads * group, head_dim, generator=generator).to(device, query_dtype)
        key, value = torch.randn(2, tokens, kv_heads, head_dim, generator=generator).to(device, query_dtype)
        batch = _batch(tables, lengths, contexts, device)
        theirs, ours = pool.clone(), pool.clone()
        REFERENCE.write_kv(theirs, key, value, 1, batch.slot_mapping)
        TRITON.write_kv(ours, key, value, 1, batch.slot_mapping)
        if not torch.equal(theirs.view(torch.uint8), ours.view(torch.uint8)):
            raise AssertionError(f"write_kv differs: {what}")
        arguments = (1, batch, Scoring(head_dim**-0.5, window, softcap))
        wanted, found = REFERENCE.attend(query.float(), theirs, *arguments), TRITON.attend(query, ours, *arguments)
        error = float((found.float() - wanted).norm() / wanted.norm())
        errors.append((name, error))
        if not error < (1e-5 if query_dtype == torch.float32 else 1e-2):
            raise AssertionError(f"{what}: error {error:.2g}")
        if is_tiny:  # the interpreter's products depend on a row's place
            continue
        found = TRITON_INVARIANT.attend(query, ours, *arguments)
        if not torch.allclose(found.float(), wanted, 2e-2, 2e-2):
            raise AssertionError(f"{what}: the invariant variant is wrong")
        row = 0
        for table, length, context in zip(tables, lengths, contexts, strict=True):
            for nth in {0, length // 2, length - 1}:
                own = context - length + nth + 1
                alone = _batch(table[None], [1], [own], device)
                answer = TRITON_INVARIANT.attend(query[row + nth : row + nth + 1], ours, 1, alone, *arguments[2:])
                if not torch.equal(answer[0], found[row + nth]):
                    other.append(f"{what}: query {nth} of {length} with {own} keys")
                rows += 1
            row += length
    if other:
        raise AssertionError(f"{len(other)} of {rows} rows have other bits alone: {'; '.join(other[:8])}")
    return errors, len(errors), rows


def _tables(contexts: list[int], size: int, generator: torch.Generator) -> torch.Tensor:
    counts = [-(-context // size) for context in contexts]
    blocks = torch.randperm(sum(counts), generator=generator).tolist()
    rows = []
    for count in counts:
        own, blocks = blocks[:count], blocks[count:]
        rows.append(own + own[:1] * (max(counts) - count))
    return torch.tensor(rows, dtype=torch.int32)


def _batch(tables: torch.Tensor, lengths: list[int], contexts: list[int], device: torch.device) -> RaggedBatch:
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    slots = [
        int(table[position // SIZE]) * SIZE + position % SIZE
        for table, length, context in zip(tables, lengths, contexts, strict=True)
        for position in range(context - length, context)
    ]
    num_decodes = next((row for row, length in enumerate(lengths) if length > 1), len(lengths))
    return RaggedBatch(
        starts.to(device),
        torch.tensor(contexts, dtype=torch.int32, device=device),
        tables.to(device),
        torch.tensor(slots, device=device),
        max(lengths),
        max(contexts),
        num_decodes,
    )
