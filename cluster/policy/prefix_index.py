"""What each worker's prefix cache holds, as one gateway believes from where it sent prompts. Bounded; knows no time."""

from collections import OrderedDict
from collections.abc import Sequence

BLOCK_TOKENS = 128


def chain(tokens: Sequence[int], block_tokens: int = BLOCK_TOKENS) -> list[int]:
    """A name for each full block: equal names mean, but for a hash collision, equal tokens from position 0 on.

    A collision costs a wrong guess, never a wrong token: what is cached, the worker says.
    """
    names: list[int] = []
    parent = 0
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        parent = hash((parent, tuple(tokens[start : start + block_tokens])))
        names.append(parent)
    return names


class PrefixIndex:
    """Blocks of each worker, least recently used first. Owned by a Router.

    The head of a chain is always used after its tail, as workers' own caches have it: so what is forgotten is a tail,
    and the part of a chain that is there is its beginning.
    """

    def __init__(self, block_tokens: int = BLOCK_TOKENS) -> None:
        self.block_tokens = block_tokens
        self._blocks: dict[str, OrderedDict[int, None]] = {}
        self._lives: dict[str, str] = {}  # worker -> the incarnation whose cache this is

    def cached_tokens(self, worker: str, incarnation: str, names: Sequence[int]) -> int:
        """How much of the chain that worker has, in tokens."""
        blocks = self._blocks.get(worker)
        if not blocks or self._lives[worker] != incarnation:
            return 0
        low, high = 0, len(names)  # the part that is there is a beginning, so its end is found by halving
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if names[middle] in blocks else (low, middle)
        return low * self.block_tokens

    def use(self, worker: str, incarnation: str, names: Sequence[int], capacity_tokens: int) -> None:
        """The worker computes or uses this chain; its cache holds `capacity_tokens`."""
        if self._lives.get(worker) != incarnation:
            self._lives[worker], self._blocks[worker] = incarnation, OrderedDict()
        blocks = self._blocks[worker]
        for name in reversed(names):
            blocks[name] = None
            blocks.move_to_end(name)
        while len(blocks) > capacity_tokens // self.block_tokens:
            blocks.popitem(last=False)
