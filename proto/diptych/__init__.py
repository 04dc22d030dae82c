"""Diptych for its clients: `diptych.client` is the Python client, `diptych.v1` the generated code of the wire schema.

Imports nothing of the serving packages. `python -m cluster.frontend.grpc.generate_stubs` generates `diptych.v1`.
"""
