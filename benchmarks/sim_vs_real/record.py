"""What real runs gave, as a small file beside this one: simulations can be held against it again at any time."""

from dataclasses import dataclass
from pathlib import Path

from cluster.offline.scoring.records import RequestOutcome, Run, Served
from cluster.offline.workload.arrivals import Arrival, Workload
from workers.profiles.measured import ClusterProfile
from workers.request import SLO

FILE = Path(__file__).with_name("recorded.json")


@dataclass(frozen=True, slots=True)
class Seen:
    """One request of a real run. `token_s` counts from its arrival, at its client; the rest is its gateway's ledger.

    The client shares the machine with all it measures: when it is kept from running, tokens seem to come late.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    ending: RequestOutcome
    token_s: tuple[float, ...]
    ledger_ttft_s: float | None = None
    ledger_total_s: float | None = None

    @property
    def at_gateway_s(self) -> tuple[float, ...]:
        """When its tokens came, on the run's clock."""
        if self.ledger_ttft_s is None or self.ledger_total_s is None:
            return tuple(self.at_s + token_s for token_s in self.token_s)
        return spread(self.at_s, self.ledger_ttft_s, self.ledger_total_s, len(self.token_s))


@dataclass(frozen=True, slots=True)
class Real:
    """A real run of a system at a share of its capacity, under the profile measured just before."""

    system: str
    load: float
    seed: int
    slo: SLO
    seen: tuple[Seen, ...]
    phases_s: dict[str, float]
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.system} at {self.load:.0%}"

    @property
    def workload(self) -> Workload:
        return Workload(
            self.name, tuple(Arrival(each.at_s, each.prompt_tokens, each.output_tokens) for each in self.seen)
        )

    @property
    def run(self) -> Run:
        """As far as it was recorded, at the gateway."""
        served = tuple(
            Served(
                index,
                each.at_s,
                each.prompt_tokens,
                each.output_tokens,
                each.at_gateway_s,
                each.ending,
            )
            for index, each in enumerate(self.seen)
        )
        ends = [each.token_s[-1] for each in served if len(each.token_s)]
        seconds = max(ends, default=0.0) - served[0].arrival_s
        return Run(self.system, self.name, "real", self.seed, 1, seconds, seconds, served)


@dataclass(frozen=True, slots=True)
class Recorded:
    """By system: its profile and its runs."""

    profiles: dict[str, ClusterProfile]
    runs: tuple[Real, ...]


def spread(at_s: float, ttft_s: float, total_s: float, count: int) -> tuple[float, ...]:
    """Token times of which only the first and the last are known."""
    step_s = (total_s - ttft_s) / max(1, count - 1)
    return tuple(at_s + ttft_s + index * step_s for index in range(count))


def recorded(run: Run, phases_s: dict[str, float], load: float, slo: SLO) -> Real:
    """To a tenth of a millisecond."""
    seen = tuple(
        Seen(
            each.arrival_s,
            each.prompt_tokens,
            each.output_tokens,
            each.outcome,
            tuple(round(at_s - each.arrival_s, 4) for at_s in each.token_s),
            round(each.ledger.ttft_ns / 1e9, 4) if each.ledger else None,
            round(each.ledger.total_ns / 1e9, 4) if each.ledger else None,
        )
        for each in run.served
    )
    return Real(run.system, load, run.seed, slo, seen, phases_s, run.notes)


def load(file: Path = FILE) -> Recorded:
    """Raises OSError and `msgspec.ValidationError`."""
    import msgspec

    return msgspec.json.decode(file.read_bytes(), type=Recorded)


def save(found: Recorded, file: Path = FILE) -> None:
    import msgspec

    file.write_bytes(msgspec.json.encode(found) + b"\n")
