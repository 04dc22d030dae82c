"""Counts and remembers requests, for metrics, traces and history. Decides nothing."""
