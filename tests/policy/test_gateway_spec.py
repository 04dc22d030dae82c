"""Classes and tenants in the cluster file; contradictions are refused with the reason."""

import pytest

from cluster.spec import ClassSpec, SpecError
from cluster.spec_file import parse_spec


def gateway(**keys: object) -> dict[str, object]:
    return {"model": "m", "pools": [{"name": "m", "role": "mixed"}], "gateway": keys}


def test_classes_and_tenants_are_read() -> None:
    spec = parse_spec(
        gateway(
            admission="slo",
            classes={"interactive": {"ttft_s": 1, "tpot_s": 0.1}, "batch": {"priority": 1, "max_wait_s": 600}},
            tenants={"alice": 0.7, "bob": 0.2, "*": 0.1},
        )
    ).gateway
    assert spec.classes == {"interactive": ClassSpec(1.0, 0.1), "batch": ClassSpec(priority=1, max_wait_s=600.0)}
    assert spec.tenants == {"alice": 0.7, "bob": 0.2, "*": 0.1}
    assert [each.patience_s for each in spec.classes.values()] == [60.0, 600.0]
    assert ClassSpec(ttft_s=100.0).patience_s == 100.0


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tenants": {"a": 0.7, "b": 0.2}}, "gateway: tenants: the shares sum to 0.9; they must sum to 1"),
        ({"tenants": {"a": 1.2, "b": -0.2}}, "gateway: tenants.a is 1.2; a share lies above 0 and is at most 1"),
        ({"tenants": {"a": float("nan")}}, "gateway: tenants.a is nan; a share lies above 0 and is at most 1"),
        ({"classes": {"x": {"ttft": 1}}}, "gateway.classes.x.ttft: unknown key; did you mean 'ttft_s'?"),
        (
            {"classes": {"x": {"ttft_s": 0}}},
            "classes.x: ttft_s is 0.0; it must be above 0 seconds, or left out",
        ),
        (
            {"classes": {"x": {"tpot_s": -1}}},
            "classes.x: tpot_s is -1.0; it must be above 0 seconds, or left out",
        ),
        (
            {"classes": {"x": {"ttft_s": 9, "max_wait_s": 3}}},
            "classes.x: ttft_s (9.0) is above max_wait_s (3.0)",
        ),
        ({"classes": {"x": {"on_miss": "reject"}}}, "neither ttft_s nor tpot_s that could be missed"),
        ({"classes": {"x": {"on_miss": "drop"}}}, "gateway.classes.x: on_miss 'drop' is not one of reject, queue"),
        ({"classes": {"x": {"max_queued": -1}}}, "gateway.classes.x: max_queued is -1"),
        ({"classes": {"x": {"priority": "high"}}}, "gateway.classes.x: priority: Expected int, got str"),
        ({"slo": {"priority": 1}}, "gateway.slo.priority: unknown key; known keys here: ttft_s, tpot_s"),
        ({"classes": {"x": 3}}, "gateway.classes.x: Expected mapping, got int"),
        ({"max_queued": -1}, "gateway: max_queued is -1"),
        ({"admission": "promises"}, "admission 'promises' is not one of none, predictive, slo"),
    ],
)
def test_contradicting_settings_are_refused_with_the_reason(keys: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse_spec(gateway(**keys))
    assert message in str(refused.value)


def test_a_file_that_names_no_policy_gets_the_default() -> None:
    spec = parse_spec(gateway(slo={"ttft_s": 1}))
    assert (spec.gateway.routing, spec.gateway.admission) == ("slo", "slo")
    assert spec.pools[0].engine.batching == "adaptive" and spec.elastic.mode == "off"
    bounds = {"name": "m", "role": "mixed", "replicas": {"min": 1, "max": 2}, "engine": {"batching": "chunked"}}
    bounded = parse_spec({"model": "m", "pools": [bounds]})
    assert bounded.pools[0].engine.batching == "chunked" and bounded.elastic.mode == "act"
    assert parse_spec({"model": "m", "pools": [bounds], "elastic": {"mode": False}}).elastic.mode == "off"
