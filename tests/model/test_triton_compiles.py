"""Every kernel compiles for an H200, which needs no GPU, and fits into its multiprocessors."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton")

KERNELS = {
    *("_attend_chunk", "_attend_span", "_merge_spans", "_write", "_rms_norm", "_gated", "_rotate"),
    *("_multiply", "_add", "_shrink", "_expand", "_conv", "_rule"),
    *("_summarize", "_sample", "_decide", "_bound", "_digest", "_copy"),
}


@pytest.fixture(scope="module")
def variants() -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-m", "tests.model.compiled_kernels"]
    made = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550)
    assert made.returncode == 0, made.stderr[-3000:]
    return [json.loads(line) for line in made.stdout.splitlines()]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_every_kernel_compiles_and_fits(variants: list[dict[str, Any]]) -> None:
    assert {each["kernel"] for each in variants} == KERNELS
    for each in variants:
        assert each["shared_bytes"] <= 227 << 10 and each["stack_bytes"] <= 1024, each
        assert each["registers"] * 32 * each["warps"] <= 65536, each  # a launch fails otherwise


@pytest.mark.full
@pytest.mark.timeout(600)
def test_slots_are_loaded_as_wide_as_they_are_aligned(variants: list[dict[str, Any]]) -> None:
    """Quantized slots begin at any multiple of 4 bytes: a wider load would fail on the device."""
    attention = [each for each in variants if each["kernel"] in ("_attend_chunk", "_attend_span")]
    quantized = [each for each in attention if "int8" in each["case"] or "float8" in each["case"]]
    assert len(quantized) >= 8 and all(set(each["copies"]) <= {4} for each in quantized)
    halves = [each for each in attention if "16 KV" in each["case"] and "heads of 128" in each["case"]]
    assert len(halves) >= 8 and all(16 in each["copies"] for each in halves)
    chunks = [each for each in halves if each["kernel"] == "_attend_chunk"]
    assert any(each["has_wgmma"] for each in chunks)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_invariant_attention_rounds_after_each_operation(variants: list[dict[str, Any]]) -> None:
    """Else a score's product with the scale would be rounded where a mask follows, and not rounded where none does."""
    halves = [each for each in variants if each["case"].startswith("invariant") and "float32" not in each["case"]]
    assert {each["kernel"] for each in halves} == {"_attend_chunk", "_attend_span", "_merge_spans"}
    assert all(each["fused"] == [0, False] for each in halves)
    others = [each for each in variants if each["kernel"] == "_attend_chunk" and each not in halves]
    assert all(each["fused"][0] for each in others)  # the check finds them
