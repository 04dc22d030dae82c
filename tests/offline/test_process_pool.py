"""The processes of simulations: what they return, and that nothing is left of them however their parent ends."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import BrokenExecutor
from pathlib import Path

import psutil
import pytest

from cluster.offline.process_pool import ProcessPool

ROOT = Path(__file__).resolve().parents[2]
FOREVER_S = 600.0
STAYS = """
from cluster.offline.process_pool import ProcessPool
from tests.offline.test_process_pool import FOREVER_S, pid_of, stay
with ProcessPool(2) as pool:
    print(*pool.map(pid_of, range(8)), flush=True)
    list(pool.map(stay, [FOREVER_S] * 2))
"""


def pid_of(number: int) -> int:
    time.sleep(0.01)  # both get work
    return os.getpid()


def stay(seconds: float) -> None:
    time.sleep(seconds)


def inverse(number: int) -> float:
    return 1 / number


def shared_files(number: int) -> list[str]:
    """What this process maps of /dev/shm: a killed process would leave it there."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm" in line]


def test_results_come_in_order_and_errors_with_their_traceback() -> None:
    with ProcessPool(2) as pool:
        assert list(pool.map(inverse, [1, 2, 4])) == [1.0, 0.5, 0.25]
        with pytest.raises(ZeroDivisionError) as raised:
            list(pool.map(inverse, [1, 0]))
        assert "in inverse" in raised.value.__notes__[0]
        assert list(pool.map(shared_files, [1])) == [[]]
        with pytest.raises(BrokenExecutor):
            list(pool.map(os._exit, [3]))


def test_the_processes_end_when_their_parent_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", STAYS], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    children = [psutil.Process(pid) for pid in set(map(int, parent.stdout.readline().split()))]
    assert children
    parent.kill()
    parent.wait(10.0)
    _, left = psutil.wait_procs(children, timeout=10.0)
    for each in left:
        each.kill()
    assert not left


@pytest.mark.full
def test_ctrl_c_ends_a_simulation() -> None:
    source = "poisson:rate=8,lengths=100-1500/10-400,count=4000"
    command = [
        *(sys.executable, "-m", "cluster.cli", "simulate", "--compare", "sarathi,ours", "--model", "llama-2-7b"),
        *("--hardware", "a100-80gb", "--workers", "2", "--workload", source, "--ttft", "1", "--goodput"),
        *("--processes", "2"),
    ]
    simulating = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    until_s = time.monotonic() + 60.0
    while len(children := psutil.Process(simulating.pid).children()) < 3:  # one tracks resources
        assert simulating.poll() is None and time.monotonic() < until_s
        time.sleep(0.05)
    simulating.send_signal(signal.SIGINT)
    said, _ = simulating.communicate(timeout=20.0)
    _, left = psutil.wait_procs(children, timeout=5.0)
    assert not left and simulating.returncode == 1 and "Traceback" not in said, said
