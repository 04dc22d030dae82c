"""Model files, weights, tokenizer, and the forward pass over a paged KV pool."""
