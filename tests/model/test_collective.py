"""Sums, gathers and activations between ranks, and the errors of ranks that wait for one that is gone or late."""

import secrets
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from tests.model.gangs import on_all_ranks
from workers.config import ParallelConfig
from workers.errors import RankLost
from workers.ops import collective, shared_sum
from workers.ops.collective import StageLink, TensorGroup, open_groups
from workers.ops.native.library import library

CPU = torch.device("cpu")
SIZES = [1, 7, 576, shared_sum.SLOT_BYTES // 4 + 3, 3 * shared_sum.SLOT_BYTES // 4]
METHODS = ["shared memory", "point to point"]


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "point to point":
        monkeypatch.setattr(collective, "open_shared_sum", lambda *_: None)
    elif library() is None:
        pytest.skip("needs the native kernels: install g++")
    return str(request.param)


def of_group(tensor: int, act: Callable[[TensorGroup], object], timeout_s: float = 30.0) -> list[object]:
    def rank(_: int, group: TensorGroup | None, link: StageLink | None) -> object:
        assert group is not None and link is None
        return act(group)

    return on_all_ranks(ParallelConfig(tensor), rank, timeout_s)


def shares_memory(group: TensorGroup) -> bool:
    return group._shared_sum is not None


def summand(rank: int, size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("tensor", [2, 3, 5])
def test_sums_are_in_the_order_of_ranks_on_every_rank(method: str, tensor: int) -> None:
    def act(group: TensorGroup) -> list[Tensor]:
        assert shares_memory(group) == (method == "shared memory")
        return [group.all_reduce(summand(group.rank, size)) for size in SIZES * 2]

    answers = of_group(tensor, act)
    for at, size in enumerate(SIZES * 2):
        wanted = summand(0, size)
        for rank in range(1, tensor):
            wanted = wanted + summand(rank, size)
        for answer in answers:
            assert isinstance(answer, list) and torch.equal(answer[at], wanted)


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_uneven_widths_are_gathered_on_the_first_rank(rows: int) -> None:
    widths = (3, 1, 6)

    def act(group: TensorGroup) -> Tensor | None:
        return group.gather(torch.full((rows, widths[group.rank]), float(group.rank)), widths)

    first, *others = of_group(3, act)
    assert isinstance(first, Tensor) and others == [None, None]
    assert torch.equal(first, torch.tensor([0.0] * 3 + [1.0] + [2.0] * 6).expand(rows, 10))


def test_seconds_are_counted_and_taken(method: str) -> None:
    def act(group: TensorGroup) -> tuple[float, float]:
        group.all_reduce(torch.ones(4))
        return group.take_comm_s(), group.take_comm_s()

    for counted in of_group(2, act):
        assert isinstance(counted, tuple) and counted[0] > 0 and counted[1] == 0


def test_stages_pass_activations_on_in_order() -> None:
    def act(rank: int, _: TensorGroup | None, link: StageLink | None) -> float:
        assert link is not None
        last = 0.0
        for step in range(20):  # more than may be under method
            x = torch.full((step + 1, 4), float(step)) if rank == 0 else link.receive((step + 1, 4), torch.float32, CPU)
            last = x[-1, -1].item()
            if rank < 2:
                link.send(x + 1)
        link.flush()
        assert (link.take_wait_s() > 0) == (rank > 0)
        return last

    assert on_all_ranks(ParallelConfig(1, 3), act) == [19, 20, 21]


@pytest.mark.parametrize("tensor", [2, 3])
def test_a_rank_that_fails_is_lost_to_those_that_wait_for_it(method: str, tensor: int) -> None:
    def act(group: TensorGroup) -> str:
        group.all_reduce(torch.ones(3))
        if group.rank == 1:
            return ""
        with pytest.raises(RankLost) as lost:
            group.all_reduce(torch.ones(3))
        return str(lost.value)

    first, second, *others = of_group(tensor, act)
    assert second == "" and all("is gone" in str(each) for each in [first, *others])


def test_the_loss_of_a_stage_reaches_all_stages_after_it() -> None:
    """Though those between keep the error, and the frames that it came through."""

    def act(rank: int, _: TensorGroup | None, link: StageLink | None) -> Exception | None:
        assert link is not None
        try:
            if rank:
                link.send(link.receive((2, 2), torch.float32, CPU))
        except RankLost as error:
            return error
        return None

    answers = on_all_ranks(ParallelConfig(1, 4), act)
    words = [f"rank {rank} (stage {rank}, tensor 0) is gone" for rank in range(3)]
    assert answers[0] is None
    assert all(word in str(each) for word, each in zip(words, answers[1:], strict=True))


def test_a_rank_that_does_not_answer_is_reported_as_late(method: str) -> None:
    given_up = threading.Event()

    def act(group: TensorGroup) -> str:
        if group.rank == 1:
            assert given_up.wait(30)
            return ""
        with pytest.raises(RankLost) as lost:
            group.all_reduce(torch.ones(3))
        given_up.set()
        return str(lost.value)

    first, _ = of_group(2, act, timeout_s=1.0)
    assert "rank 1 (stage 0, tensor 1) did not answer within 1 s" in str(first)


def test_ranks_that_do_not_come_are_named() -> None:
    with pytest.raises(RankLost, match=r"one of rank 1 \(stage 0, tensor 1\) did not answer within 0.5 s"):
        open_groups(HashStore(), ParallelConfig(2), 0, CPU, "127.0.0.1", 0.5)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(RankLost, match=r"rank 0 .* cannot listen at 192.0.2.1"):
        open_groups(HashStore(), ParallelConfig(2), 0, CPU, "192.0.2.1", 5.0)


def test_without_shared_memory_sums_go_point_to_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_sum, "_make", lambda _: None)
    assert (
        of_group(2, lambda group: (shares_memory(group), group.all_reduce(torch.ones(1)).item())) == [(False, 2.0)] * 2
    )


@pytest.mark.skipif(library() is None, reason="needs the native kernels: install g++")
def test_a_process_id_that_means_another_process_shares_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for ranks of one host in two containers."""
    monkeypatch.setattr(shared_sum, "_identity", lambda _: secrets.token_hex(8))
    assert (
        of_group(2, lambda group: (shares_memory(group), group.all_reduce(torch.ones(1)).item())) == [(False, 2.0)] * 2
    )


@pytest.mark.skipif(library() is None, reason="needs the native kernels: install g++")
def test_the_shared_memory_has_no_name_that_a_killed_rank_would_leave() -> None:
    def act(group: TensorGroup) -> bool:
        assert shares_memory(group)
        maps = Path("/proc/self/maps").read_text()
        return "/memfd:diptych-sum" in maps and "/dev/shm/diptych" not in maps

    assert of_group(2, act) == [True] * 2


OTHER = """
import sys, datetime, torch
from torch.distributed import TCPStore
from workers.config import ParallelConfig
from workers.ops.collective import open_groups
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, timeout=datetime.timedelta(seconds=60))
group, _ = open_groups(store, ParallelConfig(2), 1, torch.device("cpu"), "127.0.0.1", 60.0)
print(group.all_reduce(torch.ones(2)).tolist(), flush=True)
sys.stdin.read()
"""


def test_the_death_of_a_process_is_noticed() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    command = [sys.executable, "-c", OTHER, str(store.port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        try:
            group, _ = open_groups(store, ParallelConfig(2), 0, CPU, "127.0.0.1", 60.0)
            assert group is not None and other.stdout is not None
            assert group.all_reduce(torch.ones(2)).tolist() == [2.0, 2.0]
            assert other.stdout.readline() == "[2.0, 2.0]\n"
            other.kill()
            with pytest.raises(RankLost, match=r"rank 1 \(stage 0, tensor 1\) is gone"):
                group.all_reduce(torch.ones(2))
            group.close()
        finally:
            other.kill()


@pytest.mark.parametrize("what", ["sum", "activations"])
def test_close_wakes_a_thread_that_waits(method: str, what: str) -> None:
    """The peer is connected but silent, like a stopped process: neither its exit nor the timeout would help."""
    given_up = threading.Event()

    def act(rank: int, group: TensorGroup | None, link: StageLink | None) -> str:
        mine = group or link
        assert mine is not None
        if rank == (1 if group else 0):
            assert given_up.wait(30)
            return ""
        closing = threading.Timer(0.3, mine.close)
        closing.start()
        with pytest.raises(RankLost) as lost:
            group.all_reduce(torch.ones(3)) if group else mine.receive((2, 2), torch.float32, CPU)  # type: ignore[union-attr]
        given_up.set()
        return str(lost.value)

    answers = on_all_ranks(ParallelConfig(2) if what == "sum" else ParallelConfig(1, 2), act, timeout_s=60.0)
    assert any("has closed its" in answer for answer in answers)
