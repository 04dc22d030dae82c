"""Programs that measure one engine each; engines are loaded once and measured in turns. `protocol` is their interface.

Each runs in the Python of its engine, so a program and `protocol` need only that engine and the standard library.
"""
