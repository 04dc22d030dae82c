"""A cluster is measured through its gateway: the fit finds the cost behind the steps, and the file keeps it."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from cluster.cli import main
from cluster.offline.profile import measure as module
from cluster.offline.profile.measure import measure
from cluster.offline.profile.overhead import measure_overhead
from cluster.offline.profile.slowdown import measure_slowdown
from cluster.offline.profile.steps import HELD_OUT, SEEN, measure_steps
from diptych.errors import DiptychError
from diptych.shapes import Shape
from tests.offline.profile.served import COST, served, spec
from workers.config import ByteSize, CacheConfig
from workers.costs import LinearCost
from workers.profiles.fit import COEFFICIENTS, Point
from workers.profiles.measured import ClusterProfile, Interference, LinkProfile, PoolProfile, load, save
from workers.profiles.profile_errors import ProfileError

POINTS = (Point(Shape(((64, 0),)), 0.2, False), Point(Shape((), 4, 100), 0.05, True))
POOLS = (
    PoolProfile("prefill", 1, 1, LinearCost(), POINTS, 0.001, 0.0, 0.002),
    PoolProfile("decode", 2, 1, LinearCost(), POINTS, 0.001, 0.0001, 0.002),
)
PROFILE = ClusterProfile(
    "split",
    "smollm2",
    "2026-01-02T03:04:05+00:00",
    "2 cores",
    "python 3.11",
    8192,
    49152,
    POOLS,
    (LinkProfile("prefill", "decode", "tcp", 0.001, 2e9), LinkProfile("decode", "decode", "nixl", 0.003, 4e9)),
    (Interference("prefill", "decode", 1.2),),
    46_080,
    0.004,
    {"prefill_queue": 0.001},
)


def ignore(what: str, done: int, total: int | None) -> None:
    """No progress is shown."""


@pytest.mark.full
async def test_a_profile_has_the_cost_that_made_the_steps() -> None:
    made = spec()
    made = replace(made, pools=tuple(replace(pool, cache=CacheConfig(ByteSize(1 << 26))) for pool in made.pools))
    async with served(made) as (client, runtime):
        found = await measure(client, ignore, rounds=1)
        for pool in found.pools:
            for name in COEFFICIENTS:
                assert getattr(pool.cost, name) == pytest.approx(getattr(COST, name), rel=1e-3)
            assert pool.error.points and pool.error.greatest < 1e-3
        assert {pool.pool for pool in found.pools} == {"prefill", "decode"}
        assert [(link.owner, link.reader) for link in found.links] == [("prefill", "decode")]
        assert {(each.pool, each.other) for each in found.interference} == {
            ("prefill", "decode"),
            ("decode", "prefill"),
        }
        assert found.kv_token_bytes == 30 * 3 * 64 * 2 * 4
        assert found.single_request_s["prefill_compute"] > 0.0
        for worker in runtime.workers.values():
            worker.engine.check()
            assert not worker.engine.has_work


async def test_an_engine_of_small_budgets_is_fitted_by_what_it_takes() -> None:
    async with served(spec(max_batch_tokens=64, max_running=4, kv_blocks=130)) as (client, _):
        steps = await measure_steps(client, "decode-0", 1, lambda done, total: None)
        assert 10 < len(steps.points) < len(SEEN) + len(HELD_OUT)
        assert all(point.shape.step_tokens <= 64 and point.shape.batch <= 4 for point in steps.points)


async def test_a_worker_that_cannot_decode_a_crowd_is_measured_alone() -> None:
    async with served(spec(max_running=2)) as (client, _):
        overhead = await measure_overhead(client, "decode-0", 1000)
        assert overhead.gap_s > 0.0 and overhead.gap_row_s == 0.0 and overhead.frontend_s > 0.0


async def test_requests_that_do_not_end_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.offline.profile.overhead.TIMEOUT_S", 0.3)
    async with served(spec(), LinearCost(0.2, 0.0, 0.0, 0.0, 0.0)) as (client, _):
        with pytest.raises(DiptychError) as caught:
            await measure_overhead(client, "decode-0", 1000)
        assert caught.value.code == "DEADLINE_EXCEEDED"


async def test_an_engine_too_small_for_a_fit_says_what_to_raise() -> None:
    async with served(spec(max_batch_tokens=4, max_running=1, kv_blocks=8)) as (client, _):
        with pytest.raises(ProfileError, match=r"decode-0 .*too few.*max_batch_tokens"):
            await measure_steps(client, "decode-0", 1, lambda done, total: None)


async def test_steps_that_take_no_time_are_no_measurement() -> None:
    async with served(spec(), LinearCost(0.0, 0.0, 0.0, 0.0, 0.0)) as (client, _):
        with pytest.raises(ProfileError, match="take no time"):
            await measure_steps(client, "decode-0", 1, lambda done, total: None)


async def test_a_busy_worker_is_not_measured_and_the_error_names_it() -> None:
    async with served(spec(), LinearCost(0.02, 0.0, 0.0, 0.0, 0.0)) as (client, runtime):

        async def ask() -> None:
            async for _ in client.generate([5, 6, 7], max_tokens=64, ignore_eos=True):
                pass

        asking = asyncio.ensure_future(ask())
        async with asyncio.timeout(30.0):
            while not runtime.workers["decode-0"].engine.stats().running:
                await asyncio.sleep(0.005)
        with pytest.raises(DiptychError, match="decode-0: this worker has work") as caught:
            await client.measure("decode-0", SEEN[0])
        assert caught.value.code == "RESOURCE_EXHAUSTED"
        await asking


async def test_a_worker_that_is_not_there_is_named_with_those_that_are() -> None:
    async with served(spec()) as (client, _):
        with pytest.raises(
            DiptychError, match="'elsewhere' is not ready here; ready are: prefill-0, decode-0"
        ) as caught:
            await client.measure("elsewhere", SEEN[0])
        assert caught.value.code == "INVALID_ARGUMENT"


@pytest.mark.full
async def test_simulated_workers_do_not_slow_each_other() -> None:
    async with served(spec(), LinearCost(0.01, 0.0, 0.0, 0.0, 0.0)) as (client, _):
        one, other = (await client.status()).view.workers
        found = await measure_slowdown(client, one, other, False, 1000)
        assert [each.ratio for each in found] == pytest.approx([1.0, 1.0])
        assert [(each.phase, each.other_phase) for each in found] == [("prefill", "decode"), ("decode", "prefill")]


async def test_a_prefill_worker_is_measured_while_the_other_answers() -> None:
    async with served(spec(), LinearCost(0.004, 0.0, 0.0, 0.0, 0.0)) as (client, runtime):
        prefill, decode = (await client.status()).view.workers
        steps, gaps = await measure_slowdown(client, prefill, decode, True, 1000)
        assert steps.ratio == pytest.approx(1.0) and gaps.ratio > 0.0
        assert runtime.workers["decode-0"].engine.stats().steps >= 240  # the tokens of an answer


async def test_answers_that_fail_end_the_measurement() -> None:
    async with served(spec()) as (client, _):
        prefill, decode = (await client.status()).view.workers
        with pytest.raises(DiptychError, match="token ids end at 999"):
            await measure_slowdown(client, prefill, decode, True, 1 << 20)


def test_a_pools_two_workers_are_as_slow_as_the_slower() -> None:
    found = [Interference("a", "a", 1.1), Interference("a", "a", 1.3), Interference("a", "b", 1.0)]
    assert list(module._worst(found)) == [Interference("a", "a", 1.3), Interference("a", "b", 1.0)]


# ---- the file ----------------------------------------------------------------------------------------------------


def test_single_requests_say_how_much_longer_a_prompt_takes_on_an_idle_worker() -> None:
    step_s = PROFILE.pool("prefill").served.prefill_seconds(64)
    assert replace(PROFILE, single_request_s={"prefill_compute": 1.2 * step_s}).idle_ratio("prefill") == pytest.approx(
        1.2
    )
    assert replace(PROFILE, single_request_s={"prefill_compute": 0.9 * step_s}).idle_ratio("prefill") == 1.0
    assert PROFILE.idle_ratio("prefill") == 1.0  # a profile without them


def test_a_profile_comes_back_from_its_file(tmp_path: Path) -> None:
    save(PROFILE, tmp_path / "p.json")
    assert load(tmp_path / "p.json") == PROFILE


def test_what_a_pool_costs_has_its_gaps_and_its_slowest_link() -> None:
    cost = PROFILE.cost("decode")
    assert cost.step_s == pytest.approx(LinearCost().step_s + 0.001)
    assert cost.decode_row_s == pytest.approx(LinearCost().decode_row_s + 0.0001)
    assert (cost.transfer_latency_s, cost.transfer_byte_s) == (0.003, 1 / 2e9)
    assert PROFILE.cost("prefill").transfer_byte_s == LinearCost().transfer_byte_s
    assert PROFILE.pool("decode").error.points == 1
    with pytest.raises(ProfileError, match="'mixed' was not measured; the profile of split has prefill, decode"):
        PROFILE.cost("mixed")


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (None, "cannot be read"),
        ("{", "no profile"),
        ("[1]", "no profile"),
        ('{"cluster": "x"}', "missing required field"),
        ("negative", "step_s is -1"),
        ("newer", "version is 99"),
        ("empty", "pools is empty"),
    ],
)
def test_a_bad_file_is_one_clear_error(tmp_path: Path, content: str | None, what: str) -> None:
    file = tmp_path / "p.json"
    save(PROFILE, file)
    document = json.loads(file.read_text())
    if content == "negative":
        document["pools"][0]["cost"]["step_s"] = -1
    elif content == "newer":
        document["version"] = 99
    elif content == "empty":
        document["pools"] = []
    if content is None:
        file.unlink()
    else:
        file.write_text(json.dumps(document) if content[0].isalpha() else content)
    with pytest.raises(ProfileError, match=what) as caught:
        load(file)
    assert "diptych profile" in str(caught.value) and "\n" not in str(caught.value)


def test_figures_below_zero_are_refused() -> None:
    with pytest.raises(ProfileError, match="gap_s"):
        replace(POOLS[0], gap_s=-0.1)
    with pytest.raises(ProfileError, match="bytes_per_s"):
        LinkProfile("a", "b", "tcp", 0.0, float("nan"))


# ---- the command -------------------------------------------------------------------------------------------------


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["profile", *arguments])
    assert result.exit_code != 0 and result.stdout == "", result.output
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("Error: ") and "Traceback" not in result.stderr
    return last


def test_no_server_is_one_clear_line(tmp_path: Path) -> None:
    message = refused("--endpoint", "127.0.0.1:9", "-o", str(tmp_path / "p.json"))
    assert "127.0.0.1:9" in message
    assert not (tmp_path / "p.json").exists()


def test_a_missing_output_folder_is_reported_before_measuring(tmp_path: Path) -> None:
    assert "is not a folder; create it first" in refused("-o", str(tmp_path / "nowhere" / "p.json"))


def test_no_such_cluster_file(tmp_path: Path) -> None:
    assert "cannot be read" in refused("-f", str(tmp_path / "none.yaml"), "-o", str(tmp_path / "p.json"))
