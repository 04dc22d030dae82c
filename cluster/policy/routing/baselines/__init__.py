"""Routers of the literature and of other systems, to compare with."""
