"""Who gets in, who waits, and in which order."""
