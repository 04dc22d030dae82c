"""Waiting prompts are requeued if they gain enough, the last of a queue first; looking changes nothing."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from cluster.policy.routing.router import Placement
from cluster.policy.scaling.requeue import GAIN, Requeue
from cluster.spec import Role
from diptych.view import ClusterView
from tests.policy.views import Story, request, view, worker
from workers.request import SLO, Request

TARGET = SLO(ttft_s=2.0, tpot_s=0.1)
PICTURE = view(worker("p0"), worker("p1"), worker("d0"))


class Queue:
    """Prompts of one gateway, sent by hand; a prompt token takes 1 ms."""

    def __init__(self, routing: str = "slo", *, is_on: bool = True) -> None:
        self.story = Story(routing, slo=TARGET)
        policy = self.story.policy
        self.requeue = Requeue(policy._latency, policy.active, policy.index, is_on=is_on, ttft_s=None)

    def send(self, name: str, to: str = "p0", *, length: int = 500, first: int = 0, slo: SLO = TARGET) -> Request:
        wanted = request(name, length, first=first, slo=slo)
        self.story.policy.began(self.story.ask(PICTURE, wanted), Placement(to, "d0", "by hand"))
        return wanted

    def late(self, picture: ClusterView = PICTURE) -> list[list[str]]:
        return self.requeue.candidates(picture, self.story.now_s)

    def better(self, wanted: Request, picture: ClusterView = PICTURE) -> Placement | None:
        ask = self.story.ask(picture, wanted.retry((), fresh=False))
        return self.requeue.better_placement(ask, wanted.key, self.story.policy.choose)


def test_the_last_prompts_of_a_long_queue_move_until_both_queues_are_short() -> None:
    queue = Queue()
    sent = {wanted.key: wanted for wanted in (queue.send(f"r{n}", first=1000 * n) for n in range(8))}
    (keys,) = queue.late()
    assert keys == sorted(keys, reverse=True), "the last one first"
    moved = []
    for key in keys:
        placement = queue.better(sent[key])
        if placement is None:
            break
        assert placement.prefill == "p1"
        queue.story.policy.replace(queue.story.ask(PICTURE, sent[key].retry((), fresh=False)), key, placement)
        moved.append(key)
    expected = "4 s ahead of none; then 3.5 and 3 s against 0.5 and 1 s; 2.5 s against 1.5 s, as an idle one helps"
    assert moved == ["r7/0", "r6/0", "r5/0", "r4/0"], expected
    assert placement is None
    queue.story.policy.active.check()


def test_no_prompt_moves_for_a_small_gain() -> None:
    queue = Queue()
    sent = [queue.send(f"r{n}", first=1000 * n) for n in range(2)]
    assert queue.better(sent[1]) is None, f"it would gain half a second, {GAIN} of 2 s"
    third = queue.send("r2", first=9000)
    assert queue.better(third) is not None


def test_no_prompt_moves_without_an_slo_or_without_rebalancing() -> None:
    queue = Queue()
    queue.story = Story("slo")
    for routing in (Queue(), Queue(is_on=False)):
        for n in range(8):
            routing.send(f"r{n}", first=1000 * n)
        assert bool(routing.late()) is routing.requeue.is_on
    policy = queue.story.policy
    queue.requeue = Requeue(policy._latency, policy.active, policy.index, is_on=True, ttft_s=None)
    sent = [queue.send(f"r{n}", first=1000 * n, slo=SLO()) for n in range(8)]
    assert queue.better(sent[-1]) is None


def test_a_prompt_s_own_future_cache_is_no_reason_to_stay() -> None:
    queue = Queue()
    sent = [queue.send(f"r{n}", first=1000 * n) for n in range(6)]
    router: Any = queue.story.policy._router
    hashes = router.hashes(queue.story.ask(PICTURE, sent[-1]))
    queue.story.policy.index.expect(sent[-1].key, "p0", "1", hashes)
    assert queue.better(sent[-1]) is not None


def test_prompts_leave_a_worker_whose_new_decodes_slow_them() -> None:
    queue = Queue()
    sent = [queue.send(f"r{n}", first=1000 * n) for n in range(2)]
    assert queue.better(sent[1]) is None
    crowded = replace(worker("p0", running=9, used=90), role=Role.DECODE)
    picture = view(crowded, worker("p1"), worker("d0"))
    assert queue.late(picture)
    placement = queue.better(sent[1], picture)
    assert placement is not None and placement.prefill == "p1"


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(
        st.tuples(st.integers(1, 3000), st.sampled_from(["p0", "p1", "d0"]), st.booleans()), min_size=1, max_size=20
    ),
    routing=st.sampled_from(["slo", "least-loaded", "mooncake"]),
)
def test_looking_for_a_better_placement_changes_nothing(prompts: list[tuple[int, str, bool]], routing: str) -> None:
    """Records and index are unchanged, whatever is asked, and each prompt is offered once."""
    queue, sent = Queue(routing), []
    policy = queue.story.policy
    for number, (length, to, is_done) in enumerate(prompts):
        wanted = queue.send(f"r{number}", to, length=length, first=100 * number)
        if is_done:
            queue.story.prefilled(wanted)
        sent.append(wanted)
    queue.late()

    def known() -> object:
        active, index = policy.active, policy.index
        shelves = [(name, *map(list, (active.prefilling(name), active.decoding(name)))) for name in ("p0", "p1", "d0")]
        sums = [(active.assigned(name), active.worker_load(name)) for name in ("p0", "p1", "d0")]
        return shelves, sums, dict(index._expected_counts), dict(index._expected), dict(index._expected_holders)

    before = known()
    for wanted in sent:
        placement = queue.better(wanted)
        policy.active.check()
        assert known() == before
        work = policy.active.find(wanted.key)
        assert work is not None
        if placement is not None:
            assert work.prefilled_s is None and placement.prefill != work.prefill
