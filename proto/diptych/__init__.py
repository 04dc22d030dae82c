"""The client package: `diptych.client` is the Python client, `diptych.v1` the code generated from the wire schema.

Imports no serving package. `python -m cluster.frontend.grpc.generate_stubs` generates `diptych.v1`.
"""
