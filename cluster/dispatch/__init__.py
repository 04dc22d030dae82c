"""One gateway's requests: places each one, sends it to its workers, migrates or retries it, and streams its events."""
