"""Routers and roles under loads that shift, as benchmarks/results/elastic-campaign.md: `make elastic`.

scenarios    workloads and their machines      contenders   the systems, and all static configurations
probe        one run at a scale of the load    one          one run in detail, for tuning
"""
