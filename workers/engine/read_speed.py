"""The speed of reads of KV blocks, measured when reads end. Pure: time is an argument."""

WINDOW = 8  # reads


class ReadSpeed:
    """The speed of consecutive reads. `block_s`: recent seconds per block. `num_reads`: reads that have ended.

    `progress_s`: when the newest read ended, or the first one in flight began.
    """

    def __init__(self, block_s: float, progress_s: float = 0.0) -> None:
        self.num_reads = 0
        self.progress_s = progress_s
        self._before_s = block_s
        self._reads = self._blocks = 0  # of the last `WINDOW` or less
        self._seconds = 0.0

    def begin(self, now_s: float) -> None:
        """Reads begin after a pause; their speed may have changed."""
        self._roll()
        self.progress_s = now_s

    def ended(self, num_blocks: int, now_s: float) -> None:
        """A read of this many blocks has ended."""
        if self._reads == WINDOW:
            self._roll()
        self._reads += 1
        self._blocks += num_blocks
        self._seconds += max(0.0, now_s - self.progress_s)
        self.num_reads += 1
        self.progress_s = now_s

    def _roll(self) -> None:
        self._before_s, self._reads, self._blocks, self._seconds = self.block_s, 0, 0, 0.0

    @property
    def block_s(self) -> float:
        return self._seconds / self._blocks if self._blocks else self._before_s

    @property
    def fast_block_s(self) -> float:
        """The faster of the newest reads and those before them; the others may have been slow by chance."""
        return min(self.block_s, self._before_s)

    def slow_block_s(self, now_s: float, num_blocks: int) -> float:
        """Seconds per block if the read in flight, of this many blocks, takes twice as long as it has taken so far."""
        return max(self.block_s, 2 * (now_s - self.progress_s) / num_blocks)

    def late_at_s(self, num_blocks: int, patience_s: float) -> float:
        """When the read in flight, of this many blocks, is late: after twice its expected time or `patience_s` more."""
        read_s = num_blocks * self.fast_block_s
        return self.progress_s + read_s + min(read_s, patience_s)
