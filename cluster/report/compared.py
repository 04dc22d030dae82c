"""What there is to show of one system. Pure."""

from dataclasses import dataclass

from cluster.scoring.figures import Figures
from cluster.scoring.goodput import Goodput
from cluster.scoring.records import Run


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
