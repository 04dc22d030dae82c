"""Recorded real runs, stored beside this file, so that simulations can be compared with them again."""

from dataclasses import dataclass, field
from pathlib import Path

from cluster.offline.scoring.records import RequestOutcome, RequestRecord, Run
from cluster.offline.workload.arrivals import Arrival, Workload
from workers.profiles.measured import ClusterProfile
from workers.request import SLO

FILE = Path(__file__).with_name("recorded.json")


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One answer of a real run. `token_s`: since its arrival, at its client; the rest is its gateway's ledger.

    The client shares the machine with the cluster: when it has to wait for a core, tokens seem late.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    ending: RequestOutcome
    token_s: tuple[float, ...]
    ledger_ttft_s: float | None = None
    ledger_total_s: float | None = None
    prefix: tuple[int, ...] = ()
    sample: int = 0
    prefill_worker: str = ""
    decode_worker: str = ""

    @property
    def at_gateway_s(self) -> tuple[float, ...]:
        """Token times at the gateway, on the run's clock."""
        if self.ledger_ttft_s is None or self.ledger_total_s is None:
            return tuple(self.at_s + token_s for token_s in self.token_s)
        return spread(self.at_s, self.ledger_ttft_s, self.ledger_total_s, len(self.token_s))


@dataclass(frozen=True, slots=True)
class RealRun:
    """A real run of a system at `load` times its capacity. `kind`: of the requests (`systems.KINDS`)."""

    system: str
    load: float
    seed: int
    slo: SLO
    seen: tuple[RecordedRequest, ...]
    phases_s: dict[str, float]
    notes: tuple[str, ...] = ()
    kind: str = "chat"
    block_tokens: int = 512
    roles: dict[str, str] = field(default_factory=dict)  # at its start: earlier runs may have changed them

    @property
    def name(self) -> str:
        return (
            f"{self.system} at {self.load:.0%}"
            if self.kind == "chat"
            else f"{self.system}, {self.kind}, at {self.load:.0%}"
        )

    @property
    def cell(self) -> tuple[str, str, float]:
        """What its repetitions have in common."""
        return self.system, self.kind, self.load

    @property
    def workload(self) -> Workload:
        return Workload(
            self.name,
            tuple(
                Arrival(each.at_s, each.prompt_tokens, each.output_tokens, each.prefix, sample=each.sample)
                for each in self.seen
            ),
            self.block_tokens,
        )

    @property
    def run(self) -> Run:
        """The run with token times at the gateway."""
        served = tuple(
            RequestRecord(
                index,
                each.at_s,
                each.prompt_tokens,
                each.output_tokens,
                each.at_gateway_s,
                each.ending,
                prefill_worker=each.prefill_worker,
                decode_worker=each.decode_worker,
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
    runs: tuple[RealRun, ...]


def spread(at_s: float, ttft_s: float, total_s: float, count: int) -> tuple[float, ...]:
    """`count` evenly spaced token times between the first and the last one."""
    step_s = (total_s - ttft_s) / max(1, count - 1)
    return tuple(at_s + ttft_s + index * step_s for index in range(count))


def recorded(
    run: Run,
    phases_s: dict[str, float],
    load: float,
    slo: SLO,
    sent: Workload | None = None,
    kind: str = "chat",
    roles: dict[str, str] | None = None,
) -> RealRun:
    """Record a run, rounded to 0.1 ms. `sent`: its requests, for the prefixes that their prompts share and the answers
    that they ask for.
    """
    seen = tuple(
        RecordedRequest(
            each.arrival_s,
            each.prompt_tokens,
            each.output_tokens,
            each.outcome,
            tuple(round(at_s - each.arrival_s, 4) for at_s in each.token_s),
            round(each.ledger.ttft_ns / 1e9, 4) if each.ledger else None,
            round(each.ledger.total_ns / 1e9, 4) if each.ledger else None,
            sent.arrivals[each.index].prefix if sent else (),
            sent.arrivals[each.index].sample if sent else 0,
            each.prefill_worker,
            each.decode_worker,
        )
        for each in run.served
    )
    size = sent.block_tokens if sent else 512
    return RealRun(run.system, load, run.seed, slo, seen, phases_s, run.notes, kind, size, roles or {})


def load(file: Path = FILE) -> Recorded:
    """Raises OSError and `msgspec.ValidationError`."""
    import msgspec

    return msgspec.json.decode(file.read_bytes(), type=Recorded)


def save(found: Recorded, file: Path = FILE) -> None:
    import msgspec

    file.write_bytes(msgspec.json.encode(found) + b"\n")
