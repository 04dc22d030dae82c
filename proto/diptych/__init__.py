"""The wire schema's generated code. Made by `python -m cluster.api.generate_stubs`; do not edit."""
