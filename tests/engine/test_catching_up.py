"""Methods of a class that catches up do so by themselves."""

from workers.engine.catching_up import catches_up, unaffected
from workers.engine.engine import Engine


@catches_up
class Counter:
    def __init__(self) -> None:
        self.uses = 0

    def _before_use(self) -> None:
        self.uses += 1

    def method(self, number: int, *, more: int = 0) -> int:
        return number + more

    @property
    def value(self) -> int:
        return self._private()

    def _private(self) -> int:
        return 7

    @unaffected
    def aside(self) -> int:
        return self.uses

    @property
    @unaffected
    def apart(self) -> int:
        return self.uses


def test_public_methods_and_properties_catch_up_unless_they_say_otherwise() -> None:
    counter = Counter()
    assert (counter.method(1, more=2), counter.value, counter.aside(), counter.apart) == (3, 7, 2, 2)


def test_what_changes_an_engine_catches_up() -> None:
    left_out = {name for name, value in vars(Engine).items() if getattr(value, "is_unaffected", False)}
    changes = {"add", "commit", "schedule", "pin", "check"}
    assert not changes & left_out and "stats" in left_out


def test_what_changes_through_a_part_of_an_engine_catches_up() -> None:
    parts = {"pool", "leases", "loans", "borrowed", "prefix_fetches", "sequences", "reservations"}
    getters = {name: value.fget for name, value in vars(Engine).items() if isinstance(value, property)}
    assert all(hasattr(getters[name], "__wrapped__") for name in parts)
    assert not hasattr(getters["has_work"], "__wrapped__")
