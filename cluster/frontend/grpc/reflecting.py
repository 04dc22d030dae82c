"""Reflection under both of its names: `grpc.reflection.v1`, which new clients ask for, and v1alpha.

The two have the same messages on the wire; the library has only v1alpha, whose description is renamed here.
"""

from collections.abc import Iterable

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_reflection.v1alpha import reflection, reflection_pb2

V1 = "grpc.reflection.v1.ServerReflection"
V1_FILE = "grpc/reflection/v1/reflection.proto"


def add_reflection(names: Iterable[str], server: grpc.aio.Server) -> None:
    """Tell of these services, and of reflection itself."""
    _describe_v1()
    names = (*names, V1, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    method = grpc.stream_stream_rpc_method_handler(
        reflection.aio.ReflectionServicer(names).ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(V1, {"ServerReflectionInfo": method}),))


def _describe_v1() -> None:
    """In the pool where reflection looks, unless another library has put it there."""
    pool = descriptor_pool.Default()
    try:
        pool.FindFileByName(V1_FILE)
    except KeyError:
        alpha = descriptor_pb2.FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(alpha)
        alpha.ClearField("options")  # of the languages, and that it is deprecated
        text = text_format.MessageToString(alpha).replace("v1alpha", "v1")
        pool.AddSerializedFile(text_format.Parse(text, descriptor_pb2.FileDescriptorProto()).SerializeToString())
