"""What serving costs: dollars an hour of the GPUs, requests for a dollar, dollars for a million tokens. Pure."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from cluster.offline.plan.deploy import Layout
from cluster.offline.plan.request import PlanError, PlanRequest
from cluster.offline.workload.arrivals import Arrival, mean_lengths
from workers.profiles.hardware import Hardware


@dataclass(frozen=True, slots=True)
class ServingCost:
    """At a rate of requests/s. The tokens are those of the mean request: of its answer, and with its prompt."""

    dollars_h: float
    requests_s_per_dollar_h: float
    dollars_per_million_output_tokens: float
    dollars_per_million_tokens: float

    @property
    def words(self) -> str:
        return (
            f"${self.dollars_h:.2f}/h: {self.requests_s_per_dollar_h:.3g} requests/s per $/h, "
            f"${self.dollars_per_million_output_tokens:.3g} per million output tokens "
            f"(${self.dollars_per_million_tokens:.3g} with prompts)"
        )


def serving_cost(request: PlanRequest, layout: Layout, rate: float) -> ServingCost | None:
    """None: a price is not known, or there is no rate."""
    prices = [(group.gpus, request.sheets[group.hardware].price_per_hour) for group in layout.groups]
    return cost_at(request.load.arrivals, rate, prices)


def cost_at(
    arrivals: Sequence[Arrival], rate: float, prices: Collection[tuple[int, float | None]]
) -> ServingCost | None:
    """`prices`: numbers of GPUs, and the dollars an hour of one. None: one is not known, or there is no rate."""
    dollars_h = sum(gpus * price for gpus, price in prices if price is not None)
    if not rate or any(price is None for _, price in prices):
        return None
    prompts, answers = mean_lengths(arrivals)
    per_request = dollars_h / (3600.0 * rate)
    return ServingCost(
        dollars_h, rate / dollars_h, 1e6 * per_request / answers, 1e6 * per_request / (prompts + answers)
    )


def price_line(sheets: Mapping[str, Hardware], given: Mapping[str, float]) -> str:
    """The prices used, and where they come from."""
    known = []
    for name, sheet in sheets.items():
        source = "given" if name in given else sheet.sources.get("price", "")
        dollars = given.get(name, sheet.price_per_hour)
        known.append(f"{name} ${dollars:g}/h ({source})" if dollars is not None else f"{name} not known")
    return f"Prices of one GPU: {', '.join(known)}. Override: --price {next(iter(sheets))}=DOLLARS"


def parse_prices(texts: Iterable[str], kinds: Sequence[str]) -> dict[str, float]:
    """Dollars an hour by name, from NAME=DOLLARS, or for `kinds` from a JSON file. Raises `PlanError`."""
    found: dict[str, float] = {}
    for text in texts:
        name, equals, price = text.rpartition("=")
        try:
            if equals:
                found[name] = float(price)
            else:
                listed = dict(json.loads(Path(text).expanduser().read_text()))
                found |= {kind: float(listed[kind]) for kind in kinds if kind in listed}
        except (OSError, ValueError, TypeError, AttributeError):
            raise PlanError(
                f"--price is {text!r}; it must be NAME=DOLLARS an hour, such as l4=0.5, or a JSON file of "
                "{name: dollars}"
            ) from None
    for name, value in found.items():
        if name not in kinds:
            raise PlanError(f"a price is given for {name}, which is none of {', '.join(kinds) or 'the named hardware'}")
        if not 0.0 < value < inf:
            raise PlanError(f"the price of {name} is {value:g}; it must be above 0 dollars an hour")
    return found
