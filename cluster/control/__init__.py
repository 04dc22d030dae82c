"""Keeps the cluster as its file describes it: workers, membership, roles, pool sizes, gateways."""
