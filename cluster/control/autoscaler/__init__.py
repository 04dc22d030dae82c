"""Scales the pods of each pool on Kubernetes to its target number of workers.

    pods        the target number of pods; pure
    kubernetes  reads and writes the scale of StatefulSets at the API server
    loop        polls a gateway and the API server, and serves the kubelet's probes

The scaling loop (`cluster.control.scaling_loop`) or an operator sets the number of workers.
"""
