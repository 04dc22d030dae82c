"""The wire schema's generated code. Made by `python proto/generate_stubs.py`; do not edit."""
