"""One system's results, for reports. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cluster.offline.scoring.figures import Figures
from cluster.offline.scoring.goodput import Goodput
from cluster.offline.scoring.records import Run


@dataclass(frozen=True, slots=True)
class SystemResult:
    """`figures` at the main load; `goodputs` by rising target; `sweep` at rising rates, for curves.

    `run`: the run behind `figures`, with its steps if it was traced.
    """

    name: str
    figures: Figures
    goodputs: tuple[Goodput, ...] = ()
    sweep: tuple[Figures, ...] = ()
    run: Run | None = None

    def as_json(self) -> dict[str, Any]:
        """All but the sweep and the run's records."""
        goodputs = [goodput.as_json() for goodput in self.goodputs]
        return {"system": self.name, "figures": self.figures.as_json(), "goodput": goodputs}


def unit_of(systems: Sequence[SystemResult]) -> str:
    """What all of these systems count: GPUs, or ranks if any ran in real time."""
    return "GPU" if all(system.figures.unit == "GPU" for system in systems) else "rank"
