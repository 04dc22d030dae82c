"""The gRPC server. The only package of `cluster` that imports grpc."""
