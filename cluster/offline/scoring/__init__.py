"""Figures of a run of requests: records, percentiles, SLO attainment, goodput. For real and virtual runs alike."""
