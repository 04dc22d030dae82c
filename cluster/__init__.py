"""The cluster: specification, policy, dispatcher, controller, runtimes and frontends.

Importing it is cheap: neither torch nor Ray nor gRPC is loaded until something needs it.
"""
