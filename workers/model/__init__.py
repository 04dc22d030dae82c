"""Model files and model mathematics: where weights come from, and the forward pass over a paged KV pool."""
