"""Pods follow workers: the number of pods of each pool on Kubernetes is what the workers need that the pool shall have.

    pods        how many pods there shall be; pure
    kubernetes  the scale of StatefulSets, over the API server's HTTPS
    loop        asks a gateway and the API server, over and over, and tells a kubelet how that goes

Who decides how many workers there are is elsewhere (`cluster.control.scaling_loop`, an operator).
"""
