"""Measurements of Diptych: each figure stands beside a peer or a limit taken in the same run. `python -m benchmarks`.

screen          tables, Markdown, JSON                   handoff   split against colocated
figures         spreads, figures, claims (pure)          peer      against a vLLM prefill/decode pair
hosted          clusters in a process of their own       transfer  against one thread's memcpy
timed_request   one request with its token times         overhead  against the server alone, and without Ray
environments    peers in environments of their own       frontend  against bare grpc.aio and FastAPI servers
stream_load     many paced streams on one server         startup   against a bare Ray that imports torch
pinning         CPU time, core pinning, paused processes engine    the engine against its peers, its step taken apart
                                                         gang      several ranks against one, and their communication
                                                         simulator clusters in virtual time, by size
"""
