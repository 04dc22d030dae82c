"""Runs the requests of one gateway: places, sends, migrates and retries them, and streams their events."""
