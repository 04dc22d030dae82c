"""The result of `diptych profile` as one JSON file: all that a simulation of the measured cluster needs.

Knows figures and their file; knows neither how they were measured nor a cluster.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from workers.costs import LinearCost
from workers.costs.port import check_non_negative
from workers.profiles.fit import FitError, Point, error_of
from workers.profiles.profile_errors import ProfileError

VERSION = 2
SINGLE_REQUEST_TOKENS = 64  # the prompt of a single request


@dataclass(frozen=True, slots=True)
class PoolProfile:
    """One worker of a pool. `cost`: of its steps, alone on its machine, fitted to `points`.

    The engine spends `gap_s` between two steps, and `gap_row_s` more per sequence. `call_s`: a round trip from the
    gateway.
    """

    pool: str
    tensor: int
    pipeline: int
    cost: LinearCost
    points: tuple[Point, ...] = ()
    gap_s: float = 0.0
    gap_row_s: float = 0.0
    call_s: float = 0.0

    def __post_init__(self) -> None:
        check_non_negative(self, "", ProfileError)

    @property
    def error(self) -> FitError:
        """On the held-out points."""
        return error_of(self.cost, [point for point in self.points if point.held_out])

    @property
    def served(self) -> LinearCost:
        """From the start of one step to the start of the next."""
        cost = self.cost
        return replace(cost, step_s=cost.step_s + self.gap_s, decode_row_s=cost.decode_row_s + self.gap_row_s)


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """KV from a worker of the pool `owner` to one of `reader`, as preflight measured it."""

    owner: str
    reader: str
    transport: str
    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        check_non_negative(self, "", ProfileError)


@dataclass(frozen=True, slots=True)
class Interference:
    """Steps of `pool` take `ratio` times as long while a worker of `other` computes on the same machine.

    `phase`, `other_phase`: "prefill" or "decode", what their steps do; empty: either.
    """

    pool: str
    other: str
    ratio: float
    phase: str = ""
    other_phase: str = ""

    def __str__(self) -> str:
        one, other = f"{self.pool} {self.phase}".rstrip(), f"{self.other} {self.other_phase}".rstrip()
        return f"{one} beside {other}"

    def __post_init__(self) -> None:
        check_non_negative(self, "", ProfileError)


@dataclass(frozen=True, slots=True)
class ClusterProfile:
    """`frontend_s`: frontend time of a first token, beyond the gateway's ledger.

    `single_request_s`: median ledger phases of a single request, until its first token. `kv_token_bytes`: 0 if no KV
    moved.
    """

    cluster: str
    model: str
    date: str
    machine: str
    versions: str
    context_length: int
    vocab_size: int
    pools: tuple[PoolProfile, ...]
    links: tuple[LinkProfile, ...] = ()
    interference: tuple[Interference, ...] = ()
    kv_token_bytes: int = 0
    frontend_s: float = 0.0
    single_request_s: dict[str, float] = field(default_factory=dict)
    version: int = VERSION

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ProfileError(f"version is {self.version}; this program reads {VERSION}: measure again")
        if not self.pools:
            raise ProfileError("pools is empty; a profile has at least one")
        check_non_negative(self, "", ProfileError)

    def pool(self, name: str) -> PoolProfile:
        """Raises `ProfileError`, which names the known pools."""
        for each in self.pools:
            if each.pool == name:
                return each
        known = ", ".join(each.pool for each in self.pools)
        raise ProfileError(f"pool {name!r} was not measured; the profile of {self.cluster} has {known}")

    def idle_ratio(self, name: str) -> float:
        """How many times as long a prompt's step takes if its worker, of this pool, was idle, by the single requests.

        Those of a split came to an idle prefill worker, those of a mixed worker while it was warm from the last answer.
        """
        alone_s = self.pool(name).served.prefill_seconds(SINGLE_REQUEST_TOKENS)
        return max(1.0, self.single_request_s.get("prefill_compute", 0.0) / alone_s) if alone_s else 1.0

    def cost(self, name: str) -> LinearCost:
        """Of a pool, gaps included, with the slowest link that carries KV to it."""
        served = self.pool(name).served
        links = [link for link in self.links if link.reader == name and link.bytes_per_s > 0.0]
        if not links:
            return served
        return replace(
            served,
            transfer_latency_s=max(link.latency_s for link in links),
            transfer_byte_s=max(1.0 / link.bytes_per_s for link in links),
        )


def load(file: Path) -> ClusterProfile:
    """Raises `ProfileError` for a file that is missing or is no profile."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=ClusterProfile)
    except OSError as error:
        raise ProfileError(f"{file}: cannot be read ({error.strerror}); `diptych profile` writes one") from None
    except (msgspec.DecodeError, ProfileError) as error:
        raise ProfileError(f"{file}: is no profile of a cluster: {error}; `diptych profile` writes one") from None


def save(profile: ClusterProfile, file: Path) -> None:
    """Raises OSError."""
    file.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
