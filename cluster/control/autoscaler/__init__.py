"""Pods follow workers: each pool on Kubernetes has the pods that its target number of workers needs.

    pods        how many pods there shall be; pure
    kubernetes  the scale of StatefulSets, over the API server's HTTPS
    loop        asks a gateway and the API server, over and over, and tells a kubelet how that goes

Who decides how many workers there are is elsewhere (`cluster.control.scaling_loop`, an operator).
"""
