"""The wire schema's generated code. Made by `python -m cluster.frontend.grpc.generate_stubs`; do not edit."""
