"""Kernels over flat ragged batches, and the pure-torch reference that is the truth for each of them."""
