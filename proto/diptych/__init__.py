"""Diptych for its clients: `diptych.client` is the Python client, `diptych.v1` the generated code of the wire schema.

Imports nothing of the serving packages. `python -m cluster.frontend.grpc.generate_stubs` makes `diptych.v1`; do not edit that.
"""
