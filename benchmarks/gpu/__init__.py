"""Checks and measures everything that a GPU must prove, in one program: `python -m benchmarks.gpu`, `make gpu`.

`parts` has the parts, in order of value: what is correct first, then what is fast. Each part runs in a process of its
own with a limit, so a part that fails or hangs costs no other. A record (JSON and Markdown) is written after each.
"""
