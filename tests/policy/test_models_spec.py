"""Several models in a cluster file: the parts of each, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from cluster.cli import main
from cluster.control.replicas import order_of
from cluster.policy.scaling.elastic import Elastic, ElasticModels, elastic_policy
from cluster.policy.scaling.offered_load import LoadReport, Sample
from cluster.precheck import check_model
from cluster.spec import ClusterSpec, SpecError
from cluster.spec_file import load_spec, parse_spec
from diptych.view import ClusterView, Decision, PoolView, WorkerState, WorkerView
from tests.model.tiny import write_tiny_llama
from workers.stats import WorkerStats

SPLIT = [{"name": "prefill", "role": "prefill"}, {"name": "decode", "role": "decode"}]
OTHER: dict[str, object] = {"name": "other", "role": "mixed", "model": "other", "engine": {"block_size": 24}}
FILE = """
model: one
pools:
  - {name: prefill, role: prefill, hardware: H100, engine: {kv_blocks: 64}}
  - {name: decode, role: decode, hardware: H100, engine: {kv_blocks: 64}}
  - {name: other, role: mixed, hardware: H100, model: other, engine: {kv_blocks: 64}}
"""


def spec(*more: dict[str, object], **keys: object) -> ClusterSpec:
    return parse_spec({"model": "one", "pools": [*SPLIT, *more], **keys})


def test_each_model_has_a_part_of_the_cluster() -> None:
    whole = spec(OTHER)
    assert whole.models == ("one", "other")
    part = whole.of_model("other")
    assert part.model == "other" and [pool.name for pool in part.pools] == ["other"]
    assert part == replace(whole, model="other", pools=whole.pools[2:])
    assert spec().of_model("one") == spec() and spec().models == ("one",)


def test_workers_share_prefix_lengths_only_within_a_model() -> None:
    whole = spec(OTHER)
    assert order_of(whole, whole.pools[0], "prefill-0", "").config.prefix_tokens == 16
    config = order_of(whole, whole.pools[2], "other-0", "").config
    assert (config.model, config.prefix_tokens) == ("other", 24)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"name": "p", "role": "prefill", "model": "other"}, "there is no decode pool of other (and no mixed one)"),
        ({**OTHER, "replicas": 0}, "there is no worker of other in any of them"),
    ],
)
def test_the_pools_of_each_model_must_serve_it(more: dict[str, object], says: str) -> None:
    with pytest.raises(SpecError) as refused:
        spec(more)
    assert says in str(refused.value)


def test_a_model_that_no_pool_serves_is_refused() -> None:
    with pytest.raises(SpecError, match="model is one, but all pools serve other"):
        parse_spec({"model": "one", "pools": [OTHER]})


@pytest.mark.parametrize("command", [["simulate", "-f"], ["serve", "mine", "-f"]])
def test_commands_for_one_model_say_so(command: list[str], tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text(FILE)
    more = ["--workload", "poisson:rate=1,count=2,lengths=8/8"] if command[0] == "simulate" else []
    result = CliRunner().invoke(main, [*command, str(path), *more])
    assert result.exit_code == 1 and result.stderr.count("\n") == 1
    assert "pools: they serve several models (one, other), and" in result.stderr


def test_a_simulation_refuses_adapters_by_name(tmp_path: Path) -> None:
    path = tmp_path / "adapters.yaml"
    path.write_text("model: one\nadapters: {sql: /x}\npools: [{name: a, role: mixed}]\n")
    result = CliRunner().invoke(main, ["simulate", "-f", str(path), "--workload", "poisson:rate=1,count=2,lengths=8/8"])
    assert result.exit_code == 1 and "adapters: a simulation knows none; leave them out, and" in result.stderr


def test_each_pool_is_checked_against_its_own_model(tmp_path: Path) -> None:
    one, other = write_tiny_llama(tmp_path / "one"), write_tiny_llama(tmp_path / "other", num_heads=3, num_kv_heads=3)
    path = tmp_path / "two.yaml"
    pool = "{name: %s, role: mixed, parallel: {tensor: 4}, model: %s}"
    path.write_text(f"model: {one}\npools:\n  - {pool % ('a', one)}\n  - {pool % ('b', other)}\n")
    check_model(load_spec(path), one, str(one))
    with pytest.raises(SpecError, match=r"pools\[1\]"):
        check_model(load_spec(path), other, str(other))


def test_models_take_turns_in_scaling() -> None:
    """Both are overloaded; each sees only its own load and workers."""
    pool = {"role": "mixed", "replicas": {"min": 1, "max": 3}, "engine": {"kv_blocks": 100}}
    pools = [{"name": name, "model": name, **pool} for name in ("one", "other")]
    elastic = {"dwell_s": 0.0, "cooldown_s": 0.0}
    whole = parse_spec({"model": "one", "pools": pools, "elastic": elastic, "gateway": {"slo": {"ttft_s": 0.5}}})
    subject = elastic_policy(whole)
    assert isinstance(subject, ElasticModels) and isinstance(elastic_policy(spec()), Elastic)
    stats = WorkerStats(total_blocks=100, free_blocks=100)
    workers = (
        WorkerView(f"{each.name}-0", each.name, each.role, WorkerState.READY, "1", stats=stats) for each in whole.pools
    )
    views = (PoolView(each.name, each.role, 1, *each.bounds, each.name) for each in whole.pools)
    view = ClusterView(1, "c", None, tuple(workers), pools=tuple(views))
    made: list[Decision | None] = []
    for now_s in range(100, 160):
        for model in whole.models:
            samples = (Sample(4000, 4000, 0.5, None),) * 50
            subject.on_report(LoadReport("g", 1.0, 50, 200_000, 5000, samples, model), float(now_s))
        made.append(subject.decide(view, float(now_s)))
    grown = [each.pool for each in made if each is not None and each.kind == "grow"]
    assert {"one", "other"} <= set(grown)


def test_a_role_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(SpecError, match=r"pools\[0\]\.role: 'prefil' is not one of prefill, decode, mixed"):
        parse_spec({"model": "m", "pools": [{"name": "a", "role": "prefil"}]})
    with pytest.raises(SpecError, match=r"^pools is missing"):
        parse_spec({"model": "m"})
