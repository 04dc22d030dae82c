"""Decisions as pure functions of a view: no clock, no I/O, no randomness that was not handed in."""
