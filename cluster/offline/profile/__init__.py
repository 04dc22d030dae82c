"""Measure a running cluster from outside, through its gateway, for simulations and plans."""
