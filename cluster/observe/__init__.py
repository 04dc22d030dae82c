"""Records requests for metrics, traces, history and logs. Decides nothing."""
