"""Kernels over flat ragged batches, and the torch reference that defines their results."""
