"""What is counted and remembered of requests, for metrics, traces and history. Decides nothing."""
