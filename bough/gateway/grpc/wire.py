"""The messages of `gateway.proto` as classes, made at run time from its compiled description.

So there is no generated code in the tree, and none that would tie the gateway to one version of protobuf. A test
compiles the proto and compares.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

PACKAGE = "bough.gateway.v1"
SERVICE = f"{PACKAGE}.Gateway"


def described() -> descriptor_pb2.FileDescriptorProto:
    """The compiled form of `gateway.proto`."""
    raw = files("bough.gateway.grpc").joinpath("gateway.desc").read_bytes()
    return descriptor_pb2.FileDescriptorSet.FromString(raw).file[0]


def _messages() -> dict[str, Any]:
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    file = pool.Add(described()) or pool.FindFileByName(described().name)
    return {name: message_factory.GetMessageClass(kind) for name, kind in file.message_types_by_name.items()}


_made = _messages()
GenerateRequest: Any = _made["GenerateRequest"]
GenerateReply: Any = _made["GenerateReply"]
HealthRequest: Any = _made["HealthRequest"]
HealthReply: Any = _made["HealthReply"]
