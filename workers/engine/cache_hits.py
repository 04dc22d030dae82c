"""Counts the prompt tokens that were found cached, by where they were, and the seconds that this saved. Pure."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from workers.costs import CostModel
from workers.engine.kv_event_log import Tier

DEVICE, HOST, FETCHED = Tier.DEVICE.value, Tier.HOST.value, "fetched"

Found = Sequence[tuple[str, int]]
"""(source, tokens) of a prompt's cached tokens, in their order."""


class CacheHits:
    """Owned by a BlockPool. `sought_tokens` of prompts were looked up; `tokens` of them were cached, by source.

    A source is the device, another worker from which they were fetched, or a tier behind the device. Tokens that a
    prompt waited for count at their source, and on the device from then on. `saved_s`: seconds of computing them, less
    those of loading them, by source. `read_byte_s`: seconds to read a byte, of tiers that are read to host memory.
    """

    def __init__(self) -> None:
        self.sought_tokens = 0
        self.tokens: Counter[str] = Counter()
        self.saved_s: defaultdict[str, float] = defaultdict(float)
        self.read_byte_s: dict[str, float] = {}

    def looked_up(self, num_tokens: int, found: Found) -> None:
        """Count a sequence of `num_tokens`, and what was found of it."""
        self.sought_tokens += num_tokens
        for source, count in found:
            self.tokens[source] += count

    def save(self, num_tokens: int, found: Found, cost: CostModel, token_bytes: float, first: int = 0) -> None:
        """Count the seconds that a prompt of `num_tokens` need not be computed, of which these were found from token
        `first` on. No source saves less than 0.
        """
        load_byte_s = {FETCHED: cost.transfer_byte_s, HOST: cost.swap_byte_s}
        load_byte_s |= {tier: cost.swap_byte_s + read_s for tier, read_s in self.read_byte_s.items()}
        rest_s, end = cost.prefill_seconds(num_tokens - first, first), first
        for source, count in found:
            end += count
            before_s, rest_s = rest_s, cost.prefill_seconds(num_tokens - end, end)
            load_s = count * token_bytes * load_byte_s.get(source, 0.0)
            self.saved_s[source] += max(0.0, before_s - rest_s - load_s)
