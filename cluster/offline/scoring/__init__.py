"""What a run of requests amounts to: records, percentiles, promises kept, goodput. For real and virtual runs alike."""
