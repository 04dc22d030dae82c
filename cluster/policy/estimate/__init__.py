"""What a placement would give: latencies, lengths, corrections learned from what happened."""
