"""Runs workers and services in this process or as Ray actors, behind one interface."""
