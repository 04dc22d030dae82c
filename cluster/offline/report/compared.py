"""What there is to show of one system. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cluster.offline.scoring.figures import Figures
from cluster.offline.scoring.goodput import Goodput
from cluster.offline.scoring.records import Run


@dataclass(frozen=True, slots=True)
class Compared:
    """`figures` at the load that is shown; `goodputs` by rising target; `sweep` at rising rates, for curves.

    `run` is the one behind `figures`; with its steps when it was traced.
    """

    name: str
    figures: Figures
    goodputs: tuple[Goodput, ...] = ()
    sweep: tuple[Figures, ...] = ()
    run: Run | None = None

    def as_json(self) -> dict[str, Any]:
        """All figures, built of what JSON knows; the run's records are not among them."""
        return {
            "name": self.name,
            "figures": self.figures.as_json(),
            "goodputs": [goodput.as_json() for goodput in self.goodputs],
            "sweep": [figures.as_json() for figures in self.sweep],
        }


def unit_of(systems: Sequence[Compared]) -> str:
    """What is counted, in words that are right for all of them."""
    return "GPU" if all(system.figures.unit == "GPU" for system in systems) else "rank"
