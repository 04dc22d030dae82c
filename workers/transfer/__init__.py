"""KV that moves between workers: what this worker reads from others, and the readers of its own leases."""
