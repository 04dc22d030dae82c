"""A running cluster measured from outside, through its door, for whoever simulates or plans it."""
