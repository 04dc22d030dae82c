"""The production program in virtual time: an event loop, a runtime, executors and transports that only model seconds.

clock      an asyncio event loop that jumps to its next timer        run       a workload on a whole cluster
network    the loop's replacement for sockets                        systems   published systems, as settings
case       a cluster to simulate, as values
"""
