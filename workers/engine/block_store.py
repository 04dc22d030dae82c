"""The port between the engine and what keeps KV blocks behind host memory: a disk, or a store that workers share.

A worker may have several. Each block is read from the first of them that has it; all of them get every block that a
step has saved in host memory. All methods are called from one event loop.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from typing import Protocol

from workers.engine.kv_event_log import Tier
from workers.stats import TierStats


class BlockStore(Protocol):
    """KV blocks by their content hash. No call blocks or raises; whatever fails, is late or differs is a miss.

    What an implementer must do:

    - Call each `found` and `done` exactly once, in time: a block of host memory, or a prompt, waits for it. `found` may
      be called during `find`, `done` only after `read` and `write` have returned. Also when the store closes.
    - Touch a host block only between a call and its `done`. A block that did not arrive is as it was before `read`.
    - Compare what it read with a digest. A block whose content differs from what was written must not arrive.
    - Call `changed`, as given to `Executor.stores`, after each `found` and `done` of a `read`, so that prompts go on.
    - Bound what waits inside of it; drop writes beyond that, and answer reads beyond that with a miss.

    `tier`: its name in the event log and in the statistics; one store for each. `read_byte_s`: about how many seconds
    it takes to read a byte, of several blocks at once; the engine goes on from there with the times that `done` tells.
    `shared_as`: equal for workers of any host that read the same blocks; empty: not known.
    """

    tier: Tier
    read_byte_s: float
    shared_as: str

    def watch(self, added: Callable[[bytes, int], None], gone: Callable[[bytes], None]) -> dict[bytes, int]:
        """The prefix hashes of what is known to be there, by block hash; the caller's. Empty if it takes a round trip.

        From now on `added` gets the block hash and the prefix hash of what other workers have stored, and `gone`
        each content hash that can no longer be read, as far as this worker knows.
        """
        ...

    def find(self, hashes: Items[bytes], timeout_s: float, found: Callable[[int], None]) -> None:
        """Tell how many of the first can be read: a hint, since reads of them may still miss. 0 if it is late."""
        ...

    def write(self, block_hash: bytes, prefix: int | None, block: int, done: Callable[[bool], None]) -> None:
        """Store this host block, which stays as it is until `done`. `prefix`: the prefix hash that ends with it.

        `done` gets whether it is there and has not been reported as gone.
        """
        ...

    def read(self, block_hash: bytes, block: int, timeout_s: float, done: Callable[[bool, float], None]) -> None:
        """Read into this host block. `done` gets whether it has arrived, and the seconds since the call."""
        ...

    def forget(self, hashes: Iterable[bytes]) -> None:
        """The content of these is in doubt: they must not arrive any more."""
        ...

    def stats(self) -> TierStats:
        """Without `hit_tokens` and `saved_s`. Named like `tier`."""
        ...
