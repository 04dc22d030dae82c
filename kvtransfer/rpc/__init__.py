"""Framed RPC between processes of one cluster: a handshake on the cluster's secret, frames, numbered calls.

    protocol                   listener           caller             after the handshake
    lease   kvtransfer.control owner of KV        its readers        the caller calls
    tcp     kvtransfer.backends.tcp   owner       its readers        the caller calls, one call at a time
    worker  workers.rpc        worker             gateways           both, in a session
    gang    workers.executor   leader             the other ranks    the listener calls

    handshake    proof of the secret, and a bound on peers that have not proven it
    frames       bytes on an asyncio stream            polled       the same bytes on a socket of a poller
    listener     accepts and authenticates, asyncio     connection   numbered calls and one-way messages, for asyncio
    session      frames that survive a reconnect       poller       one thread for many sockets

Knows no KV, no lease and no rank.
"""
