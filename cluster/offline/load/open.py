"""Opens the endpoint of an address."""

from contextlib import AbstractAsyncContextManager

from cluster.offline.load.endpoint import Endpoint, Target


def open_endpoint(target: Target) -> AbstractAsyncContextManager[Endpoint]:
    """Connect and ask for the model. Raises `EndpointError` and `DiptychError`."""
    if target.is_http:
        from cluster.offline.load.http_endpoint import open_http

        return open_http(target)
    from cluster.offline.load.grpc_endpoint import open_grpc

    return open_grpc(target.address, target.access, target.model)
