"""Admission: which requests are admitted, queued or refused, and the order of the queue."""
