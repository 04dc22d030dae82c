"""Workloads, simulation, plans, load tests and reports: no part of serving imports this."""
