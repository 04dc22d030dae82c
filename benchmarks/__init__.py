"""Measurements of Diptych: each figure beside a peer or a limit taken in the same run. `python -m benchmarks`.

screen          tables, Markdown, JSON                   handoff   split against colocated
figures         spreads, figures, claims (pure)          peer      against a vLLM prefill/decode pair
machine         where and with what it was measured      transfer  against one thread's memcpy
hosted, host    clusters in a process of their own       overhead  against the door alone, and without Ray
asking          one request, its tokens timed            startup   against a bare Ray that imports torch
environments    peers in environments of their own       engine    the engine against its peers, its step taken apart
                                                         gang      several ranks against one, and what lies between them
                                                         simulator clusters in virtual time, by their size
"""
