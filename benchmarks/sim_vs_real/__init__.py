"""The simulator held against the cluster it simulates: the same requests to both, and how far off each figure is."""
