"""Random numbers from a seed, as a value that a pure policy may own."""

_MASK = (1 << 64) - 1


class Draws:
    """SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): the same seed gives the same numbers everywhere."""

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK

    def bits(self) -> int:
        """64 uniform bits."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        mixed = self._state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return mixed ^ (mixed >> 31)

    def below(self, bound: int) -> int:
        """Uniform in 0..bound-1; the bias of 2⁻⁶⁴ per value does not matter here."""
        return (self.bits() * bound) >> 64

    def share(self) -> float:
        """Uniform in [0, 1)."""
        return (self.bits() >> 11) * 2.0**-53
