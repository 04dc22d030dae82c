"""What a run of requests amounts to: records, percentiles, promises kept, goodput. The same for real and virtual runs."""
