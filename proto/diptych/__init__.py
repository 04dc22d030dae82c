"""The client package: `diptych.client` is the Python client, `diptych.v1` the code generated from the wire schema.

Imports no serving package. `python proto/generate_stubs.py` generates `diptych.v1`.
"""
