"""The shipped program in virtual time: an event loop, a runtime, executors and transports that only model seconds.

clock      an asyncio event loop that jumps to its next timer        run       a workload through a whole cluster
network    what that loop has instead of sockets                     systems   the systems of the field, as settings
"""
