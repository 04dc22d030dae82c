"""One gateway's requests: each is placed, sent to its workers, moved or run again, and streamed back."""
