import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from workers.errors import ModelError
from workers.executor.threads import ComputeThread, CoreClaim, parse_cores, usable_cores

CORES = usable_cores()


@pytest.fixture(autouse=True)
def own_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep cores apart from those that workers of other tests hold."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_cores_are_claimed_once_and_come_back() -> None:
    first = CoreClaim(CORES, 1)
    second = CoreClaim(CORES, len(CORES))
    assert set(first.cores) | set(second.cores) == set(CORES) and not set(first.cores) & set(second.cores)
    first.release()
    assert CoreClaim(CORES, len(CORES)).cores == (CORES[0],)


def test_the_claim_of_a_process_that_died_is_free(tmp_path: Path) -> None:
    code = (
        "import os; from workers.executor.threads import CoreClaim;"
        f"claim = CoreClaim({CORES}, 1);"
        "print(claim.cores[0], flush=True); os.kill(os.getpid(), 9)"
    )
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == -9
    assert CoreClaim(CORES, 1).cores == (int(done.stdout),)


async def test_a_pinned_thread_computes_on_its_cores_alone() -> None:
    thread = ComputeThread("w", 1, str(CORES[-1]))
    assert await thread.run(lambda: os.sched_getaffinity(0)) == {CORES[-1]}
    assert await thread.run(torch.get_num_threads) == 1
    assert len(os.sched_getaffinity(0)) == len(CORES)  # the event loop stays free
    await thread.close()


async def test_two_workers_never_pin_the_same_core() -> None:
    first = ComputeThread("a", len(CORES), "auto")
    with pytest.raises(ModelError, match=r"b: 2 compute threads wanted, 0 of cores .* are free; lower engine.threads"):
        ComputeThread("b", 2, "auto")
    with pytest.raises(ModelError, match=r"b: 1 compute threads wanted, 0 .* are free; have fewer workers on this"):
        ComputeThread("b", 1, "auto")
    await first.close()
    second = ComputeThread("b", 1, "auto")
    await second.close()


async def test_unpinned_workers_are_warned_when_there_are_more_threads_than_cores(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = ComputeThread("a", len(CORES))
    assert not caplog.records
    second = ComputeThread("b", 1)
    assert "will slow each other down" in caplog.text
    assert await second.run(lambda: len(os.sched_getaffinity(0))) == len(CORES)
    await first.close()
    await second.close()


@pytest.mark.parametrize("cores", ["one", "", "0-", "999999"])
def test_cores_that_cannot_be_had_are_named(cores: str) -> None:
    with pytest.raises(ModelError, match=r"engine.cores"):
        parse_cores(cores)
