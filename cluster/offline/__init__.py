"""Everything that needs no running cluster, or only looks at one from outside: workloads, simulation, plans, reports."""
