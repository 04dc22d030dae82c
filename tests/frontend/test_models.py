"""A request's `model`, resolved."""

import pytest

from cluster.frontend.context import UnknownModel, resolve


def test_a_request_may_leave_out_the_only_model() -> None:
    assert resolve("", ["small"]) == resolve("small", ["small"]) == "small"


def test_of_several_models_a_request_names_one() -> None:
    assert resolve("large", ["small", "large"]) == "large"
    with pytest.raises(UnknownModel, match=r"model is missing, .* 'small', 'large'"):
        resolve("", ["small", "large"])


@pytest.mark.parametrize("served", [["small"], ["small", "large"]])
def test_an_unknown_model_is_refused_with_the_served_ones(served: list[str]) -> None:
    with pytest.raises(UnknownModel, match="model 'huge' is not served here") as refused:
        resolve("huge", served)
    assert all(repr(name) in str(refused.value) for name in served)


def test_a_long_name_is_not_repeated_whole() -> None:
    with pytest.raises(UnknownModel) as refused:
        resolve("x" * 10_000, ["small"])
    assert len(str(refused.value)) < 300
