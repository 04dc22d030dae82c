"""KV-cache transfer between workers: layouts, leases, tickets and the backends that move the bytes.

Knows blocks, bytes and peers; knows no request, no model and no scheduler.
"""
