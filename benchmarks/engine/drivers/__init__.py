"""Programs that measure one engine each, loaded once and asked in turns. `lines` is how they are spoken to.

Each runs in the Python of its engine, so a program and `lines` need nothing but that engine and the standard library.
"""
