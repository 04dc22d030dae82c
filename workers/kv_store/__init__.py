"""KV blocks on a disk: a preallocated file of slots that survives restarts. A block that cannot be read is a miss."""
