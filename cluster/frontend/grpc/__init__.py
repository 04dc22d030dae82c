"""The doors: gRPC server, its messages, and the client. The only package that imports grpc, and only in its modules."""
